"""Deep-ViT in timm: importing this module registers every name of `oqc.list_models()`.

>>> import oqc.integrations.timm
>>> timm.create_model("deep_vit_afbo_lowrank_r56", num_classes=10, features_only=True)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import timm
from timm.models import build_model_with_cfg, checkpoint, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from oqc.config import Model, check_choice
from oqc.models import DeepViT, list_models, model_config
from oqc.nn.ffn import fold_together
from oqc.ops.fused import Folded


class TimmDeepViT(DeepViT):
    """Deep-ViT with what timm asks of a model: unpooled features, a head that can be replaced, intermediates."""

    def __init__(self, config: Model, *, global_pool: str = "avg", **options: Any) -> None:
        super().__init__(config, **options)
        check_choice("global_pool", global_pool, ("avg", ""))
        self.num_classes, self.global_pool = config.num_classes, global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = config.width
        self.grad_checkpointing = False
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": config.width, "reduction": config.patch_size}
            for i in range(config.depth)
        ]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the patch embedding as the convolution that `_as_convolution` makes of it, too."""
        weight = state_dict.get(f"{prefix}patch_embed.weight")
        if weight is not None and weight.dim() == 4:
            state_dict[f"{prefix}patch_embed.weight"] = weight.flatten(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        blocks = [(r"^blocks\.(\d+)", None), (r"^norm|^readout", (99999,))]
        return {"stem": r"^patch_embed|^pos_embed", "blocks": r"^blocks\.(\d+)" if coarse else blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            check_choice("global_pool", global_pool, ("avg", ""))
            self.global_pool = global_pool
        self.num_classes = num_classes
        like: dict[str, Any] = {"device": self.pos_embed.device, "dtype": self.pos_embed.dtype}
        self.head = nn.Linear(self.num_features, num_classes, **like) if num_classes else nn.Identity()

    def _run_block(self, block: nn.Module, x: Tensor, folded: Folded | None = None) -> Tensor:
        if self.grad_checkpointing and self.training:
            return checkpoint(block, x)
        return block(x) if folded is None else block(x, folded)

    def _read(self, last: Tensor, penultimate: Tensor) -> Tensor:
        return self.norm(last if self.readout is None else self.readout(last, penultimate))

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens after readout and norm, [B, N, D]."""
        folded: Sequence[Folded | None] = [None] * len(self.blocks)
        if not (self.grad_checkpointing and self.training):
            folded = fold_together([getattr(block, "ffn", None) for block in self.blocks], x)
        x = penultimate = self.embed(x)
        for block, weights in zip(self.blocks, folded, strict=True):
            penultimate, x = x, self._run_block(block, x, weights)
        return self._read(x, penultimate)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean(1) if self.global_pool == "avg" else x
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, intermediates: bool = False) -> Any:
        return super().forward(x, intermediates=True) if intermediates else self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Block outputs as maps [B, D, h, w] (or "NLC" tokens), and with them the final tokens."""
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        wanted, last = feature_take_indices(len(self.blocks), indices)
        side = self.config.image_size // self.config.patch_size
        x = penultimate = self.embed(x)
        taken: list[Tensor] = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            penultimate, x = x, self._run_block(block, x)
            if i in wanted:
                tokens = self.norm(x) if norm else x
                taken.append(tokens.mT.unflatten(2, (side, side)).contiguous() if output_fmt == "NCHW" else tokens)
        return taken if intermediates_only else (self._read(x, penultimate), taken)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops what the block outputs `indices` do not need."""
        wanted, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]
        if prune_head:
            self.readout = None
            self.reset_classifier(0, "")
        return wanted


def _build(
    config: Model,
    *,
    img_size: int | tuple[int, int] | None = None,
    in_chans: int | None = None,
    num_classes: int | None = None,
    global_pool: str = "avg",
    **options: Any,
) -> TimmDeepViT:
    """timm's names for a config's fields; the rest goes to the model (`seed`, `backend`, `device`, `dtype`)."""
    if isinstance(img_size, (tuple, list)):
        if img_size[0] != img_size[1]:
            raise ValueError(f"img_size must be square, got {tuple(img_size)}")
        img_size = img_size[0]
    fields: dict[str, Any] = {"image_size": img_size, "channels": in_chans, "num_classes": num_classes}
    config = dataclasses.replace(config, **{name: value for name, value in fields.items() if value is not None})
    return TimmDeepViT(config, global_pool=global_pool, **options)


def _as_convolution(state_dict: dict[str, Any], model: TimmDeepViT) -> dict[str, Any]:
    """Pretrained weights with the patch embedding [D, C, patch, patch], which timm can bring to other channels."""
    weight, patch = state_dict.get("patch_embed.weight"), model.config.patch_size
    if weight is None or weight.dim() != 2 or weight.shape[1] % patch**2:
        return state_dict
    return state_dict | {"patch_embed.weight": weight.unflatten(1, (-1, patch, patch))}


def _entrypoint(name: str) -> Any:
    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        known = {field.name for kind in (Model, type(Model().ffn)) for field in dataclasses.fields(kind)}
        overrides = {key: options.pop(key) for key in list(options) if key in known and key != "num_classes"}
        for key in [key for key in options if key.endswith(("drop_rate", "drop_path_rate"))]:  # timm's scripts pass 0
            if rate := options.pop(key):
                raise ValueError(
                    f"{key} must be 0, a Deep-ViT has none (its networks' dropout is drop=...), got {rate}"
                )
        build = partial(_build, model_config(name, **overrides))
        features = {"out_indices": 3, "feature_cls": "getter"}
        return build_model_with_cfg(
            build, name, pretrained, feature_cfg=features, pretrained_filter_fn=_as_convolution, **options
        )

    create.__name__, create.__module__ = name, __name__
    create.__doc__ = f"Deep-ViT {name!r}, with its fields (depth, width, rank, ...) as further arguments."
    return create


default_cfgs = {
    name: {
        "url": "",
        "input_size": (config.channels, config.image_size, config.image_size),
        "num_classes": config.num_classes,
        "fixed_input_size": True,
        "pool_size": None,
        "crop_pct": 1.0,
        "first_conv": "patch_embed",
        "classifier": "head",
    }
    for name, config in ((name, model_config(name)) for name in list_models())
}
__all__ = ["TimmDeepViT"]
for _name in list_models():
    if not timm.is_model(_name):
        register_model(_entrypoint(_name))
