"""A cache of its own for every test, and readers that expect the small sets of `data_samples`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import data_samples as samples
import pytest

from oqc.data import sources


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OQC_DATA", str(folder))
    return folder


@pytest.fixture
def untouched(cache: Path) -> Callable[[], bool]:
    """Whether the cache holds no file at all, hidden ones included."""
    return lambda: not [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")]


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the readers expect the small sets; `md5` of an archive, `url` of a server if given."""

    def small_reader(name: str, layout: sources.Layout) -> partial:
        return partial(layout.read.func, samples.TINY if name == "tiny-imagenet" else samples.SMALL[name])

    def replace(name: str, form: str, archive: Path | None = None, url: str | None = None) -> None:
        given = sources.OFFICIAL[name]
        md5 = hashlib.md5(archive.read_bytes()).hexdigest() if archive else None
        layouts = tuple(
            dataclasses.replace(
                layout,
                read=small_reader(name, layout),
                md5=md5 if md5 and layout is samples.layout_of(name, form) else layout.md5,
            )
            for layout in given.layouts
        )
        monkeypatch.setitem(sources.OFFICIAL, name, sources.Official(url or given.url, layouts))

    return replace
