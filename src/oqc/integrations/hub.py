"""Deep-ViT on the Hugging Face hub, through huggingface_hub's mixin.

>>> from oqc.integrations.hub import HubDeepViT
>>> HubDeepViT.of(model).push_to_hub("name/my-deep-vit")
>>> model = HubDeepViT.from_pretrained("name/my-deep-vit")

What lies there is what `oqc.save` writes, so `oqc.load` takes a downloaded folder too, and an injection is kept.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from oqc.config import check_choice
from oqc.integrations import bases
from oqc.integrations.saving import RECORD, TENSORS, load, save
from oqc.models import DeepViT


class HubDeepViT(
    DeepViT,
    ModelHubMixin,
    library_name="oqc",
    paper_url="https://arxiv.org/abs/2604.09709",
    pipeline_tag="image-classification",
    tags=["vision-transformer", "orthogonal-quadratic-complements"],
):
    """Deep-ViT with `save_pretrained`, `push_to_hub` and `from_pretrained`."""

    @classmethod
    def of(cls, model: DeepViT) -> HubDeepViT:
        """The same model, not a copy, with the hub's methods."""
        if isinstance(model, cls):
            return model
        if type(model) is not DeepViT:
            raise ValueError(f"the hub takes a DeepViT here, got a {type(model).__name__}")
        model.__class__ = cls
        assert isinstance(model, HubDeepViT)
        return model

    def _save_pretrained(self, save_directory: Path) -> None:
        save(self, save_directory)
        # config.json, by which the hub shows and counts a model: as it is now
        self._hub_mixin_config = bases.describe(self).arguments["config"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> HubDeepViT:
        """The model of a repository or folder. `options` are huggingface_hub's (`revision`, `token`, ...) and
        `map_location`."""
        theirs = inspect.signature(super().from_pretrained).parameters.values()
        known = [one.name for one in theirs if one.kind is one.KEYWORD_ONLY]
        for name in options:
            check_choice("an option of from_pretrained", name, [*known, "map_location"])
        return super().from_pretrained(pretrained_model_name_or_path, **options)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, map_location: str = "cpu", **options: Any) -> HubDeepViT:
        folder = Path(model_id)
        if not folder.is_dir():
            wanted = ("revision", "cache_dir", "force_download", "local_files_only", "token")
            options = {name: options[name] for name in wanted}
            try:
                files = [hf_hub_download(model_id, name, **options) for name in (TENSORS, RECORD)]
            except EntryNotFoundError:
                raise ValueError(f"{model_id} is not a shared Deep-ViT: it lacks {TENSORS} or {RECORD}") from None
            folder = Path(files[-1]).parent
        if not (folder / RECORD).exists():
            raise ValueError(f"{model_id} is not a shared Deep-ViT: it has no {RECORD}")
        model = load(folder, map_location)
        if not isinstance(model, DeepViT):
            raise ValueError(f"{model_id} holds a {type(model).__name__}, not a DeepViT: use oqc.load")
        return cls.of(model)
