"""The fused operators as citizens of PyTorch: compiled, exported, checkpointed, differentiated twice, captured."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from fused_oracle import DEVICE, LARGE, SMALL, Case, leaves, literal, ours, ours_from_hidden, ratio, squares_of, tensors
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oqc.config import FFN, Model
from oqc.models import DeepViT
from oqc.nn import OQCFFN
from oqc.ops import fused, layout, operators, plain


def _call(case: Case) -> tuple[dict[str, Tensor], Any]:
    p = leaves(tensors(case, 2, 3, 1, 0), torch.float32)
    return p, lambda p: ours(case, p, 3, 1)


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], SMALL[2], SMALL[7], SMALL[-2]], ids=str)
def test_compiles_whole_and_to_the_same_numbers(case: Case) -> None:
    p, function = _call(case)
    eager = function(p)
    grads = torch.autograd.grad(eager.square().sum(), list(p.values()), allow_unused=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(p)
    again = torch.autograd.grad(compiled.square().sum(), list(p.values()), allow_unused=True)
    assert torch.equal(eager, compiled)
    for one, other in zip(grads, again, strict=True):
        assert one is other is None or torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("complement", "groups"),
    [*((name, 1) for name in ("none", "lowrank", "full", "static", "dynamic", "shared")), ("lowrank", 4)],
)
def test_a_block_compiles_whole(complement: str, groups: int) -> None:
    """In every version of PyTorch that is supported: a break costs the compiled mode its speed and no test its pass."""
    ffn = FFN(complement=complement, rank=5, hidden=24, groups=groups)
    config = Model(width=16, heads=1, depth=1, readout=False, ffn=ffn)
    block = DeepViT(config, backend="triton", seed=0, device=DEVICE).blocks[0]
    x = torch.randn(1, 64, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, block(x))


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], SMALL[4], SMALL[7], SMALL[-3]], ids=str)
def test_second_derivatives(case: Case) -> None:
    p = leaves(tensors(case, 1, 2, 0, 0), torch.float32)
    exact = leaves(tensors(case, 1, 2, 0, 0), torch.float64)

    def penalty(y: Tensor, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return gradient.square().sum()

    penalty(ours(case, p, 2, 0), p["x"]).backward()
    penalty(literal(case, exact, 2, 0)[0], exact["x"]).backward()
    for name, item in exact.items():
        if item.grad is not None:
            assert ratio(squares_of(p[name].grad, item.grad)) <= 1e-3, name


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_float64_takes_the_plain_path(case: Case) -> None:
    named = tensors(case, 2, 2, 1, 0)
    given, exact = leaves(named, torch.float64), leaves(named, torch.float64)
    assert not fused.chosen("triton", given["x"], case.rank)
    y, expected = ours(case, given, 2, 1), literal(case, exact, 2, 1)[0]
    y.square().sum().backward()
    expected.square().sum().backward()
    assert ratio(squares_of(y, expected)) <= 1e-6  # the gate and the depthwise gradients pass through fp32
    for name, item in exact.items():
        if item.grad is not None:
            assert ratio(squares_of(given[name].grad, item.grad)) <= 1e-6, name


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], SMALL[4], SMALL[7], SMALL[-3]], ids=str)
def test_opcheck(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for name in ("fold", "ffn", "complement"):
        operator = getattr(operators, name)

        def record(*args: Any, _operator: Any = operator, _name: str = name) -> Any:
            seen[_name] = tuple(
                a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args
            )
            return _operator(*args)

        monkeypatch.setattr(operators, name, record)
    p = leaves(tensors(case, 1, 2, 0, 0), torch.float32)
    ours(case, p, 2, 0)
    if case.complement:
        ours_from_hidden(case, p, 2, 0)
    monkeypatch.undo()
    torch.use_deterministic_algorithms(False)
    for name, args in seen.items():
        operator = getattr(operators, name)
        torch.library.opcheck(operator, args)
        results = operator(*args)
        count = sum(a is None or isinstance(a, Tensor) for a in args)  # tensors come first
        saved = {"fold": (), "ffn": results[1:-2]}.get(name, results[1:])  # an ffn's last are of the next norm
        backward = getattr(torch.ops.oqc, f"{name}_backward").default
        torch.library.opcheck(  # shapes and strides, which compiled code relies on
            backward, (torch.randn_like(results[0]), *args[:count], *saved, *args[count:]), test_utils="test_faketensor"
        )


def test_autocast_and_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    case = SMALL[0]
    p, function = _call(case)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = function(p)
        again = checkpoint(lambda x: function({**p, "x": x}), p["x"], use_reentrant=False)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, again)
    one = torch.autograd.grad(y.float().sum(), list(p.values()))
    other = torch.autograd.grad(again.float().sum(), list(p.values()))
    for name, a, b in zip(p, one, other, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b), name


def test_gradients_of_any_layout() -> None:
    """y.sum() sends back a gradient without memory of its own, y.mT one with its channels apart."""
    case = SMALL[0]
    p, function = _call(case)
    dy = torch.randn(p["x"].shape[0], p["x"].shape[2], p["x"].shape[1], device=DEVICE)
    one = torch.autograd.grad(function(p), list(p.values()), dy.mT.contiguous())
    other = torch.autograd.grad(function(p), list(p.values()), dy.mT)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    assert all(g.isfinite().all() for g in torch.autograd.grad(function(p).sum(), list(p.values())))


def test_inference_keeps_nothing_and_gives_the_same_output() -> None:
    for case in SMALL:
        p, function = _call(case)
        y = function(p)
        with torch.no_grad():  # another compilation of the kernels, so equal to rounding only
            torch.testing.assert_close(function(p), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [SMALL[0], SMALL[1], SMALL[7], SMALL[-2]], ids=str)
def test_no_image_at_all(case: Case) -> None:
    p = leaves(tensors(case, 0, 2, 0, 0), torch.float32)
    y = ours(case, p, 2, 0)
    assert y.shape == p["x"].shape
    for gradient in torch.autograd.grad(y.sum(), list(p.values())):
        assert not gradient.any()


def test_runs_repeat_to_the_bit() -> None:
    case = SMALL[2]
    p, function = _call(case)
    first, second = (torch.autograd.grad(function(p).square().sum(), list(p.values())) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_torch_func_is_left_to_the_torch_backend() -> None:
    x = torch.zeros(1, 4, 8, device=DEVICE)
    assert fused.chosen("triton", x, 56)
    assert not fused.chosen("triton", x, fused.MOST_RANK + 1)
    assert not fused.chosen("triton", x.double())
    seen = []
    torch.func.grad(lambda x: seen.append(fused.chosen("triton", x)) or x.sum())(x)
    assert seen == [False]


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    import oqc.ops.flops  # noqa: F401

    case = SMALL[1]
    p, function = _call(case)
    with FlopCounterMode(display=False) as counter:
        y = function(p)
        forward = counter.get_total_flops()
        y.sum().backward()
    tokens, h, d, r = 2 * (1 + 3 * case.columns), case.hidden, case.width, 8
    products = d * (2 * h + 2 * r) + h * (d + r) + 18 * h + d * r + r * r
    assert forward == 2 * tokens * products + 2 * (d + r) * h * r
    assert counter.get_total_flops() == 3 * forward


def test_exports() -> None:
    case = SMALL[0]
    p, function = _call(case)
    frozen = {name: item.detach() for name, item in p.items()}

    class Network(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function({**frozen, "x": x})

    exported = torch.export.export(Network(), (frozen["x"],)).module()
    assert torch.equal(exported(frozen["x"]), Network()(frozen["x"]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LARGE[:4], ids=str)
def test_cuda_graph_replays_the_same_numbers(case: Case, dtype: torch.dtype) -> None:
    p = leaves(tensors(case, 64, 8, 0, 0), dtype)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(ours(case, p, 8, 0).float().square().mean(), list(p.values()))

    torch.use_deterministic_algorithms(False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for one, other in zip(expected, captured, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*LARGE[:4], Case(768, 256, 64, 8, mix="gelu", gated=False), LARGE[-1]], ids=str)
@pytest.mark.parametrize("function", [ours, ours_from_hidden])
def test_many_tokens_repeat_to_the_bit(case: Case, dtype: torch.dtype, function: Any) -> None:
    """A loop whose iterations overlap wrongly spoils a few tokens in ten thousand, others every time."""
    if function is ours_from_hidden and not case.complement:
        return
    p = leaves(tensors(case, 512, 8, 0, 0), dtype)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = True  # of the host's own convolutions, where PyTorch makes b

    def gradients() -> tuple[Tensor | None, ...]:
        loss = function(case, p, 8, 0).float().square().mean()
        return torch.autograd.grad(loss, list(p.values()), allow_unused=True)

    first = gradients()
    for _ in range(10):
        for name, one, other in zip(p, first, gradients(), strict=True):
            assert one is other is None or torch.equal(one, other), name


@pytest.mark.parametrize("rank", [32, 56, 128])
def test_a_rounded_gram_matrix_is_as_exact_as_the_literal_product(rank: int) -> None:
    """|O p| with singular values of O from 1 to 0.01: through p^T G p in bf16, and as the norm of O p in bf16."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64))[0] for n in (664, rank))
    lift = (left * torch.logspace(0, -2, rank, dtype=torch.float64)) @ right.T
    exact, stack = (found[0] for found in plain.fold(left.T[None, :8], lift[None], None, "none", torch.bfloat16))
    form = layout.Form(rank=rank, space="none")
    gram = layout.gram_of(stack, exact, form)[:rank, :rank]
    assert gram.dtype == torch.bfloat16
    p = torch.randn(4096, rank, dtype=torch.float64)
    half = p.bfloat16()
    truth = (p @ lift.T).norm(dim=1)
    ours = ((half.double() @ gram.double()) * p).sum(1).sqrt()
    literal = (half @ lift.bfloat16().T).double().norm(dim=1)
    assert ((ours - truth) / truth).abs().max() <= 2 * ((literal - truth) / truth).abs().max()


