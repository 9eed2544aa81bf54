"""The paper's runs and our controls by name: each a function that returns a whole config.

A docstring is the run's receipt: what it is, the command that runs it beside what it is compared with, the paper's best
test accuracy with its place, and ours (`make results` writes that line from results/). Alone a preset runs with
`oqc train --preset NAME`. Names are those of the published rows (`experiments/published.py`): the host is AFBO where
none is named, the penultimate-residual readout (PR) is on but for `_nopr`. `protocol.py` says how they are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from oqc.config import FFN, Model, Run, Train, nearest
from oqc.experiments.protocol import (
    CIFAR100_DATA,
    CIFAR100_TRAIN,
    TINY_IMAGENET_DATA,
    TINY_IMAGENET_TRAIN,
    VIT_TINY_TRAIN,
)
from oqc.models.registry import MODELS, TINY_IMAGENET

SHOWN = 12  # at most of the presets that begin as an unknown one does


def _cifar100(ffn: FFN, *, readout: bool = True, train: Train = CIFAR100_TRAIN) -> Run:
    return Run(model=Model(readout=readout, ffn=ffn), data=CIFAR100_DATA, train=train)


def _vit_tiny(model: str) -> Run:
    return Run(model=MODELS[model], data=CIFAR100_DATA, train=VIT_TINY_TRAIN)


def _tiny_imagenet(ffn: FFN) -> Run:
    return Run(model=Model(**TINY_IMAGENET, ffn=ffn), data=TINY_IMAGENET_DATA, train=TINY_IMAGENET_TRAIN)


def cifar100_afbo() -> Run:
    """AFBO+PR: 6.37 M parameters. `oqc reproduce table1`. Paper (table 1): 64.25 ± 0.22.

    Ours: 64.32 ± 0.44 over 5 seeds, 51 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN())


def cifar100_full_r64() -> Run:
    """OQC full, R 64: 6.97 M parameters. `oqc reproduce table1`. Paper (table 1): 65.59 ± 0.22.

    Ours: 65.04 ± 0.39 over 5 seeds, 53 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="full", rank=64))


def cifar100_lowrank_r56() -> Run:
    """OQC-LR, R 56: 7.19 M parameters. `oqc reproduce table1`. Paper (table 1): 65.52 ± 0.25.

    Ours: 64.79 ± 0.23 over 5 seeds, 53 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=56))


def cifar100_static_r83() -> Run:
    """OQC-static, R 83: 7.59 M parameters. `oqc reproduce table1`. Paper (table 1): 65.44 ± 0.19.

    Ours: 63.50 ± 0.19 over 5 seeds, 55 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="static", rank=83))


def cifar100_dynamic_r83() -> Run:
    """OQC-dynamic, R 83: 7.59 M parameters. `oqc reproduce table1`. Paper (table 1): 65.33 ± 0.11.

    Ours: 65.04 ± 0.37 over 5 seeds, 55 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="dynamic", rank=83))


def cifar100_shared_r56() -> Run:
    """Shared u and v, R 56: 6.96 M parameters. `oqc reproduce designs`. Paper (alternative designs): 64.85 ± 0.14.

    Ours: 64.69 ± 0.33 over 3 seeds, 54 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="shared", rank=56))


def cifar100_unprojected_r56() -> Run:
    """No projection, R 56: 6.89 M parameters. `oqc reproduce designs`. Paper (alternative designs): 63.47 ± 0.19.

    Ours: 64.32 ± 0.52 over 3 seeds, 52 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="unprojected", rank=56))


def cifar100_ungated_r56() -> Run:
    """No gate, R 56: 7.19 M parameters. `oqc reproduce designs`. Paper (alternative designs): 63.03 ± 0.23.

    Ours: 62.40 ± 0.33 over 3 seeds, 53 s a run on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="ungated", rank=56))


def cifar100_static_r83_closed() -> Run:
    """OQC-static, R 83, gate from 0.12: 7.59 M parameters. `oqc reproduce gate-start`. Paper: no such run.

    Ours: 65.03 ± 0.16 over 2 seeds, 46 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="static", rank=83, gate_init=-2.0))


