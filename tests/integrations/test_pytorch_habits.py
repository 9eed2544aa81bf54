"""What PyTorch's users do to a model, done to one with a complement: injected into timm, and Deep-ViT's own."""

import copy
import os

import pytest
import timm
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from integration_families import FAMILIES, build, images, output
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, stack_module_state
from torch.nn.modules import module as calls_of_modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import oqc
from oqc.integrations import fold
from oqc.integrations.injection import inject
from oqc.nn import OQCFFN, Host

X = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
DEEP = {"depth": 2, "width": 32, "heads": 2, "hidden": 48, "num_classes": 5, "rank": 8}


def injected(complement="lowrank", init="paper", **options):
    torch.manual_seed(0)
    options = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, **options}
    model = timm.create_model("vit_tiny_patch16_224", **options)
    inject(model, complement, rank=8, init=init)
    return model


def deep_vit(complement="lowrank", **options):
    return oqc.create_model("deep_vit_afbo_lowrank_r56", complement=complement, seed=0, **DEEP, **options)


MODELS = [injected, deep_vit]


def gradients(model, y):
    y.square().mean().backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "complement"), [(injected, "lowrank"), (injected, "full"), (injected, "dynamic"), (deep_vit, "lowrank")]
)
def test_compiles_without_breaks(make, complement):
    model = make(complement)
    want = model(X)
    want_gradients = gradients(model, want)
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(X)
    assert torch.allclose(y, want, atol=1e-5)
    for name, gradient in gradients(model, y).items():
        assert torch.allclose(gradient, want_gradients[name], atol=1e-5), name


@pytest.mark.parametrize("name", ["eva02_base_patch14_224", "Data2VecVisionModel", "Dinov2Model, SwiGLU"])
@torch.no_grad()
def test_compiles_without_breaks_where_the_literal_form_runs_or_the_host_is_gated(name):
    family = next(family for family in FAMILIES if family.name == name)
    model = build(family)
    inject(model, "lowrank", rank=4, init="paper")
    x = images(family)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(output(compiled, x), output(model, x), atol=1e-5)


@pytest.mark.slow
def test_compiles_with_the_inductor():
    model = injected("lowrank").eval()
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, fullgraph=True)(X), model(X), atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_activation_checkpointing(make):
    model = make()
    want = gradients(model, model(X))
    model.zero_grad()
    for block in model.blocks:
        block.forward = _checkpointed(block.forward)
    for name, gradient in gradients(model, model(X)).items():
        assert torch.allclose(gradient, want[name], atol=1e-6), name


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def test_timms_own_checkpointing():
    model = injected()
    want = gradients(model, model(X))
    model.zero_grad()
    model.set_grad_checkpointing()
    assert all(torch.allclose(g, want[n], atol=1e-6) for n, g in gradients(model, model(X)).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("complement", ["lowrank", "full"])
@pytest.mark.parametrize("make", MODELS)
def test_autocast(make, complement, dtype):
    model = make(complement)
    exact = copy.deepcopy(model).double()(X.double())
    with torch.autocast("cpu", dtype=dtype):
        y = model(X)
        assert y.dtype == dtype
    assert (y.double() - exact).norm() / exact.norm() < 0.05
    assert all(torch.isfinite(g).all() for g in gradients(model, y.float()).values())


@pytest.mark.parametrize("make", MODELS)
def test_functional_call_and_vmap_over_an_ensemble(make):
    models = [make(), make(), make()]
    for i, model in enumerate(models):
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1 * (i + 1))
    state, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def run(parameters, own_buffers):
        return functional_call(skeleton, (parameters, own_buffers), (X,))

    y = torch.vmap(run)(state, buffers)
    for i, model in enumerate(models):
        assert torch.allclose(y[i], model(X), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("complement", ["lowrank", "full", "static", "dynamic"])
def test_meta_construction(complement):
    with torch.device("meta"):
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5
        )
    inject(model, complement, rank=8, init="paper")
    assert all(p.is_meta for p in model.parameters())
    source = injected(complement)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert torch.equal(model.eval()(X), source.eval()(X))


def test_a_branch_without_weights_is_not_taken_for_one_that_is_kept():
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=5
    ).eval()
    model = copy.deepcopy(plain).to("meta")
    inject(model, rank=8)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*complement\.lift\.weight"):
        model.load_state_dict(plain.state_dict(), assign=True)
    model.to_empty(device="cpu")
    lift = model.blocks[0].mlp.complement.lift.weight
    nn.init.constant_(lift, 7.0)  # what the memory may hold, or somebody wrote there
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*complement\.lift\.weight"):
        model.load_state_dict(plain.state_dict())
    assert lift.eq(7.0).all()
    for block in model.blocks:
        block.mlp.complement.init_weights()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(X), plain(X))
    assert 0 < lift.abs().max() < 0.1