@pytest.mark.parametrize(("rank", "dtype"), [(31, torch.bfloat16), (64, torch.float16), (64, torch.float32)])
def test_elsewhere_the_gram_matrix_stays_in_full_precision(rank: int, dtype: torch.dtype) -> None:
    exact, stack = (found[0] for found in plain.fold(*(torch.randn(1, 64, n) for n in (64, rank)), None, "none", dtype))
    assert layout.gram_of(stack, exact, layout.Form(rank=rank, space="none")).dtype == torch.float32


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("complement", "rank"), [("lowrank", 1), ("equation", 2), ("lowrank", 3), ("equation", 3), ("dynamic", 5)]
)
def test_in_few_dimensions_the_kernels_lose_no_more_than_the_plain_form(complement: str, rank: int, seed: int) -> None:
    """There q is often nearly parallel to m, and what is left of it a small difference: of three dimensions they lose
    up to 3 times as much over 60 seeds, and are allowed 6; fewer are left to the plain form."""
    torch.manual_seed(seed)
    fast = OQCFFN(16, 24, complement=complement, rank=rank, backend="triton").to(DEVICE)
    for parameter in fast.parameters():
        parameter.data.normal_(0, 0.3)
    plainly, exact = copy.deepcopy(fast), copy.deepcopy(fast).double()
    plainly.backend, exact.backend = "torch", "reference"
    x, dy = torch.randn(2, 2, 200, 16, device=DEVICE)

    def gradients(module: OQCFFN) -> list[Tensor]:
        given = x.to(module.host.fc2.weight.dtype).requires_grad_()
        return list(torch.autograd.grad(module(given), [given, *module.parameters()], dy.to(given.dtype)))

    for ours_, other, truth in zip(*map(gradients, (fast, plainly, exact)), strict=True):
        if rank < 3:
            assert torch.equal(ours_, other)
        error, own = ((item.double() - truth).norm() / truth.norm() for item in (ours_, other))
        assert error <= max(1e-5, 6 * own)


