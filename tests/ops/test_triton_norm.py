"""The residual sum with its LayerNorm against float64, held to PyTorch's own error in the same precision."""

import dataclasses

import pytest
import torch
from fused_oracle import SMALL, Case, leaves, tensors
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import oqc
from oqc import ops
from oqc.config import FFN, Model
from oqc.ops import fused, operators, triton_complement, triton_norm
from oqc.ops import norm as norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Model(image_size=8, patch_size=2, channels=1, num_classes=5, width=32, depth=2, heads=2, ffn=FFN(rank=4))
OPERATORS = (torch.ops.oqc.residual_norm.default, torch.ops.oqc.residual_norm_backward.default)


def autocast(dtype=torch.bfloat16, enabled=True):
    return torch.autocast(DEVICE, dtype, enabled=enabled)


def layer(width, **options):
    norm = nn.LayerNorm(width, device=DEVICE, **options)
    g = torch.Generator().manual_seed(width)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(width, generator=g) + 0.5)
    return norm


def draw(rows, width, y_dtype, dtype):
    """x with an offset that a one-pass variance would feel, y, ds and dn."""
    g = torch.Generator().manual_seed(rows)
    x, y, ds, dn = (torch.randn(rows, width, generator=g).to(DEVICE) for _ in range(4))
    return x + 30.0, None if y_dtype is None else y.to(y_dtype), ds, dn.to(dtype)


def run(norm, x, y, ds, dn, *, backend="triton", dtype=torch.bfloat16):
    """s, n, dx, dgamma, dbeta and, with y, dy; in float64 the truth."""
    exact = x.dtype == torch.float64
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, y)]
    with autocast(dtype, enabled=not exact):
        s, n = ops.residual_norm(*leaves, norm, backend=backend)
    upstream = [(out, d) for out, d in ((s, ds), (n, dn)) if d is not None]
    outs, given = [out for out, _ in upstream], [d.to(out.dtype) for out, d in upstream]
    wanted = [leaves[0], norm.weight, norm.bias, *([] if y is None else leaves[1:])]
    found = torch.autograd.grad(outs, wanted, given, allow_unused=True)
    return [s.detach(), n.detach(), *found]


def double(norm):
    twin = layer(norm.normalized_shape[0], eps=norm.eps, dtype=torch.float64)
    twin.load_state_dict(norm.state_dict())
    return twin


def error(x, truth):
    return ((x.double() - truth).norm() / truth.norm().clamp_min(1e-12)).item()


def compare(rows, width, y_dtype, dtype, ds=True, dn=True):
    x, y, *up = draw(rows, width, torch.bfloat16 if y_dtype == "half" else y_dtype, dtype)
    y = y.to(dtype) if y_dtype == "half" else y
    up = [u if keep else None for u, keep in zip(up, (ds, dn), strict=True)]
    norm = layer(width)
    given = (x, y, *up)
    want = run(double(norm), *(None if t is None else t.double() for t in given))
    plain = run(norm, *given, backend="torch", dtype=dtype)
    got = run(norm, *given, dtype=dtype)
    names = ("s", "n", "dx", "dgamma", "dbeta", "dy")
    for name, truth, own, found in zip(names, want, plain, got, strict=False):
        if truth is None:
            assert found is None, name
            continue
        assert found.dtype == (dtype if name == "n" else y.dtype if name == "dy" else torch.float32), name
        slack = 1.5 if name in ("dgamma", "dbeta") else 1.25
        # Rows lie 30 deviations off 0, and float32 has their mean to 2e-6 of one. PyTorch leaves n in float32.
        limit = 1e-2 if name == "n" else max(4e-6, slack * error(own, truth))
        if name == "dy" and y.dtype == dtype:
            limit = 1e-2
        assert error(found, truth) <= min(1e-2, limit), (name, error(found, truth), limit)
        if name == "n" and (dtype == torch.float16 or DEVICE == "cuda"):  # rounded once; interpreted, bf16 is cut off
            assert error(found, truth) <= 1.05 * error(truth.to(dtype), truth)


