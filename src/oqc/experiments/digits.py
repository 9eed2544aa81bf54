"""Any run of the suites on scikit-learn's digits: the same method, small enough for a CPU.

Deep-ViT of width 256 and depth 8 becomes one of width 48 and depth 3 on 8 x 8 images with patches of 2. Everything that
is a size (width, depth, rank, a hidden width that is given) shrinks in proportion, so that what differs in the paper
differs here. It shows the whole path; 359 test images settle no question of accuracy.
"""

from __future__ import annotations

from dataclasses import replace

from oqc.config import Run
from oqc.experiments.protocol import DIGITS_DATA, DIGITS_TRAIN

WIDTH, DEPTH, HEADS = 48 / 256, 3 / 8, 3


def on_digits(run: Run) -> Run:
    """`run` with its model shrunk, trained as the digits are; its seed stays."""
    model, ffn = run.model, run.model.ffn
    small = replace(
        model,
        image_size=8,
        patch_size=2,
        channels=1,
        num_classes=10,
        width=round(model.width * WIDTH),
        depth=round(model.depth * DEPTH),
        heads=HEADS,
        ffn=replace(
            ffn,
            hidden=None if ffn.hidden is None else round(ffn.hidden * WIDTH),
            rank=round(ffn.rank * WIDTH),
        ),
    )
    return Run(model=small, data=DIGITS_DATA, train=replace(DIGITS_TRAIN, seed=run.train.seed))
