"""`oqc models`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oqc.config import nearest
from oqc.models import counting, registry


def models(
    pattern: Annotated[str, typer.Argument(help="Names to list; may have wildcards.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False,
) -> None:
    """List the models that create_model knows, with their parameters, and which are in the paper's tables 1 and 2."""
    names = registry.list_models(pattern)
    if not names:
        raise ValueError(f"no model matches {pattern!r}{nearest(pattern, registry.MODELS)}")
    found: list[dict[str, Any]] = []
    for name in names:
        config = registry.MODELS[name]
        found.append(
            {
                "name": name,
                "image_size": config.image_size,
                "num_classes": config.num_classes,
                "parameters": counting.parameters(config),
                "host": config.ffn.host,
                "complement": config.ffn.complement,
                "rank": config.ffn.rank if config.ffn.complement != "none" else None,
                "readout": config.readout,
                "paper": name in registry.PAPER,
            }
        )
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table("Model", "Image", "Classes", "Parameters", "Main tables", box=None)
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for row in found:
        table.add_row(
            row["name"],
            f"{row['image_size']} px",
            f"{row['num_classes']}",
            f"{row['parameters'] / 1e6:.2f} M",
            "yes" if row["paper"] else "",
        )
    Console(width=None if Console().is_terminal else 100).print(table)