@pytest.mark.parametrize("y_dtype", [None, "half", torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 33), (7, 20), (130, 33), (7, 256), (130, 20), (33, 1100)])
def test_parity(rows, width, y_dtype, guards):
    compare(rows, width, y_dtype, torch.bfloat16)
    guards.check()
    assert guards.count


@pytest.mark.parametrize(("ds", "dn"), [(True, False), (False, True)])
@pytest.mark.parametrize("y_dtype", [None, "half", torch.float32])
def test_a_missing_gradient(y_dtype, ds, dn, guards):
    compare(7, 20, y_dtype, torch.bfloat16, ds, dn)
    guards.check()


@pytest.mark.parametrize("y_dtype", [None, "half", torch.float32])
def test_parity_in_fp16(y_dtype):
    compare(9, 256, y_dtype, torch.float16)


def test_every_program_walks_over_several_rows(monkeypatch):
    """Few programs, so that the loop over rows and the sums over programs both have more than one turn."""
    monkeypatch.setattr(triton_norm, "PROGRAMS", 3)
    compare(130, 20, "half", torch.bfloat16)


def test_repeats_bit_for_bit():
    given = draw(130, 33, torch.bfloat16, torch.bfloat16)
    norm = layer(33)
    first, second = run(norm, *given), run(norm, *given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def used(function, *args, **options):
    """How often each operator ran."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        function(*args, **options)
    return [seen.count(op) for op in OPERATORS]


def test_which_path_is_taken():
    x, y, norm = torch.randn(4, 32, device=DEVICE), torch.randn(4, 32, device=DEVICE).bfloat16(), layer(32)

    def chosen(x=x, y=y, norm=norm, backend="triton", dtype=torch.bfloat16, on=True):
        with autocast(dtype, enabled=on):
            return norms._chosen(x, y, norm, backend)

    class Other(nn.LayerNorm):
        pass

    assert chosen()
    assert chosen(y=None)
    assert chosen(y=y.float())
    assert not chosen(y=y.half())
    assert not chosen(y=y[:1])
    assert not chosen(on=False)
    assert not chosen(backend="torch")
    assert not chosen(x.double())
    assert not chosen(x.to("meta"))  # which has no autocast to ask about
    assert not chosen(x.bfloat16())
    assert not chosen(torch.randn(32, 4, device=DEVICE).T)
    assert not chosen(norm=Other(32, device=DEVICE))
    assert not chosen(norm=layer(32, bias=False))
    assert not chosen(norm=nn.LayerNorm(32, elementwise_affine=False))
    assert not chosen(norm=layer(32, dtype=torch.bfloat16))
    assert not chosen(norm=nn.LayerNorm((4, 32), device=DEVICE))
    assert not chosen(torch.randn(2, 4096, device=DEVICE), None, layer(4096))
    hooked = layer(32)
    hooked.register_forward_hook(lambda *_: None)
    assert not chosen(norm=hooked)
    assert used(run, norm, x, y, x, y) == [1, 1]
    assert used(run, hooked, x, y, x, y) == [0, 0]


@pytest.mark.parametrize("y_dtype", [None, torch.bfloat16])
def test_opcheck(y_dtype):
    x, y, ds, dn = draw(5, 20, y_dtype, torch.bfloat16)
    norm = layer(20)
    weights = (norm.weight.detach(), norm.bias.detach())
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPERATORS[0], (x, y, *weights, 1e-5, torch.bfloat16), test_utils=tests)
    _, _, stats = OPERATORS[0](x, y, *weights, 1e-5, torch.bfloat16)
    for one in (ds, None):
        torch.library.opcheck(OPERATORS[1], (one, dn, x, stats, weights[0], y_dtype), test_utils=tests)


def test_operators_without_kernels_agree(monkeypatch):
    given, norm = draw(7, 20, torch.bfloat16, torch.bfloat16), layer(20)
    by_kernels = run(norm, *given)
    monkeypatch.setattr(norms, "on_kernels", lambda x: False)
    for a, b in zip(by_kernels, run(norm, *given), strict=True):
        assert error(a, b.double()) <= (4e-3 if a.dtype == torch.bfloat16 else 4e-6)


def test_non_contiguous_gradients():
    x, y, ds, dn = draw(7, 20, torch.bfloat16, torch.bfloat16)
    norm = layer(20)
    turned = run(norm, x, y, ds.T.contiguous().T, dn.T.contiguous().T)
    assert all(torch.equal(a, b) for a, b in zip(run(norm, x, y, ds, dn), turned, strict=True))


@pytest.mark.parametrize("y_dtype", [None, torch.bfloat16, torch.float32])
def test_compiled_is_the_same(y_dtype, monkeypatch):
    given, norm = draw(7, 20, y_dtype, torch.bfloat16), layer(20)
    torch._dynamo.reset()

    def step(x, y):
        with autocast():
            s, n = ops.residual_norm(x, y, norm, backend="triton")
        return s * 2, n

    def gradients(function):
        leaves = [t.detach().clone().requires_grad_() for t in given[:2] if t is not None]
        outs = function(leaves[0], None if y_dtype is None else leaves[1])
        return [*outs, *torch.autograd.grad(outs, [*leaves, *norm.parameters()], given[2:])]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want, calls, backward = gradients(step), [], triton_norm.backward
    monkeypatch.setattr(triton_norm, "backward", lambda *args: calls.append(args) or backward(*args))
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(compiled), strict=True))
    assert len(calls) == 1
    with torch.no_grad():
        x, y = given[:2]
        assert all(torch.equal(a, b) for a, b in zip(step(x, y), compiled(x, y), strict=True))


@pytest.mark.parametrize("y_dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivative(y_dtype, frozen):
    given, norm = draw(5, 20, y_dtype, torch.float16), layer(20)
    norm.requires_grad_(not frozen)

    def second(backend):
        leaves = [t.detach().clone().requires_grad_() for t in given[:2] if t is not None]
        with autocast(torch.float16):
            s, n = ops.residual_norm(leaves[0], None if y_dtype is None else leaves[1], norm, backend=backend)
        wanted = [*leaves, *(p for p in norm.parameters() if p.requires_grad)]
        first = torch.autograd.grad(
            (s.sin() * given[2]).sum() + (n.to(torch.float16) * given[3]).float().square().sum(),
            wanted,
            create_graph=True,
        )
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), wanted)

    for a, b in zip(second("triton"), second("torch"), strict=True):
        assert b.any()
        assert error(a, b.double()) <= 1e-2


def test_checkpointed():
    given, norm = draw(7, 20, torch.bfloat16, torch.bfloat16), layer(20)

    def gradients(through):
        leaves = [t.detach().clone().requires_grad_() for t in given[:2]]
        with autocast():
            outs = through(lambda x, y: ops.residual_norm(x, y, norm, backend="triton"), *leaves)
        return torch.autograd.grad(outs, [*leaves, *norm.parameters()], given[2:])

    plain = gradients(lambda function, *args: function(*args))
    again = gradients(lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# In a block.


def block(**options):
    config = dataclasses.replace(TINY, ffn=dataclasses.replace(TINY.ffn, **options))
    return oqc.create_model(config, seed=0, backend="triton", device=DEVICE).blocks[0]


def through(one, x):
    """The block's output and the gradient of what it was given."""
    leaf = x.detach().clone().requires_grad_()
    with autocast():
        out = one(leaf)
    return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]


