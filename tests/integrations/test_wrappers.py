"""Models that something else has wrapped: torch.compile, and what runs them over several processes."""

import pytest
import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import oqc
from oqc.integrations.injection import inject, remove, specification, trainable


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5
    ).eval()


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _sharded(mesh):
    model = vit()
    fully_shard(model.blocks[1], mesh=mesh)
    return model


def _of_a_sharded_tensor(mesh):
    model = vit()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh))
    return model


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda mesh: DistributedDataParallel(vit()), "the model is a DistributedDataParallel.*inject before wrapping"),
        (
            lambda mesh: torch.compile(nn.Sequential(DistributedDataParallel(vit()))),
            "0 is a DistributedDataParallel, .*inject before wrapping",
        ),
        (_sharded, r"blocks\.1 is sharded by fully_shard, .*: inject before wrapping"),
        (_of_a_sharded_tensor, r"head\.weight is sharded over processes: inject before"),
    ],
)
def test_a_parallel_model_is_refused(mesh, wrap, message):
    """Its processes would go on with branches of their own, without a word."""
    model = wrap(mesh)
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        inject(model, rank=4)
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("call", [remove, trainable])
def test_what_a_parallel_model_was_made_with_stays(mesh, call):
    """DistributedDataParallel's next steps would end in its error about an unfinished reduction."""
    model = vit()
    inject(model, rank=4)
    wrapped = DistributedDataParallel(model)
    before = {name: p.requires_grad for name, p in wrapped.named_parameters()}
    with pytest.raises(
        ValueError, match=rf"the model is a DistributedDataParallel, .*: call oqc\.{call.__name__} before wrapping"
    ):
        call(wrapped)
    assert {name: p.requires_grad for name, p in wrapped.named_parameters()} == before
    wrapped(X).sum().backward()


def test_a_sharded_model_may_be_frozen(mesh):
    """Its parameters are made anew by fully_shard, and an optimizer takes the new ones."""
    model = vit()
    inject(model, rank=4)
    fully_shard(model, mesh=mesh)
    picked = trainable(model)
    model(X).sum().backward()
    assert all((p.grad is not None) == any(p is one for one in picked) for p in model.parameters())


@torch.no_grad()
def test_a_compiled_model_is_injected_under_its_own_paths(tmp_path):
    model = vit()
    compiled = torch.compile(model, backend="eager")
    report = inject(compiled, rank=4, seed=0)
    twin = vit()
    inject(twin, rank=4, seed=0)
    assert report.model == "VisionTransformer"
    assert [one.path for one in report.replaced] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert specification(model) == specification(twin)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert torch.equal(compiled(X), twin(X))
    oqc.save(compiled, tmp_path, arguments={"embed_dim": 32, "depth": 2, "num_heads": 2})
    assert torch.equal(oqc.load(tmp_path)(X), twin(X))
    assert len(trainable(compiled)) == len(trainable(model))
    remove(compiled)
    assert list(model.state_dict()) == list(vit().state_dict())


@pytest.mark.parametrize("handle", [lambda m: torch.compile(m, backend="eager"), nn.Sequential, lambda m: m.blocks])
def test_what_one_handle_froze_another_thaws(handle):
    model = vit()
    model.blocks[0].norm1.weight = model.norm.weight
    model.blocks[0].norm2.weight.requires_grad_(False)
    inject(model, rank=4)
    other = handle(model)
    for first, second in ((model, other), (other, model)):
        trainable(model, "all")
        before = {id(p) for p in second.parameters() if p.requires_grad}
        trainable(first)
        assert {id(p) for p in trainable(second, "all")} == before
