"""The paper's runs by name: each a function that returns a whole config.

CIFAR-100 (table 1): depth 8, width 256, patch 4, batch 512, peak learning rate 2e-3, weight decay 0.05. TinyImageNet
(table 2): 64 px, patch 8, batch 128. What the paper leaves open is in docs/deviations.md.
"""

from __future__ import annotations

from collections.abc import Callable

from oqc.config import Data, Run, Train, nearest
from oqc.models.registry import MODELS


def _cifar100(model: str) -> Run:
    return Run(model=MODELS[model], data=Data(name="cifar100"), train=Train())


def _tiny_imagenet(model: str) -> Run:
    return Run(model=MODELS[f"{model}_64px"], data=Data(name="tiny-imagenet"), train=Train(batch=128))


def cifar100_afbo() -> Run:
    """AFBO+PR, 6.37 M parameters. `oqc train --preset cifar100_afbo`. Paper: 64.25 ± 0.22."""
    return _cifar100("deep_vit_afbo")


def cifar100_full() -> Run:
    """OQC full, R 64, 6.97 M parameters. `oqc train --preset cifar100_full`. Paper: 65.59 ± 0.22."""
    return _cifar100("deep_vit_afbo_full_r64")


def cifar100_lowrank() -> Run:
    """OQC-LR, R 56, 7.19 M parameters. `oqc train --preset cifar100_lowrank`. Paper: 65.52 ± 0.25."""
    return _cifar100("deep_vit_afbo_lowrank_r56")


def cifar100_static() -> Run:
    """OQC-static, R 83, 7.59 M parameters. `oqc train --preset cifar100_static`. Paper: 65.44 ± 0.19."""
    return _cifar100("deep_vit_afbo_static_r83")


def cifar100_dynamic() -> Run:
    """OQC-dynamic, R 83, 7.59 M parameters. `oqc train --preset cifar100_dynamic`. Paper: 65.33 ± 0.11."""
    return _cifar100("deep_vit_afbo_dynamic_r83")


def tiny_imagenet_afbo() -> Run:
    """AFBO+PR, 6.43 M parameters. `oqc train --preset tiny_imagenet_afbo`. Paper: 50.45 ± 0.21."""
    return _tiny_imagenet("deep_vit_afbo")


def tiny_imagenet_full() -> Run:
    """OQC full, R 64, 7.03 M parameters. `oqc train --preset tiny_imagenet_full`. Paper: 51.36 ± 0.28."""
    return _tiny_imagenet("deep_vit_afbo_full_r64")


def tiny_imagenet_lowrank() -> Run:
    """OQC-LR, R 56, 7.25 M parameters. `oqc train --preset tiny_imagenet_lowrank`. Paper: 51.35 ± 0.11."""
    return _tiny_imagenet("deep_vit_afbo_lowrank_r56")


def tiny_imagenet_static() -> Run:
    """OQC-static, R 83, 7.65 M parameters. `oqc train --preset tiny_imagenet_static`. Paper: 51.47 ± 0.07."""
    return _tiny_imagenet("deep_vit_afbo_static_r83")


def tiny_imagenet_dynamic() -> Run:
    """OQC-dynamic, R 83, 7.65 M parameters. `oqc train --preset tiny_imagenet_dynamic`. Paper: 51.88 ± 0.32."""
    return _tiny_imagenet("deep_vit_afbo_dynamic_r83")


PRESETS: dict[str, Callable[[], Run]] = {
    preset.__name__: preset
    for preset in (
        cifar100_afbo,
        cifar100_full,
        cifar100_lowrank,
        cifar100_static,
        cifar100_dynamic,
        tiny_imagenet_afbo,
        tiny_imagenet_full,
        tiny_imagenet_lowrank,
        tiny_imagenet_static,
        tiny_imagenet_dynamic,
    )
}


def get(name: str) -> Run:
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()