@pytest.mark.parametrize("host", ["afbo", "mlp"])
def test_a_block_uses_it_and_stays_the_same_function(host, monkeypatch):
    x, one = torch.randn(2, 16, 32, device=DEVICE), block(host=host, complement="lowrank")
    found = through(one, x)
    assert used(through, one, x) == [2, 2]
    with torch.no_grad():
        assert used(evaluate, one, x) == [2, 0]
    with monkeypatch.context() as patch:
        patch.setattr(norms, "_chosen", lambda *_: False)
        assert used(through, one, x) == [0, 0]
        plain = through(one, x)
    for a, b in zip(found, plain, strict=True):
        assert error(a, b.double()) <= 1e-2


def evaluate(one, x):
    with autocast():
        return one(x)


def test_a_hooked_norm_and_a_replaced_network_take_the_plain_path():
    x, calls = torch.randn(2, 16, 32, device=DEVICE), []
    hooked = block()
    hooked.norm2.register_forward_hook(lambda module, args, out: calls.append(out.dtype))
    assert used(through, hooked, x) == [1, 1]  # the other norm has none
    assert calls == [torch.float32]

    class Own(nn.Module):
        def forward(self, y):
            calls.append(y.dtype)
            return y

    for name in ("ffn", "attn"):
        calls.clear()
        other = block()
        setattr(other, name, Own())
        assert used(through, other, x) == [1, 1]  # the norm before what is ours
        assert calls == [torch.float32]

    class Linear(nn.Linear):  # as of LoRA
        def forward(self, y):
            calls.append(y.dtype)
            return super().forward(y)

    for name in ("attn.qkv", "ffn.host.map_a", "ffn.complement.u"):
        calls.clear()
        other = block(complement="lowrank", rank=5)
        old = other.get_submodule(name)
        new = Linear(old.in_features, old.out_features, bias=old.bias is not None, device=DEVICE)
        other.set_submodule(name, new)
        assert used(through, other, x) == [1, 1]
        assert calls == [torch.float32]
    watched = block()
    watched.attn.register_forward_hook(lambda module, args, out: calls.append(args[0].dtype))
    watched.ffn.register_forward_hook(lambda module, args, out: calls.append(args[0].dtype))
    calls.clear()
    assert used(through, watched, x) == [0, 0]
    assert calls == [torch.float32] * 2