def cifar100_unprojected_r56_closed() -> Run:
    """No projection, R 56, gate from 0.12: 6.89 M parameters. `oqc reproduce gate-start`. Paper: no such run.

    Ours: 65.12 ± 0.01 over 2 seeds, 44 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="unprojected", rank=56, gate_init=-2.0))


def cifar100_afbo_6_97m() -> Run:
    """AFBO+PR widened to full's size: 6.97 M parameters. `oqc reproduce capacity`. Paper: no such run.

    Ours: 64.46 ± 0.53 over 3 seeds, 45 s a run on one NVIDIA H200.
    """
    return _cifar100(FFN(hidden=760))


def cifar100_afbo_7_19m() -> Run:
    """AFBO+PR widened to low-rank's size: 7.19 M parameters. `oqc reproduce capacity`. Paper: no such run.

    Ours: 64.59 ± 0.23 over 3 seeds, 70 s a run on one NVIDIA H200.
    """
    return _cifar100(FFN(hidden=794))


def cifar100_afbo_7_59m() -> Run:
    """AFBO+PR widened to static's size: 7.59 M parameters. `oqc reproduce capacity`. Paper: no such run.

    Ours: 64.57 ± 0.23 over 3 seeds, beside other work on one NVIDIA H200.
    """
    return _cifar100(FFN(hidden=858))


def cifar100_mlp_nopr() -> Run:
    """MLP, no PR: 6.37 M parameters. `oqc reproduce decomposition`. Paper (table 4): 47.27 ± 0.42.

    Ours: 56.37 ± 0.19 over 3 seeds, 37 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(host="mlp"), readout=False)


def cifar100_mlp() -> Run:
    """MLP+PR: 6.37 M parameters. `oqc reproduce decomposition`. Paper (table 4): 47.29 ± 0.25.

    Ours: 56.29 ± 0.37 over 3 seeds, 37 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(host="mlp"))


def cifar100_mlp_lowrank_r56_nopr() -> Run:
    """OQC-LR, R 56, on an MLP, no PR: 7.52 M parameters. `oqc reproduce decomposition`. Paper (table 4): 50.75 ± 0.23.

    Ours: 56.00 ± 0.47 over 3 seeds, 42 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(host="mlp", complement="lowrank", rank=56), readout=False)


def cifar100_mlp_lowrank_r56() -> Run:
    """OQC-LR, R 56, on an MLP: 7.52 M parameters. `oqc reproduce decomposition`. Paper (table 4): 51.39 ± 0.42.

    Ours: 56.07 ± 0.64 over 3 seeds, 42 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(host="mlp", complement="lowrank", rank=56))


def cifar100_afbo_nopr() -> Run:
    """AFBO, no PR: 6.37 M parameters. `oqc reproduce decomposition`. Paper (table 4): 62.82 ± 0.45.

    Ours: 63.90 ± 0.15 over 3 seeds, 41 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(), readout=False)


def cifar100_lowrank_r56_nopr() -> Run:
    """OQC-LR, R 56, no PR: 7.19 M parameters. `oqc reproduce decomposition`. Paper (table 4): 63.88 ± 0.29.

    Ours: 64.56 ± 0.37 over 3 seeds, 41 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=56), readout=False)


def cifar100_full_r16() -> Run:
    """OQC full, R 16: 6.52 M parameters. `oqc reproduce rank-sweep`. Paper (rank sweep): 64.45 ± 0.59.

    Ours: 64.38 ± 0.35 over 2 seeds, 43 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="full", rank=16))


def cifar100_full_r32() -> Run:
    """OQC full, R 32: 6.67 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 65.24 ± 0.24 over 2 seeds, 43 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="full", rank=32))


def cifar100_full_r48() -> Run:
    """OQC full, R 48: 6.82 M parameters. `oqc reproduce rank-sweep`. Paper (rank sweep): 65.13 ± 0.12.

    Ours: 64.67 ± 0.17 over 2 seeds, 45 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="full", rank=48))


def cifar100_full_r56() -> Run:
    """OQC full, R 56: 6.89 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 65.13 ± 0.21 over 2 seeds, 45 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="full", rank=56))


def cifar100_lowrank_r16() -> Run:
    """OQC-LR, R 16: 6.60 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 63.55 ± 0.18 over 2 seeds, 44 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=16))


def cifar100_lowrank_r32() -> Run:
    """OQC-LR, R 32: 6.84 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 64.78 ± 0.06 over 2 seeds, 44 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=32))


def cifar100_lowrank_r48() -> Run:
    """OQC-LR, R 48: 7.07 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 65.19 ± 0.38 over 2 seeds, 45 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=48))


def cifar100_lowrank_r64() -> Run:
    """OQC-LR, R 64: 7.31 M parameters. `oqc reproduce rank-sweep`. Paper (rank figure (a)): no number.

    Ours: 65.17 ± 0.26 over 2 seeds, 45 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(complement="lowrank", rank=64))


def cifar100_afbo_grouped() -> Run:
    """Grouped AFBO+PR: 6.37 M parameters. `oqc reproduce hosts`. Paper: no such run.

    Ours: 63.53 ± 0.23 over 2 seeds, 85 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(groups=4))


