"""Looks for tokens that cuBLAS drops from a product over them; writes results/parity/products-<gpu>.txt.

    python benchmarks/lost_tokens.py [--out results/parity]

a^T b in bf16 over T rows of random numbers, by PyTorch's own product and by `oqc.ops.products.over_tokens`, against
float64. A row less is an error of 1 / sqrt(T), far above what rounding leaves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from oqc.ops.products import over_tokens
from oqc.train.environment import environment

SHAPES = ((384, 736), (448, 768), (368, 736), (256, 664), (320, 352), (256, 256), (768, 3072))
TOKENS = (65, 129, 1025, 2049, 2561, *range(4161, 4292), 4353, 5121, 6401, 8193, 8257, 8385)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/parity"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this looks at a GPU's products, and PyTorch sees none")
    torch.manual_seed(0)
    lines, worst = [], 0.0
    for m, n in SHAPES:
        a, b = (torch.randn(max(TOKENS), k, device="cuda").bfloat16() for k in (m, n))
        lost = []
        for tokens in TOKENS:
            rows = (a[:tokens], b[:tokens])
            truth = rows[0].double().T @ rows[1].double()
            direct = max(error(torch.mm(rows[0].T, rows[1], torch.float32), truth), error(rows[0].T @ rows[1], truth))
            worst = max(worst, error(over_tokens(*rows), truth))
            if direct > 0.5 * tokens**-0.5:
                lost.append(f"{tokens} ({direct:.4f}: {direct**2 * tokens:.1f} rows)")
        lines.append(f"{m} x {n}: {', '.join(lost) or 'none'}")
    here = environment(torch.device("cuda"))
    name = here["gpu"].lower().replace(" ", "-")
    args.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(
        (
            "Rows that a.T @ b drops in bf16, its result in bf16 or fp32, by their number (error, rows it means):",
            *lines,
            f"largest error of over_tokens in any of these: {worst:.1e}",
            json.dumps(here),
        )
    )
    (args.out / f"products-{name}.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
