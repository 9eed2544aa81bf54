"""`oqc data`: list, prepare and verify data sets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oqc.cli.train import AsJson
from oqc.data import pack, sources

app = typer.Typer(help="List, prepare and verify data sets.", no_args_is_help=True)
console = Console(soft_wrap=True, highlight=False)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help=f"{', '.join(sources.KNOWN)}, or a path: an image folder, an .npz file.")
]
Root = Annotated[str | None, typer.Option(help="The official archive or folder, or where it lies. Default: download.")]
Size = Annotated[int | None, typer.Option(help="Resize the images to this side. Default: as they are.")]


@app.command("list")
def list_sets(as_json: AsJson = False) -> None:
    """The known data sets, and every pack in the cache."""
    packs, damaged = [], []
    for folder in pack.find():
        try:
            packs.append(_describe(folder))
        except ValueError as error:
            damaged.append({"name": folder.name.rpartition("-")[0], "pack": str(folder), "damaged": str(error)})
    missing = sorted(set(sources.KNOWN) - {row["name"] for row in packs + damaged})
    rows = packs + [{"name": name, "pack": None} for name in missing]
    if as_json:
        typer.echo(json.dumps(rows + damaged, indent=1))
        return
    for row in rows:
        console.print(_line(row) if row["pack"] else f"{row['name']}: not packed", markup=False)
    for row in damaged:
        console.print(f"damaged: {row['damaged']}", markup=False)


@app.command()
def prepare(name: Name, root: Root = None, image_size: Size = None) -> None:
    """Verify a data set and pack it into the cache, from ROOT or by a download."""
    console.print(_line(_describe(sources.prepare(name, root, image_size))), markup=False)


@app.command()
def verify(name: Name) -> None:
    """Hash the packs of a data set again and compare with what was packed."""
    folders = list(pack.find(name))
    if not folders:
        way = f"oqc data prepare {shlex.quote(name)}"
        raise ValueError(f"the cache {pack.cache()} has no pack of {name!r}; make one with: {way}")
    for folder in folders:
        line = _line(_describe(folder))
        pack.verify(folder)
        console.print(f"intact: {line}", markup=False)


def _describe(folder: Path) -> dict[str, Any]:
    manifest = pack.read_manifest(folder)
    try:
        pack.check_sizes(folder, manifest)
    except ValueError as error:
        raise ValueError(f"{error}: rm -r {shlex.quote(str(folder))} && {sources.command(manifest)}") from None
    train, test = (manifest["arrays"][f"{part}_images"]["shape"] for part in ("train", "test"))
    return {
        "name": manifest["name"],
        "train": train[0],
        "test": test[0],
        "image": train[1:],
        "classes": len(manifest["classes"]),
        "source": manifest["source"],
        "digest": manifest["digest"],
        "pack": str(folder),
    }


def _line(row: dict[str, Any]) -> str:
    image = "x".join(map(str, row["image"]))
    return (
        f"{row['name']}: {row['train']} train and {row['test']} test images of {image}, {row['classes']} classes,"
        f" from {row['source']}, packed in {row['pack']}"
    )