def test_an_endless_logit_is_a_gate_of_one() -> None:
    for rank in (5, 8):  # in a column of v's padding, and behind v
        ffn = OQCFFN(16, 24, host="afbo", complement="dynamic", rank=rank, backend="triton").to(DEVICE)
        assert ffn.complement is not None
        assert ffn.complement.gate_map is not None
        ffn.complement.gate_map.bias.data.fill_(math.inf)
        x = torch.randn(1, 4, 16, device=DEVICE)
        y = ffn(x)
        ffn.backend = "torch"
        torch.testing.assert_close(y, ffn(x))


@pytest.mark.parametrize("complement", ["none", "lowrank", "full"])
def test_a_residual_is_added_as_pytorch_adds_it(complement: str) -> None:
    ffn = OQCFFN(16, 24, host="afbo", complement=complement, rank=5, drop=0.5, backend="triton").to(DEVICE).eval()
    x, residual = torch.randn(2, 3, 4, 16, device=DEVICE)
    y = ffn(x)
    for item in (residual, residual[:1], residual.double(), residual.transpose(0, 1).contiguous().transpose(0, 1)):
        torch.testing.assert_close(ffn(x, residual=item), item + y)
    ffn.host.drop2.train()  # as for Monte Carlo dropout
    assert not torch.equal(ffn(x, residual=residual), ffn(x, residual=residual))
    ffn.host.drop2.eval()
    ffn.host.drop2.register_forward_hook(lambda module, given, out: out * 0)
    assert torch.equal(ffn(x, residual=residual), residual)


