"""The model families that injection is held against: real constructors, at sizes that a test can afford.

Run as a script, it writes the table in docs/integrations.md that test_families.py compares with.
"""

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torchvision
import transformers
from torch import nn
from torchvision.models import swin_transformer

import oqc
from oqc.integrations.injection import inject, remove
from oqc.integrations.saving import load, save
from oqc.nn.ffn import mlp_layer

DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"
HEADER = (
    "| Library | Model | Host | Injected | Unchanged | All parameters move | Saved, loaded, equal | `mlp_layer` |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Family:
    library: str
    name: str
    make: Callable[[], nn.Module]
    size: int = 32
    arguments: tuple[tuple[str, object], ...] = ()  # of the constructor, where save cannot tell them


def _timm(name, size=32, **arguments):
    make = functools.partial(timm.create_model, name, img_size=size, num_classes=5, **arguments)
    return Family("timm", name, make, size, tuple({"img_size": size, **arguments}.items()))


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}


def _hf(name, *, label=None, mlp_ratio=None, **extra):
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    sizes |= {"intermediate_size": 64} if mlp_ratio is None else {"mlp_ratio": mlp_ratio}
    return Family("transformers", label or name, lambda: cls(cls.config_class(**sizes, **extra)))


def _torchvision_vit():
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, dropout=0.1, num_classes=5
    )


def _torchvision_swin(**extra):
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], num_classes=5, **extra
    )


FAMILIES = [
    _timm("vit_tiny_patch16_224", **SMALL),
    _timm("deit_tiny_patch16_224", **SMALL),
    _timm("deit_tiny_distilled_patch16_224", **SMALL),
    _timm("deit3_small_patch16_224", **SMALL),
    _timm("vit_small_patch14_dinov2", size=28, **SMALL),
    _timm("vit_small_patch14_reg4_dinov2", size=28, **SMALL),
    _timm("vit_giant_patch14_dinov2", size=28, **SMALL),
    _timm("vit_base_patch16_siglip_224", **SMALL),
    _timm("eva_giant_patch14_224", size=28, **SMALL),
    _timm("eva02_tiny_patch14_224", size=28, **SMALL),
    _timm("eva02_base_patch14_224", size=28, **SMALL),
    _timm("vit_small_patch16_dinov3", **SMALL),
    _timm("vit_small_plus_patch16_dinov3", **SMALL),
    _timm("swin_tiny_patch4_window7_224", **SWIN, window_size=4),
    _timm("swinv2_tiny_window8_256", **SWIN, window_size=4),
    _timm("beit_base_patch16_224", **SMALL),
    _timm("beitv2_base_patch16_224", **SMALL),
    _timm("cait_xxs24_224", **SMALL),
    _timm("hiera_tiny_224", size=64, embed_dim=16, stages=(1, 1, 1, 1), q_pool=2),
    Family("torchvision", "VisionTransformer (vit_*)", _torchvision_vit),
    Family("torchvision", "SwinTransformer (swin_*)", _torchvision_swin),
    Family(
        "torchvision",
        "SwinTransformer (swin_v2_*)",
        lambda: _torchvision_swin(
            block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2
        ),
    ),
    _hf("ViTModel"),
    _hf("ViTForImageClassification", num_labels=5),
    _hf("Dinov2Model", mlp_ratio=2),
    _hf("Dinov2Model", label="Dinov2Model, SwiGLU", mlp_ratio=2, use_swiglu_ffn=True),
    _hf("Dinov2WithRegistersModel", mlp_ratio=2),
    _hf("DINOv3ViTModel"),
    _hf("DINOv3ViTModel", label="DINOv3ViTModel, gated", use_gated_mlp=True),
    _hf("CLIPVisionModel"),
    _hf("SiglipVisionModel"),
    _hf("Data2VecVisionModel"),
    Family(
        "oqc",
        "DeepViT",
        lambda: oqc.create_model("deep_vit_afbo", depth=2, width=32, heads=2, hidden=48, num_classes=5),
    ),
]


def images(family, batch=2):
    return torch.randn(batch, 3, family.size, family.size, generator=torch.Generator().manual_seed(0))


def output(model, x):
    y = model(x)
    if isinstance(y, torch.Tensor):
        return y
    return y.logits if "logits" in y else y.last_hidden_state


def build(family):
    """The model as a checkpoint would leave it: no weight is at a start that hides something, such as 0."""
    torch.manual_seed(0)
    model = family.make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@dataclass(frozen=True)
class Row:
    family: Family
    kind: str
    replaced: int
    unchanged: bool
    moves: bool
    equal: bool
    takes: str

    def __str__(self):
        yes = {True: "yes", False: "no"}
        cells = [self.family.library, f"`{self.family.name}`", self.kind, f"{self.replaced}"]
        cells += [yes[self.unchanged], yes[self.moves], yes[self.equal], self.takes]
        return f"| {' | '.join(cells)} |"


@functools.cache
def check(family):
    """Everything that the table says of a family, found out by doing it."""
    model, x = build(family), images(family)
    with torch.no_grad():
        before = output(model, x)
    unchanged = True
    for complement in ("full", "dynamic", "static", "lowrank"):
        report = inject(model, complement, rank=4, seed=1)
        with torch.no_grad():
            unchanged &= torch.equal(output(model, x), before)
        if complement != "lowrank":
            remove(model)
    first = model.get_submodule(report.replaced[0].path)
    kind = first.host_name if isinstance(first, oqc.OQCFFN) else "mlp" if first.oqc_layout.mix == "plain" else "gated"
    moves = _every_new_parameter_moves(model, x)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save(model, folder, arguments=dict(family.arguments) or None)
        equal = torch.equal(output(load(folder), x), output(model.eval(), x))
    return Row(family, kind, len(report.replaced), unchanged, moves, equal, _takes_mlp_layer(family))


def _every_new_parameter_moves(model, x):
    branch = {name: p for name, p in model.named_parameters() if ".complement." in name}
    start = {name: p.detach().clone() for name, p in branch.items()}
    optimizer = torch.optim.AdamW(branch.values(), lr=1e-2, weight_decay=0.0)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        output(model, x).square().mean().backward()
        optimizer.step()
    return len(branch) > 0 and all(not torch.equal(p, start[name]) for name, p in branch.items())


def _takes_mlp_layer(family):
    if family.library != "timm":
        return ""
    try:
        model = family.make(mlp_layer=mlp_layer(rank=4))
    except TypeError:
        return "no"
    return "yes" if any(isinstance(part, oqc.OQCFFN) for part in model.modules()) else "no"


def table():
    return "\n".join([*HEADER, *(str(check(family)) for family in FAMILIES)]) + "\n"


def documented():
    return DOCS.read_text().split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
