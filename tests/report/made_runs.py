"""Records as a suite leaves them, with planted effects."""

import random

from oqc import config
from oqc.experiments.presets import PRESETS
from oqc.experiments.suites import SUITES

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "device": "cuda",
    "python": "3.12.3",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "oqc": "0.1.0"},
    "commit": "ea2d3d7c7e2d1d7b0f3a",
}


def run(preset, seed, best, **mechanism):
    made = config.to_dict(PRESETS[preset]())
    made["train"]["seed"] = seed
    plain = made["model"]["ffn"]["complement"] == "none"
    metrics = {
        "before": None if plain else 0.14,
        "after": None if plain else 2e-8,
        "chance": None if plain else 0.107,
        "hidden_cosine": None if plain else 0.03,
        "gate_mean": None if plain else 0.2,
        "gate_std": None if plain else 0.1,
        "gate_token_std": None if plain else 0.05,
        "effective_rank": 77.0,
        "participation_ratio": 50.0,
        "separation_centroids": 1.01,
        "separation_euclidean": 1.3,
        "separation_cosine": 1.1,
        "separation_cosine_centred": 1.2,
        "separation_scatter": 0.4,
    }
    return {
        "preset": preset,
        "seed": seed,
        "best": best,
        "final": best - 0.1,
        "parameters": 6_370_000 if plain else 7_190_000,
        "images_per_s": 60_000.0 if plain else 48_000.0,
        "images_per_s_alone": 60_000.0 if plain else 48_000.0,
        "per_epoch": [{"epoch": 1, "test": best - 1}, {"epoch": 2, "test": best}],
        "mechanism": metrics | mechanism,
        "config": made,
        "environment": ENVIRONMENT,
        "seconds": 52.0,
        "setup_seconds": 4.0,
    }


def suite(effects, *, presets=SUITES["all"], seeds=4, noise=0.1):
    """Runs of `presets` at 64 plus their effect, with an effect of the seed and noise of their own."""
    draw = random.Random(0)
    shifts = [draw.gauss(0, 0.5) for _ in range(seeds)]
    records = []
    for preset in presets:
        for seed in range(seeds):
            jitter = {name: draw.gauss(mean, std) for name, mean, std in METRICS}
            jitter = {} if "vit" in preset else jitter
            best = 64 + effects.get(preset, 0.0) + shifts[seed] + draw.gauss(0, noise)
            records.append(run(preset, seed, best, **jitter))
    return records


METRICS = (("effective_rank", 77, 0.1), ("participation_ratio", 50, 0.1), ("separation_centroids", 1.01, 0.001))
