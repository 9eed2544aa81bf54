"""Prints where the GPU time of a training step goes, kernel by kernel.

python benchmarks/profile_step.py --complement lowrank --backend triton [--set train.deterministic=false]
"""

from __future__ import annotations

import argparse

import torch

from oqc import config as configs
from oqc.config import Data, Run, Train
from oqc.experiments import bench
from oqc.models import create_model
from oqc.train import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complement", default="none")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--rows", type=int, default=28)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    args = parser.parse_args()

    case = bench.cases(["afbo"], [args.complement], [args.backend], [args.mode], ["train"])[0]
    run = Run(model=case.model, data=Data(name="synthetic"), train=Train(mode=args.mode, backend=args.backend))
    run = configs.override(run, args.settings)
    model = create_model(run.model, seed=0, backend=args.backend)
    trainer = Trainer(model, bench._synthetic(run.model, run.train.batch), run, device="cuda")
    trainer.prepare()

    def steps(n: int) -> None:
        with trainer.scope():
            for _ in range(n):
                trainer.step.replay()
        trainer.synchronize()

    steps(5)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with trainer.scope():
        start.record()
        for _ in range(30):
            trainer.step.replay()
        end.record()
    trainer.synchronize()
    ms = start.elapsed_time(end) / 30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps(3)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in events) / 3e3
    print(
        f"{args.complement} {args.backend} {args.mode} {args.settings}: {ms:.2f} ms a step,"
        f" {run.train.batch / ms:.1f}k images/s"
    )
    print(
        f"busy {busy:.2f} ms in {sum(e.count for e in events) // 3} kernels,"
        f" ready after {trainer.prepare_seconds:.0f} s"
    )
    for event in events[: args.rows]:
        print(f"{event.self_device_time_total / 3e3:8.3f} ms {event.count // 3:5d} x  {event.key[:110]}")


if __name__ == "__main__":
    main()