@pytest.mark.parametrize("host", ["mlp", "afbo"])
@pytest.mark.parametrize("complement", ["none", "lowrank", "full"])
def test_biases_and_depthwise_maps_of_any_layout(host: str, complement: str) -> None:
    """Kernels read them from their address on: what is strided, expanded or transposed must not be taken as it lies."""
    ffn = OQCFFN(16, 24, host=host, complement=complement, rank=5, backend="triton").to(DEVICE)
    strange = {"host.fc2.bias": torch.randn(32, device=DEVICE)[::2]}
    if host == "afbo":
        strange |= {
            "host.spatial_a.bias": torch.randn(1, device=DEVICE).expand(24),
            "host.spatial_b.bias": torch.randn(24, 2, device=DEVICE)[:, 1],
            "host.spatial_a.weight": torch.randn(24, 1, 3, 3, device=DEVICE).transpose(2, 3),
            "host.spatial_b.weight": torch.randn(1, 1, 3, 3, device=DEVICE).expand(24, 1, 3, 3),
        }
    exact, x = copy.deepcopy(ffn).double(), torch.randn(2, 9, 16, device=DEVICE)
    exact.backend = "reference"

    def found(module: OQCFFN, dtype: torch.dtype) -> list[Tensor]:
        given = {name: item.to(dtype).requires_grad_() for name, item in strange.items()}
        y = torch.func.functional_call(module, given, (x.to(dtype),))
        return [y, *torch.autograd.grad(y.square().sum(), list(given.values()))]

    assert not any(item.float().is_contiguous() for item in strange.values())  # nor is what the kernels are given
    for ours_, truth in zip(found(ffn, torch.float32), found(exact, torch.float64), strict=True):
        torch.testing.assert_close(ours_.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("complement", ["none", "lowrank", "full", "shared"])
@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_maps_run_in_one_operator(groups: int, complement: str) -> None:
    """As one product with their weights' zeros, of which gradients see nothing."""
    ffn = OQCFFN(16, 24, host="afbo", groups=groups, complement=complement, rank=5, backend="triton").to(DEVICE)
    exact = copy.deepcopy(ffn).double()
    exact.backend = "reference"
    x = torch.randn(2, 16, 16, device=DEVICE)
    assert ffn._is_one_operator(x)

    def found(module: OQCFFN, x: Tensor) -> list[Tensor]:
        y = module(x.requires_grad_())
        return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]

    for ours_, truth in zip(found(ffn, x.clone()), found(exact, x.double()), strict=True):
        torch.testing.assert_close(ours_.double(), truth, rtol=1e-4, atol=1e-5)
    hook = ffn.host.map_a.register_forward_hook(lambda *_: None)
    assert not ffn._is_one_operator(x)
    hook.remove()