def test_counts_no_flops():
    one, x = block(), torch.randn(2, 16, 32, device=DEVICE)
    counts = []
    for backend in ("triton", "torch"):
        one.backend = backend
        with FlopCounterMode(display=False) as counter, autocast():
            one(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# By the network's last kernel.

AHEAD = [
    *SMALL[8:11],
    Case(20, 24, 5, 2, space="none", gate="token", residual=True, bias=False),
    Case(20, 24, 5, 2, normalise=False, residual=True),
]


def then_norm(case, p, norm, half=torch.bfloat16):
    """The residual sum and its norm, by the network's kernel or after it."""
    maps = [p.get(name + end) for name in ("map_a", "map_b", "spatial_a", "spatial_b") for end in ("", "_bias")]
    branch = {name: p.get(name) for name in ("u", "v", "project", "lift")}
    branch |= {"beta": p["beta"]} if case.gate == "scalar" else {"gate": (p["gate_weight"], p.get("gate_bias"))}
    branch |= {"space": case.space, "residual": p["residual"], "grid": (3, case.columns), "prefix": 1}
    branch |= {"normalise": case.normalise}
    with autocast(half):
        s = fused.ffn_afbo(p["x"], *maps, p["weight"], p.get("bias"), **branch, then=norms.ahead(p["residual"], norm))
        return s if isinstance(s, tuple) else ops.residual_norm(s, None, norm, backend="triton")


@pytest.mark.parametrize(
    ("room", "half"),
    [("for all", torch.bfloat16), ("for all", torch.float16), ("but for z", torch.bfloat16), ("none", torch.bfloat16)],
)
@pytest.mark.parametrize("case", AHEAD, ids=str)
def test_the_kernel_before_makes_the_same_norm(case, room, half, guards, monkeypatch):
    """As the three kernels that it takes the place of, with one rounding of z and of the norm each."""
    monkeypatch.setattr(norms, "wanted", lambda backend, x: True)
    monkeypatch.setattr(triton_complement, "processors", lambda device: 2)  # one of which has two blocks of rows
    monkeypatch.setattr(triton_complement, "ROW_TOKENS", 16)
    most = norms.MOST_AHEAD
    if room == "but for z":
        monkeypatch.setattr(triton_complement, "MOST_OWN_LANES", 0)
    if room == "none":
        monkeypatch.setattr(triton_complement, "shared_memory", lambda device: 0)
    norm, p = layer(case.width), leaves(tensors(case, 5, 3, 1, 0), torch.float32)
    wanted = [*p.values(), *norm.parameters()]
    found = []
    for ahead in (False, True):
        monkeypatch.setattr(norms, "MOST_AHEAD", most if ahead else 0)
        before = guards.count
        s, n = then_norm(case, p, norm, half)
        assert used(then_norm, case, p, norm, half) == [not ahead, 0]
        g = torch.Generator().manual_seed(0)
        upstream = [torch.randn(s.shape, generator=g).to(t) for t in (s, n)]
        found.append([s, n, *torch.autograd.grad((s, n), wanted, upstream)])
        with torch.no_grad():
            found[-1] += then_norm(case, p, norm, half)
        guards.check()
        assert guards.count > before
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        assert error(a, b.double()) <= (4e-3 if a.dtype in norms.HALF else 1e-4)


def test_the_norm_ahead_takes_a_branch_and_a_residual():
    norm, x = layer(16), torch.randn(1, 4, 16, device=DEVICE)
    maps, weight = [(torch.randn(24, 16, device=DEVICE), None)], torch.randn(16, 24, device=DEVICE)
    then = (norm.weight, norm.bias, norm.eps)
    with autocast(), pytest.raises(ValueError, match="then takes a branch and a residual"):
        fused.ffn_mix(x, maps, weight, None, act="gelu", residual=x, then=then)


def test_opcheck_of_a_network_with_the_next_norm(monkeypatch):
    monkeypatch.setattr(norms, "wanted", lambda backend, x: True)
    seen, case, network = [], AHEAD[0], operators.ffn
    monkeypatch.setattr(operators, "ffn", lambda *args: seen.append(args) or network(*args))
    then_norm(case, leaves(tensors(case, 1, 3, 1, 0), torch.float32), layer(case.width))
    args = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in seen[0]]
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(network, args, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    by_kernels = network(*args)
    monkeypatch.setattr(operators, "on_kernels", lambda x: False)
    for a, b in zip((by_kernels[i] for i in (0, -2, -1)), (network(*args)[i] for i in (0, -2, -1)), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b.double()) <= 1e-2


def test_a_model_leaves_norms_to_the_kernel_before_unless_somebody_watches(monkeypatch):
    config = dataclasses.replace(
        TINY, image_size=4, width=16, depth=3, ffn=FFN(complement="lowrank", rank=4, hidden=24)
    )
    model = oqc.create_model(config, seed=0, backend="triton", device=DEVICE)
    x = torch.randn(1, 1, 4, 4, device=DEVICE)

    def gradients(function):
        with autocast():
            y = function(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]

    found = gradients(model)
    assert used(evaluate, model, x) == [4, 0]  # of 3 blocks with 2 each
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    seen = []
    assert used(evaluate, model, x) == [6, 0]
    assert isinstance(seen[0], torch.Tensor)
    handle.remove()
    model.blocks[2].norm1.register_forward_hook(lambda module, args, out: None)
    assert used(evaluate, model, x) == [4, 0]  # the hooked one is the module's, the one before is made ahead
    model.blocks[2].norm1._forward_hooks.clear()
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(norms, "MOST_AHEAD", 0)
    assert used(evaluate, model, x) == [6, 0]
    for a, b, c in zip(gradients(model), found, compiled, strict=True):
        assert error(b, a.double()) <= 1e-2
        assert error(c, b.double()) <= (1e-6 if DEVICE == "cpu" else 1e-3)  # some sum may round otherwise there
