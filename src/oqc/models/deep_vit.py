"""Deep-ViT, the paper's backbone, whole: pre-norm blocks, learned positions, no class token, mean pooling.

images [B, C, h, w] -> patches [B, N, D] -> depth x (x + attention(norm x); x + ffn(norm x))
-> readout over the last two block outputs -> norm -> mean over tokens [B, D] -> head [B, classes]
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from oqc import ops, seeding
from oqc.config import Model, whole
from oqc.nn import OQCFFN, Complement, PenultimateResidual, fold_together
from oqc.nn.complements import check_dtype


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, backend: str, **factory: Any) -> None:
        super().__init__()
        self.heads, self.backend = heads, backend
        self.qkv = nn.Linear(width, 3 * width, **factory)
        self.proj = nn.Linear(width, width, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(ops.self_attention(self.qkv(x), self.heads, backend=self.backend))


class Block(nn.Module):
    def __init__(self, config: Model, backend: str, **factory: Any) -> None:
        super().__init__()
        self.backend = backend
        ffn, side = config.ffn, config.image_size // config.patch_size
        self.norm1 = nn.LayerNorm(config.width, **factory)
        self.attn = Attention(config.width, config.heads, backend, **factory)
        self.norm2 = nn.LayerNorm(config.width, **factory)
        self.ffn = OQCFFN(
            config.width,
            ffn.hidden,
            host=ffn.host,
            match=ffn.match if ffn.hidden is None else None,
            groups=ffn.groups,
            complement=ffn.complement,
            rank=ffn.rank,
            gate_init=ffn.gate_init,
            eps=ffn.eps,
            drop=ffn.drop,
            grid=(side, side),
            backend=backend,
            **factory,
        )

    def forward(
        self,
        x: Tensor,
        folded: ops.fused.Folded | None = None,
        y: Tensor | None = None,  # norm1(x), where it is there already
        then: ops.Norm | None = None,  # of the output, to be returned as well, if it can be
    ) -> Any:
        # What is not as it was built, or is watched, gets the norm's own output, and is seen to give its own.
        attn, ffn = self.attn, self.ffn
        if y is None:
            x, y = self.enter(x)
        whole = type(ffn) is OQCFFN and not ops.has_hooks(ffn)
        half = whole and ffn.takes_half()
        x, y = ops.residual_norm(x, attn(y), self.norm2, backend=self.backend if half else "torch")
        if whole:
            return ffn(y, folded, residual=x, then=then)
        x = x + (ffn(y) if folded is None else ffn(y, folded))  # another module there takes y alone
        return x if then is None else (x, None)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x, to be used from here on, and norm1(x)."""
        return ops.residual_norm(x, None, self.norm1, backend=self.backend if self._takes_half() else "torch")

    def _takes_half(self) -> bool:
        """Whether all that reads norm1's output is a plain layer, for which autocast rounds it anyway."""
        return type(self.attn) is Attention and not ops.has_hooks(self.attn) and ops.is_plain(self.attn.qkv)

    def ahead(self, x: Tensor) -> ops.Norm | None:
        """What of norm1 may be done by the kernel that makes x, if any may."""
        known = type(self) is Block and not ops.has_hooks(self) and self._takes_half()
        return ops.ahead(x, self.norm1, backend=self.backend) if known else None

    def intermediates(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = x + self.attn(self.norm1(x))
        y, named = self.ffn.intermediates(self.norm2(x))
        return x + y, named


class DeepViT(nn.Module):
    """The model a `config.Model` describes. `seed` fixes the start; without one it is drawn from PyTorch's generator.

    With one seed, every weight outside the branch is the same whatever the complement: each parameter has a stream of
    its own, keyed by the seed and its name.
    """

    compilable = ("tokens", "pool")  # what a trainer that compiles the blocks may compile as well, each on its own

    def __init__(
        self,
        config: Model,
        *,
        seed: int | None = None,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        seed = _seed(seed)
        factory = {"device": device, "dtype": dtype}
        self.config = config
        tokens = (config.image_size // config.patch_size) ** 2
        self.patch_embed = nn.Linear(config.channels * config.patch_size**2, config.width, **factory)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, config.width, **factory))
        self.blocks = nn.ModuleList([Block(config, backend, **factory) for _ in range(config.depth)])
        self.readout = PenultimateResidual(**factory) if config.readout else None
        self.norm = nn.LayerNorm(config.width, **factory)
        self.head = nn.Linear(config.width, config.num_classes, **factory) if config.num_classes else nn.Identity()
        if not self.pos_embed.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Matrices and positions: normal, std 0.02, cut at two; biases 0; depthwise maps as PyTorch starts them. Also
        of a model that came off the meta device."""
        seed = _seed(seed)
        for prefix, module in self.named_modules():
            if isinstance(module, (nn.LayerNorm, PenultimateResidual)):
                module.reset_parameters()
                continue
            if isinstance(module, Complement):
                module.init_weights(seeding.generator(seed, "branch", prefix, device=module.lift.weight.device))
                continue
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if ".complement." in name:
                    continue
                generator = seeding.generator(seed, "host", name, device=parameter.device)
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif isinstance(module, nn.Conv2d):
                    nn.init.kaiming_uniform_(parameter, a=5**0.5, generator=generator)
                else:
                    nn.init.trunc_normal_(parameter, std=0.02, generator=generator)

    def embed(self, x: Tensor) -> Tensor:
        """Images to patch tokens with positions, [B, N, D]."""
        config = self.config
        if x.shape[1:] != (config.channels, config.image_size, config.image_size):
            raise ValueError(
                f"the input must be [B, {config.channels}, {config.image_size}, {config.image_size}],"
                f" got {list(x.shape)}"
            )
        return self.tokens(x)

    def tokens(self, x: Tensor) -> Tensor:
        """`embed` after its check, which stays outside of what is compiled."""
        p = self.config.patch_size
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, C, patch, patch]
        return self.patch_embed(x.flatten(3).flatten(1, 2)) + self.pos_embed

    def pool(self, last: Tensor, penultimate: Tensor) -> Tensor:
        """Readout, norm, mean over tokens: the features before the head, [B, D]."""
        z = last if self.readout is None else self.readout(last, penultimate)
        return self.norm(z).mean(1)

    def forward_features(self, x: Tensor) -> Tensor:
        side = ops.fork(x)  # the products of weights need no image
        with nullcontext() if side is None else torch.cuda.stream(side):
            folded = fold_together([getattr(block, "ffn", None) for block in self.blocks], x)
        x = penultimate = self.embed(x)
        ops.join(side)
        y = None
        for i, (block, weights) in enumerate(zip(self.blocks, folded, strict=True)):
            penultimate, then = x, None if weights is None else self._norm_after(i, x)
            if then is not None:
                if y is None:  # not in the block: it is compiled in two forms, and would be in three
                    x, y = block.enter(x)  # type: ignore[operator]
                x, y = block(x, weights, y, then)
            elif y is not None:
                x, y = block(x, weights, y), None
            else:  # a block of another kind may take no more
                x = block(x) if weights is None else block(x, weights)
        return self.pool(x, penultimate)

    def _norm_after(self, i: int, x: Tensor) -> ops.Norm | None:
        """Of what block i makes of x, where the next one begins with a norm that its kernel can make."""
        maker, reader = self.blocks[i], self.blocks[i + 1] if i + 1 < len(self.blocks) else None
        if type(maker) is not Block or ops.has_hooks(maker) or not isinstance(reader, Block):
            return None
        return reader.ahead(x)

    @overload
    def forward(self, x: Tensor, intermediates: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, intermediates: Literal[True]) -> tuple[Tensor, dict[str, Tensor]]: ...
    def forward(self, x: Tensor, intermediates: bool = False) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits; with `intermediates` also a dict with `blocks.<i>.<b, q, m, q_perp, delta, gate, h>` and
        `features`, computed by the literal equations."""
        if not intermediates:
            return self.head(self.forward_features(x))
        named: dict[str, Tensor] = {}
        x = penultimate = self.embed(x)
        for i, block in enumerate(self.blocks):
            penultimate, (x, parts) = x, block.intermediates(x)  # type: ignore[operator]
            named |= {f"blocks.{i}.{name}": value for name, value in parts.items()}
        named["features"] = self.pool(x, penultimate)
        return self.head(named["features"]), named


def _seed(given: int | None) -> int:
    """The one given, or one drawn from PyTorch's generator."""
    return int(torch.randint(2**62, (), device="cpu")) if given is None else whole("seed", given, 0)