def _convolution(**options: Any) -> torch.nn.Conv2d:
    return torch.nn.Conv2d(24, 24, **({"kernel_size": 3, "padding": 1, "groups": 24} | options))


@pytest.mark.parametrize("complement", ["none", "lowrank"])
@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"dilation": 2, "padding": 2},
        {"padding_mode": "circular"},
        {"kernel_size": 5, "padding": 2},
        {"groups": 1},
    ],
    ids=str,
)
def test_other_convolutions_in_the_place_of_afbos(options: dict[str, Any], complement: str) -> None:
    ffn = OQCFFN(16, 24, host="afbo", complement=complement, rank=5, backend="triton").to(DEVICE)
    x = torch.randn(2, 16, 16, device=DEVICE)
    assert ffn._is_one_operator(x)
    for name in ("spatial_a", "spatial_b"):
        before = getattr(ffn.host, name)
        setattr(ffn.host, name, _convolution(**options).to(DEVICE))
        ffn.backend = "triton"
        y = ffn(x)
        ffn.backend = "reference"
        torch.testing.assert_close(y, ffn(x), rtol=1e-4, atol=1e-5)
        setattr(ffn.host, name, before)


@pytest.mark.parametrize("host", ["mlp", "afbo"])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_differentiation(host: str, grad: bool) -> None:
    import torch.autograd.forward_ad as forward_ad

    ffn = OQCFFN(8, 12, host=host, rank=3, backend="triton").to(DEVICE)
    x, direction = torch.randn(2, 2, 4, 8, device=DEVICE)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        tangents = []
        for backend in ("triton", "torch"):
            ffn.backend = backend
            tangents.append(forward_ad.unpack_dual(ffn(forward_ad.make_dual(x, direction))).tangent)
    assert tangents[0] is not None
    torch.testing.assert_close(*tangents)


def test_a_square_grid_of_any_number_of_tokens_compiles_whole() -> None:
    ffn = OQCFFN(8, 16, host="afbo", rank=4, backend="torch").to(DEVICE)
    compiled = torch.compile(ffn, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 9, 16):
        x = torch.randn(2, tokens, 8, device=DEVICE)
        torch.testing.assert_close(compiled(x), ffn(x))


@pytest.mark.parametrize(
    ("rank", "gate", "fills"), [(8, "scalar", 0), (5, "scalar", 1), (5, "token", 1), (7, "token", 1)]
)
def test_what_pads_the_weights_takes_no_launch_of_its_own(rank: int, gate: str, fills: int) -> None:
    """In inference each fill of zeros is a launch a block: a map without a bias reads some that are there, and the rows
    that pad u serve v too."""
    filled: list[int] = []

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            filled.extend([1] if "zero" in str(function) else [])
            return function(*args, **(kwargs or {}))

    case = Case(16, 24, rank, 3, gate=gate, residual=True)
    p = leaves(tensors(case, 1, 2, 0, 0), torch.float32)
    with torch.no_grad():
        want = ours(case, p, 2, 0)
        with Fills():
            assert torch.equal(ours(case, p, 2, 0), want)
    assert len(filled) == fills


def test_a_hidden_map_narrower_than_the_rank() -> None:
    """Zeros that are read in place of a bias are those left of G, of which there are as many as channels."""
    case = Case(16, 9, 16, 3)
    p, exact = (leaves(tensors(case, 2, 2, 0, 0), dtype) for dtype in (torch.float32, torch.float64))
    assert ratio(squares_of(ours(case, p, 2, 0), literal(case, exact, 2, 0)[0])) <= 1e-5