def test_a_branch_from_the_meta_device_keeps_the_weights_that_it_was_given():
    source = injected(init="identity")
    with torch.device("meta"):
        model = injected(init="identity")
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    model.load_state_dict({name: v for name, v in source.state_dict().items() if ".complement." not in name})
    assert torch.equal(model.eval()(X), source.eval()(X))
    assert torch.equal(model.blocks[0].mlp.complement.u.weight, source.blocks[0].mlp.complement.u.weight)


def test_state_dict_hooks_run():
    model = injected()
    seen = []
    mlp = model.blocks[0].mlp
    mlp.register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append("saved"))
    mlp.register_load_state_dict_pre_hook(lambda module, *args: seen.append("loading"))
    model.load_state_dict(model.state_dict())
    assert seen == ["saved", "loading"]


def test_assign_and_partial_loading():
    """What timm and transformers do with checkpoints of other shapes."""
    model, other = injected(), injected()
    model.load_state_dict(other.state_dict(), assign=True)
    result = model.load_state_dict({"head.weight": other.head.weight}, strict=False)
    assert not any("complement" in name for name in result.missing_keys)
    assert torch.equal(model(X), other(X))


def _join(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def _leave():
    """Together: a rank that goes while the other still talks to it ends that one with an error. And at once: threads of
    fully_shard's that PyTorch takes down with the interpreter sometimes end it with an abort, after all is done."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _ddp_worker(rank, world, folder):
    _join(rank, world, folder)
    for init in ("identity", "paper"):
        model = injected(init=init)
        want = gradients(model, model(X))
        model.zero_grad()
        parallel = DistributedDataParallel(model)
        half = X[rank * 2 : rank * 2 + 2]
        for name, gradient in gradients(parallel, parallel(half)).items():
            assert torch.allclose(gradient, want[name], atol=1e-6), name
    _leave()


def test_ddp_gives_the_whole_batchs_gradients(tmp_path):
    """Without find_unused_parameters: also at the identity start every parameter takes part."""
    mp.spawn(_ddp_worker, (2, str(tmp_path)), nprocs=2)


def _fsdp_worker(rank, world, folder):
    _join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    for model in (injected("lowrank"), injected("full"), deep_vit("dynamic")):
        plain = copy.deepcopy(model)
        optimizers = []
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for each, part in ((plain, X), (model, X[rank * 2 : rank * 2 + 2])):
            optimizers.append(torch.optim.SGD(each.parameters(), lr=0.1))
            for _ in range(2):
                optimizers[-1].zero_grad()
                each(part).square().mean().backward()
                optimizers[-1].step()
        own = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.full_tensor(), own[name], atol=1e-5), name
        with pytest.raises(ValueError, match="is sharded; gather the weights first"):
            oqc.save(model, f"{folder}/model")
    _leave()


def test_fsdp2_trains_like_one_process(tmp_path):
    mp.spawn(_fsdp_worker, (2, str(tmp_path)), nprocs=2)


def _mlp(host="gelu", complement="lowrank", init="paper"):
    torch.manual_seed(0)
    if host == "swiglu":
        return oqc.OQCFFN(16, 32, host="swiglu", complement=complement, rank=8, init=init, backend="triton")
    layer = {"gelu": timm.layers.Mlp, "packed": timm.layers.GluMlp, "swiglu_timm": timm.layers.SwiGLU}[host]
    module = layer(16, 64 if host == "packed" else 32)
    inject(module, complement, rank=8, init=init, backend="triton", seed=0)
    if init == "identity":
        nn.init.constant_(module.complement.alpha, 0.7)
    return module


def _afbo(init="paper"):
    torch.manual_seed(0)
    return oqc.OQCFFN(16, 32, host="afbo", complement="lowrank", rank=8, init=init, grid=(3, 3), backend="triton")


def _as_reference(module):
    twin = copy.deepcopy(module)
    setattr(twin, "oqc_backend" if hasattr(twin, "oqc_backend") else "backend", "reference")
    return twin


def _output_and_gradients(module, x):
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


@pytest.fixture
def calls(monkeypatch):
    """How often the operator of a whole network ran."""
    from oqc.ops import operators

    found, ffn = [], operators.ffn
    monkeypatch.setattr(operators, "ffn", lambda *args: found.append(1) or ffn(*args))
    return found


@pytest.mark.parametrize(
    ("host", "complement", "init"),
    [
        ("gelu", "lowrank", "paper"),
        ("gelu", "shared", "paper"),
        ("gelu", "lowrank", "identity"),
        ("packed", "dynamic", "paper"),
        ("swiglu_timm", "lowrank", "paper"),
        ("swiglu", "full", "paper"),
    ],
)
def test_in_training_one_operator_is_the_whole_network(host, complement, init, calls):
    """For MLPs and GLUs whose activation the kernels have; it agrees with the literal equations."""
    module = _mlp(host, complement, init)
    x = torch.randn(2, 9, 16, requires_grad=True)
    ours = _output_and_gradients(module, x)
    assert calls == [1]
    for one, other in zip(ours, _output_and_gradients(_as_reference(module), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(module(x), ours[0], rtol=1e-5, atol=1e-6)
    assert calls == [1]  # which would join all weights for one product
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    for one, other in zip([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])], ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


CHANGES = ["hook", "hook on act", "hook on complement", "forward", "other act", "new act", "set act",
    "dropout", "frozen", "dtype"]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_plain_is_left_to_the_host(change, calls):
    module, seen = timm.layers.Mlp(16, 32, drop=0.1 if change == "dropout" else 0.0), []
    if change == "other act":
        module.act = nn.Tanh()
    inject(module, "lowrank", rank=8, init="paper", backend="triton", seed=0)
    part = {"hook": module.fc1, "hook on act": module.act, "hook on complement": module.complement}.get(change)
    if part is not None:
        part.register_forward_hook(lambda *args: seen.append(1))
    if change == "forward":
        module.fc1.forward = lambda x: seen.append(1) or nn.functional.linear(x, module.fc1.weight)
    if change == "new act":
        module.act = nn.ReLU()
    if change == "set act":
        module.act.approximate = "tanh"
    if change == "frozen":
        oqc.trainable(module, "complement")
    x = torch.randn(2, 9, 16, requires_grad=True)
    if change == "dtype":
        with pytest.raises(RuntimeError, match="dtype"):
            module.bfloat16()(x)
    else:
        y = module(x)
        assert len(seen) == (change == "forward" or part is not None)
        y.sum().backward()
        if change != "dropout":
            torch.testing.assert_close(y, _as_reference(module)(x), rtol=1e-5, atol=1e-6)
    assert not calls


class Codes(torch.Tensor):
    """As torchao's quantised weights are: a linear layer's class stays, and its weight knows that product alone."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.codes * weight.scale, bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(function)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("make", [_mlp, _afbo])
@torch.no_grad()
def test_quantised_after_the_injection(make, backend, calls):
    module, x = make(), torch.randn(2, 9, 16)
    setattr(module, "oqc_backend" if hasattr(module, "oqc_backend") else "backend", backend)
    expected = _as_reference(module)(x)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            weight = Codes((layer.weight / scale).round().to(torch.int8), scale)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    assert (module(x) - expected).norm() / expected.norm() < 0.05
    with pytest.raises(ValueError, match="no complement that can be folded"):
        fold(module)
    assert not calls


@pytest.mark.parametrize("make", [_mlp, _afbo])
@pytest.mark.parametrize("init", ["paper", "identity"])
@torch.no_grad()
def test_offloaded_by_accelerate(make, init):
    """Every layer's weights come when it is called, and go; arguments that have weights are moved, too."""
    import accelerate  # here: the processes that other tests start import this file, too

    module, x = make(init=init), torch.randn(2, 9, 16)
    expected = module(x)
    accelerate.cpu_offload(module, execution_device="cpu")
    assert all(p.is_meta for p in module.parameters())
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


HOOKS = {
    "forward": calls_of_modules.register_module_forward_hook,
    "forward pre": calls_of_modules.register_module_forward_pre_hook,
    "backward": calls_of_modules.register_module_full_backward_hook,
    "backward pre": calls_of_modules.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("when", HOOKS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("make", [_mlp, _afbo])
def test_a_hook_on_all_modules_sees_every_layer(make, backend, when, calls):
    module, seen = make(), set()
    setattr(module, "oqc_backend" if hasattr(module, "oqc_backend") else "backend", backend)
    x = torch.randn(2, 9, 16, requires_grad=True)
    expected = module(x)
    calls.clear()
    handle = HOOKS[when](lambda part, *_: seen.add(part))
    try:
        y = module(x)
        y.sum().backward()
    finally:
        handle.remove()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert seen == {part for part in module.modules() if not isinstance(part, Host)}  # whose parts are called
    assert not calls


def test_a_compiled_module_takes_up_a_hook_on_all_modules_and_an_activation_set_in_place(calls):
    module, seen = _mlp("gelu"), []
    compiled, x = torch.compile(module, fullgraph=True, backend="aot_eager"), torch.randn(2, 9, 16)
    compiled(x)
    assert calls == [1]
    module.act.approximate = "tanh"
    torch.testing.assert_close(compiled(x), _as_reference(module)(x), rtol=1e-5, atol=1e-6)
    module.act.approximate = "none"
    handle = calls_of_modules.register_module_forward_hook(lambda part, *_: seen.append(part))
    try:
        module.compile(fullgraph=True, backend="aot_eager")
        module(x)
    finally:
        handle.remove()
    assert {*module.modules()} == {*seen}
    assert calls == [1]


def test_counting_flops_counts_what_runs(calls):
    """FlopCounterMode follows the modules by hooks on all of them."""
    module, x = _mlp("gelu"), torch.randn(2, 9, 16)
    with FlopCounterMode(display=False):
        module(x)
    assert calls == [1]


def test_an_activation_of_two_modes_is_run_by_itself(calls):
    class Dropped(nn.GELU):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    module = timm.layers.Mlp(16, 32, act_layer=Dropped).eval()
    inject(module, "lowrank", rank=8, init="paper", backend="triton", seed=0)
    x = torch.randn(2, 9, 16)
    assert not torch.equal(module.train()(x), module(x))
    assert not calls


def test_one_activation_object_of_several_networks(calls):
    """Which is found out for each of them."""
    model = nn.Sequential(timm.layers.Mlp(16, 32), timm.layers.Mlp(16, 32))
    model[1].act = model[0].act
    inject(model, "lowrank", rank=8, backend="triton")
    model(torch.randn(2, 9, 16))
    assert calls == [1, 1]
    oqc.remove(model)
    assert vars(model[0].act).keys() == vars(nn.GELU()).keys()


def test_a_sharded_branch_is_left_to_its_own_forward(tmp_path):
    """The branch gathers its weights when it is called; the operator would take the shards."""
    mp.spawn(_sharded_branch_worker, (1, str(tmp_path)), nprocs=1)


def _sharded_branch_worker(rank, world, folder):
    _join(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    for module in (_mlp("gelu"), oqc.OQCFFN(16, 32, host="afbo", complement="lowrank", rank=8, grid=(3, 3))):
        expected = module(torch.ones(2, 9, 16))
        fully_shard(module.complement, mesh=mesh)
        y = module(torch.ones(2, 9, 16))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        y.sum().backward()
        assert all(type(p.grad).__name__ == "DTensor" for p in module.complement.parameters())
    _leave()


def test_branches_that_are_started_one_by_one_differ():
    def distinct(branches):
        return len({tuple(branch.u.weight.flatten().tolist()) for branch in branches}) == 3

    def make(device="cpu"):
        return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=3, num_heads=2).to(device)

    model = make()
    state = torch.get_rng_state()
    for block in model.blocks:
        inject(block, rank=8)
    assert torch.equal(torch.get_rng_state(), state)  # the rest of a model draws as it would without
    assert distinct(block.mlp.complement for block in model.blocks)
    empty = make("meta")
    report = inject(empty, rank=8)
    empty.to_empty(device="cpu")
    for one in report.replaced:
        empty.get_submodule(one.path).complement.init_weights()
    assert distinct(block.mlp.complement for block in empty.blocks)
    plain = nn.ModuleList([OQCFFN(24, 48, rank=8) for _ in range(3)])
    plain.apply(lambda module: module.init_weights() if hasattr(module, "init_weights") else None)
    assert distinct(one.complement for one in plain)


def test_a_container_is_as_long_as_before():
    layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.Dropout(0.1))
    before, x = list(layers), torch.randn(2, 5, 24)
    inject(layers, rank=8)
    layers.eval()
    assert len(layers) == 5
    assert [*layers] == before
    assert layers[-1] is before[-1]
    assert layers[:2](x).shape == (2, 5, 48)
    y = x
    for layer in layers:
        y = layer(y)
    torch.testing.assert_close(y, layers(x))
    for change in (lambda: layers.append(nn.ReLU()), lambda: layers.pop(1), lambda: layers.__delitem__(0)):
        with pytest.raises(ValueError, match=r"Sequential has a complement, .* call oqc.remove first"):
            change()
    assert copy.deepcopy(layers)(x).equal(layers(x))
    oqc.remove(layers)
    assert type(layers) is nn.Sequential
    assert [*layers] == before
