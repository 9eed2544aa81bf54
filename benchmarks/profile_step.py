"""Prints where the GPU time of a training step or of inference goes, kernel by kernel.

python benchmarks/profile_step.py --complement lowrank --backend triton [--phase inference] [--set deterministic=false]
"""

from __future__ import annotations

import argparse

import torch

from oqc import config as configs
from oqc.config import Train
from oqc.experiments import bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complement", default="none")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--phase", default="train", choices=["train", "inference"])
    parser.add_argument("--rows", type=int, default=28)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="a field of the training")
    args = parser.parse_args()

    case = bench.cases(["afbo"], [args.complement], [args.backend], [args.mode], [args.phase])[0]
    train = configs.override(Train(mode=args.mode, backend=args.backend), args.settings)
    one = bench.Prepared(case, torch.device("cuda"), train)
    one.time(5)
    ms = 1e3 * one.time(30)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one.time(3)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in events) / 3e3
    print(
        f"{args.complement} {args.backend} {args.mode} {args.phase} {args.settings}: {ms:.3f} ms a step,"
        f" {train.batch / ms:.1f}k images/s"
    )
    print(f"busy {busy:.2f} ms in {sum(e.count for e in events) // 3} kernels, ready after {one.compile_s:.0f} s")
    for event in events[: args.rows]:
        print(f"{event.self_device_time_total / 3e3:8.3f} ms {event.count // 3:5d} x  {event.key[:110]}")


if __name__ == "__main__":
    main()
