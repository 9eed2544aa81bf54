"""`oqc analyze`."""

from __future__ import annotations

import json
import os
import shlex

import typer
from rich.console import Console
from rich.table import Table

from oqc.analysis import METRICS, SEPARATION, mechanism_on_test
from oqc.cli.train import AsJson, DataDir, Device, Folder, Which, config_of, load_model
from oqc.data import load
from oqc.experiments.suites import RESULTS
from oqc.train import RunFolder, find_device

MEANING = {
    "before": "overlap of branch and host, before the projection: mean |cos(q, m)|",
    "after": "the same after it: mean |cos(q_perp, m)|",
    "chance": "overlap of two random directions in that space",
    "hidden_cosine": "overlap of update and host where they add up: mean |cos(delta, b)|",
    "gate_mean": "how much of the complement is used",
    "gate_std": "its spread over tokens and blocks",
    "gate_token_std": "its spread over the tokens of a block: 0 where it does not look at its input",
    "effective_rank": "directions that the features use: exp of the spectrum's entropy",
    "participation_ratio": "the same with more weight on the large ones",
    "separation_centroids": "distance between class centroids over that within",
    "separation_euclidean": "distance between classes over within, Euclidean",
    "separation_cosine": "the same, cosine distance",
    "separation_cosine_centred": "the same, cosine distance of centred features",
    "separation_scatter": "between-class over within-class scatter",
}
assert (*MEANING,) == METRICS


def analyze(
    run: Folder,
    checkpoint: Which = "last",
    data_dir: DataDir = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Mechanism of a run's model over its test images: overlap of branch and host, gate, geometry of the features."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # see `oqc train`
    if (run / RESULTS).exists():
        report = f"oqc report {shlex.quote(str(run))}"
        raise ValueError(f"{run} holds records and no weights; their metrics stand in its {RESULTS}: {report}")
    config, own = config_of(run, data_dir), find_device(device)
    model, step = load_model(run, config, checkpoint, own)
    dataset = load(config.data)
    RunFolder(run).check_data(dataset)
    found = mechanism_on_test(model, dataset, config.train, own)
    if as_json:
        about = {"run": str(run), "checkpoint": checkpoint, "step": step, "images": len(dataset.test)}
        typer.echo(json.dumps(about | {"mechanism": found}))
        return
    title = f"{run}, {checkpoint} weights, step {step}, {len(dataset.test)} test images"
    table = Table("Metric", "Value", "", box=None, title=title)
    table.columns[1].justify = "right"
    for name, value in found.items():
        meaning = MEANING[name] + (" (set beside the paper's)" if name == SEPARATION else "")
        table.add_row(name, "–" if value is None else f"{value:.4g}", meaning)
    Console(width=None if Console().is_terminal else 120).print(table)