def cifar100_afbo_grouped_lowrank_r56() -> Run:
    """OQC-LR, R 56, on grouped AFBO: 7.49 M parameters. `oqc reproduce hosts`. Paper: no such run.

    Ours: 64.17 ± 0.37 over 2 seeds, 86 s a run, up to 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(groups=4, complement="lowrank", rank=56))


def cifar100_swiglu() -> Run:
    """SwiGLU+PR: 6.36 M parameters. `oqc reproduce hosts`. Paper: no such run.

    Ours: 55.44 over 1 seed, 42 s a run on one NVIDIA H200.
    """
    return _cifar100(FFN(host="swiglu"))


def cifar100_swiglu_lowrank_r56() -> Run:
    """OQC-LR, R 56, on SwiGLU: 7.20 M parameters. `oqc reproduce hosts`. Paper: no such run.

    Ours: 55.70 over 1 seed, 43 s a run on one NVIDIA H200.
    """
    return _cifar100(FFN(host="swiglu", complement="lowrank", rank=56))


def cifar100_vit_tiny() -> Run:
    """ViT-Tiny, MLP, no PR: 5.38 M parameters. `oqc reproduce vit-tiny`. Paper (limitations): 23.94 ± 0.38.

    Ours: 56.58 over 1 seed, 42 s a run on one NVIDIA H200.
    """
    return _vit_tiny("vit_tiny")


def cifar100_vit_tiny_pr() -> Run:
    """ViT-Tiny, MLP+PR: 5.38 M parameters. `oqc reproduce vit-tiny`. Paper (limitations): 24.37 ± 0.95.

    Ours: 56.19 over 1 seed, 43 s a run on one NVIDIA H200.
    """
    return _vit_tiny("vit_tiny_pr")


def cifar100_afbo_45epochs() -> Run:
    """AFBO+PR for 45 epochs: 6.37 M parameters. `oqc reproduce calibration`. Paper: no such run.

    Ours: 63.53 ± 0.47 over 3 seeds, 36 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(), train=replace(CIFAR100_TRAIN, epochs=45))


def cifar100_afbo_50epochs() -> Run:
    """AFBO+PR for 50 epochs: 6.37 M parameters. `oqc reproduce calibration`. Paper: no such run.

    Ours: 63.62 ± 0.32 over 3 seeds, 40 s a run, 2 side by side, on one NVIDIA H200.
    """
    return _cifar100(FFN(), train=replace(CIFAR100_TRAIN, epochs=50))


def tiny_imagenet_afbo() -> Run:
    """AFBO+PR: 6.43 M parameters. `oqc train --preset tiny_imagenet_afbo`. Paper (table 2): 50.45 ± 0.21.

    Ours: not run yet.
    """
    return _tiny_imagenet(FFN())


def tiny_imagenet_full_r64() -> Run:
    """Full, R 64: 7.03 M parameters. `oqc train --preset tiny_imagenet_full_r64`. Paper (table 2): 51.36 ± 0.28.

    Ours: not run yet.
    """
    return _tiny_imagenet(FFN(complement="full", rank=64))


def tiny_imagenet_lowrank_r56() -> Run:
    """Low-rank, R 56: 7.25 M parameters. `oqc train --preset tiny_imagenet_lowrank_r56`. Paper (table 2): 51.35 ± 0.11.

    Ours: not run yet.
    """
    return _tiny_imagenet(FFN(complement="lowrank", rank=56))


def tiny_imagenet_static_r83() -> Run:
    """Static, R 83: 7.65 M parameters. `oqc train --preset tiny_imagenet_static_r83`. Paper (table 2): 51.47 ± 0.07.

    Ours: not run yet.
    """
    return _tiny_imagenet(FFN(complement="static", rank=83))


def tiny_imagenet_dynamic_r83() -> Run:
    """Dynamic, R 83: 7.65 M parameters. `oqc train --preset tiny_imagenet_dynamic_r83`. Paper (table 2): 51.88 ± 0.32.

    Ours: not run yet.
    """
    return _tiny_imagenet(FFN(complement="dynamic", rank=83))


PRESETS: dict[str, Callable[[], Run]] = {
    name: value for name, value in list(globals().items()) if name.startswith(("cifar100_", "tiny_imagenet_"))
}


def get(name: str) -> Run:
    if name not in PRESETS:
        begins = (name[:end] for end in range(len(name), -1, -1))
        alike = next(found for one in begins if (found := [known for known in PRESETS if known.startswith(one)]))
        more = f" and {len(alike) - SHOWN} more: a longer beginning shows them" if len(alike) > SHOWN else ""
        raise ValueError(
            f"unknown preset {name!r}{nearest(name, PRESETS)} (there are {', '.join(alike[:SHOWN])}{more})"
        )
    return PRESETS[name]()
