"""AdamW's kernels against PyTorch's in float64: odd sizes, addresses that are not aligned, steps that do not count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oqc.ops import triton_adamw
from oqc.ops.triton_adamw import CHUNK
from oqc.train.optim import ROLES, STATE, AdamW, _Table

SHAPES = [(3,), (CHUNK,), (), (7, 150), (CHUNK + 1,), (33, 1, 3, 3), (1,)]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8}


def optimizer(parameters: list[Tensor], lr: Tensor, **options: Any) -> AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    made = AdamW(groups, lr=lr, fused=True, **OPTIONS, **options)
    for p in parameters:
        zeros = (torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), dtype=torch.float32, device=p.device))
        made.state[p] = dict(zip(STATE, zeros, strict=True))
    return made


def drawn() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(DEVICE)) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    """Views one after another in one buffer, so that most begin at odd addresses."""
    torch.manual_seed(10 + step)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flat = (torch.randn(sum(sizes)) * torch.logspace(-4, 1, sum(sizes))).to(DEVICE)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]


def give(parameters: list[nn.Parameter], grads: list[Tensor]) -> None:
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.to(p.dtype, copy=p.dtype != grad.dtype)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the launches, so that a test knows that kernels ran."""
    made: list[str] = []
    for name in ("squares", "update", "count_step"):
        own = getattr(triton_adamw, name)

        def noted(*args: Any, name: str = name, own: Any = own, **options: Any) -> Any:
            made.append(name)
            return own(*args, **options)

        monkeypatch.setattr(triton_adamw, name, noted)
    return made


def test_ten_steps_equal_pytorchs_in_float64(launches: list[str]) -> None:
    ours, exact = drawn(), [nn.Parameter(p.detach().double().cpu()) for p in drawn()]
    lr, divisor = torch.tensor(1e-2, device=DEVICE), torch.tensor(3.0, device=DEVICE)
    mine = optimizer(ours, lr, backend="triton")
    mine.grad_scale = divisor  # type: ignore[attr-defined]
    theirs = optimizer(exact, torch.tensor(1e-2, dtype=torch.float64), backend="torch")
    for step in range(10):
        grads = gradients(step)
        given = [grad.clone() for grad in grads]
        give(ours, grads)
        give(exact, [grad.double().cpu() / 3 for grad in grads])
        norm = mine.norm().double().cpu()
        torch.testing.assert_close(norm, 3 * theirs.norm(), rtol=3e-7, atol=0)
        mine.step()
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(grads, given, strict=True))
    assert launches == ["squares", "squares", "update", "update", "count_step"] * 10
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double().cpu(), q, rtol=1e-6, atol=1e-6)
        for name, tolerance in zip(STATE, (2e-6, 2e-6, 0), strict=True):
            own, right = mine.state[p][name].double().cpu(), theirs.state[q][name].double()
            torch.testing.assert_close(own, right, rtol=tolerance, atol=1e-7 * float(right.abs().max()))


def test_a_step_that_is_not_finite_changes_nothing(launches: list[str]) -> None:
    parameters = drawn()
    mine = optimizer(parameters, torch.tensor(1e-2, device=DEVICE), backend="triton")
    found_inf = torch.tensor(0.0, device=DEVICE)
    mine.found_inf = found_inf  # type: ignore[attr-defined]
    give(parameters, gradients(0))
    mine.step()
    tensors = [t for p in parameters for t in (p, *mine.state[p].values())]
    before = [t.detach().clone() for t in tensors]
    found_inf.fill_(1.0)
    give(parameters, [torch.full_like(p, torch.nan) for p in parameters])
    assert mine.norm().isnan()
    mine.step()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert "update" in launches
    found_inf.fill_(0.0)
    give(parameters, gradients(1))
    mine.step()
    assert not any(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_parameter_without_a_gradient_is_left_alone(launches: list[str]) -> None:
    parameters = drawn()
    mine = optimizer(parameters, torch.tensor(1e-2, device=DEVICE), backend="triton")
    for step, missing in enumerate((2, 3, None)):
        before = [p.detach().clone() for p in parameters]
        give(parameters, gradients(step))
        if missing is not None:
            parameters[missing].grad = None
        mine.step()
        kept = [i for i, (p, old) in enumerate(zip(parameters, before, strict=True)) if torch.equal(p, old)]
        assert kept == ([] if missing is None else [missing])
    assert [int(mine.state[p]["step"]) for p in parameters] == [3, 3, 2, 2, 3, 3, 3]
    assert launches.count("update") == 6


def test_items_next_to_a_tensor_are_never_written(launches: list[str]) -> None:
    buffer = torch.full((CHUNK + 40,), 7.0, device=DEVICE)
    p = nn.Parameter(buffer[20 : 20 + CHUNK + 3])
    mine = optimizer([p], torch.tensor(1e-2, device=DEVICE), backend="triton")
    p.grad = torch.ones_like(p)
    mine.step()
    assert (buffer[:20] == 7).all()
    assert (buffer[20 + CHUNK + 3 :] == 7).all()
    assert (p != 7).all()
    assert launches == ["update", "update", "count_step"]


@pytest.mark.parametrize("betas", [(0.0, 0.99), (0.9, 0.0), (0.0, 0.0)])
def test_betas_of_zero(launches: list[str], betas: tuple[float, float]) -> None:
    ours, theirs = drawn(), drawn()
    lr = torch.tensor(1e-2, device=DEVICE)
    made = [optimizer(some, lr, backend=name) for some, name in ((ours, "triton"), (theirs, "torch"))]
    for one, some in zip(made, (ours, theirs), strict=True):
        for group in one.param_groups:
            group["betas"] = betas
        for step in range(3):
            give(some, gradients(step))
            one.step()
    assert launches.count("update") == 6
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_gradient_whose_square_overflows_leaves_no_nan(launches: list[str]) -> None:
    p = nn.Parameter(torch.ones(3, device=DEVICE))
    mine = optimizer([p], torch.tensor(1e-2, device=DEVICE), backend="triton")
    for value in (3e19, 1.0):
        p.grad = torch.full_like(p, value)
        mine.step()
    assert p.isfinite().all()  # v is infinite, as PyTorch's would be
    assert launches.count("update") == 4


def test_copies_and_loaded_states_step_on(launches: list[str]) -> None:
    parameters = drawn()
    mine = optimizer(parameters, torch.tensor(1e-2, device=DEVICE), backend="triton")
    give(parameters, gradients(0))
    mine.step()
    twin_parameters, twin = copy.deepcopy((parameters, mine))
    again = optimizer([nn.Parameter(p.detach().clone()) for p in parameters], mine.param_groups[0]["lr"])
    again.backend = "triton"
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    for group in again.param_groups:
        group["lr"] = torch.tensor(1e-2, device=DEVICE)
    others = [p for group in again.param_groups for p in group["params"]]
    own = [p for group in mine.param_groups for p in group["params"]]
    grads = {id(p): grad for p, grad in zip(parameters, gradients(1), strict=True)}
    for p, other in zip(own, others, strict=True):
        p.grad, other.grad = grads[id(p)], grads[id(p)].clone()
    give(twin_parameters, gradients(1))
    launches.clear()
    for one in (mine, twin, again):
        one.step()
    assert launches.count("count_step") == 3
    assert all(torch.equal(p, q) for p, q in zip(parameters, twin_parameters, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(own, others, strict=True))


def test_loading_states_leaves_the_tables_that_a_graph_may_read(launches: list[str]) -> None:
    parameters = drawn()
    mine = optimizer(parameters, torch.tensor(1e-2, device=DEVICE), backend="triton")
    give(parameters, gradients(0))
    mine.step()
    before = dict(mine._tables)
    assert before
    mine.load_state_dict(mine.state_dict())
    assert mine._tables.keys() == before.keys()
    assert all(mine._tables[key] is table for key, table in before.items())
    assert not copy.deepcopy(mine)._tables


def test_a_group_that_comes_later_is_stepped(launches: list[str]) -> None:
    parameters = drawn()
    mine = optimizer(parameters, torch.tensor(1e-2, device=DEVICE), backend="triton")
    give(parameters, gradients(0))
    mine.norm()
    late = nn.Parameter(torch.ones(5, device=DEVICE))
    mine.add_param_group({"params": [late]})
    mine.step()  # it has no gradient yet
    assert launches.count("update") == 3
    late.grad = torch.ones_like(late)
    give(parameters, gradients(1))
    mine.step()  # nor a state: PyTorch makes one
    assert launches.count("update") == 3
    mine.step()
    assert launches.count("update") == 6
    assert [int(mine.state[p]["step"]) for p in (parameters[0], late)] == [3, 2]


@pytest.mark.parametrize("reason", ["backend", "dtype", "strides", "amsgrad", "maximize", "float lr"])
def test_what_the_kernels_do_not_fit_goes_to_pytorch(launches: list[str], reason: str) -> None:
    dtype = torch.float64 if reason == "dtype" else torch.float32
    start = torch.ones(4, 6, dtype=dtype, device=DEVICE)
    p = nn.Parameter(start.t() if reason == "strides" else start)
    mine = optimizer([p], torch.tensor(1e-2, device=DEVICE), backend="torch" if reason == "backend" else "triton")
    for group in mine.param_groups:
        group |= {"amsgrad": reason == "amsgrad", "maximize": reason == "maximize"}
        group["lr"] = 1e-2 if reason == "float lr" else group["lr"]
    mine.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)
    p.grad = torch.ones_like(p)
    torch.testing.assert_close(mine.norm(), p.grad.norm())
    mine.step()
    assert launches == []
    assert ((p > 1) if reason == "maximize" else (p < 1)).all()
    assert bool(mine.state[p]["max_exp_avg_sq"].any()) is (reason == "amsgrad")


def cloned_data(x: Tensor) -> None:
    x.data = x.data.clone()


def cloned_gradient(mine: AdamW, p: nn.Parameter) -> None:
    p.grad = p.grad.clone() if p.grad is not None else None


REPLACED: dict[str, Callable[[AdamW, nn.Parameter], Any]] = {
    "gradient": cloned_gradient,
    "parameter's data": lambda mine, p: cloned_data(p),
    "states' data": lambda mine, p: [cloned_data(mine.state[p][name]) for name in STATE],
    "first moment": lambda mine, p: mine.state[p].update(exp_avg=mine.state[p]["exp_avg"].clone()),
    "second moment": lambda mine, p: mine.state[p].update(exp_avg_sq=mine.state[p]["exp_avg_sq"].clone()),
    "step": lambda mine, p: mine.state[p].update(step=mine.state[p]["step"].clone()),
    "state": lambda mine, p: mine.state.update({p: copy.deepcopy(mine.state[p])}),
    "all states": lambda mine, p: mine.load_state_dict(copy.deepcopy(mine.state_dict())),
}


@pytest.mark.parametrize("what", REPLACED)
def test_a_tensor_replaced_between_norm_and_step_is_the_one_used(launches: list[str], what: str) -> None:
    ours, theirs = drawn(), drawn()
    mine, twin = (optimizer(some, torch.tensor(1e-2, device=DEVICE), backend="triton") for some in (ours, theirs))

    def used() -> list[Tensor]:
        return [t.detach() for p in ours for t in (p, p.grad, *(mine.state[p][name] for name in STATE))]

    for step in range(2):
        for one, some in ((mine, ours), (twin, theirs)):
            give(some, gradients(step))
            one.norm()
        before = used()
        REPLACED[what](mine, ours[3])
        now = {t.data_ptr() for t in used()}
        left = [t for t in before if t.data_ptr() not in now]
        assert left
        for t in left:
            t.fill_(torch.nan)
        lr = twin.param_groups[0]["lr"]
        for group in mine.param_groups:  # what is loaded brings its own
            group["lr"] = lr
        mine.step()
        twin.step()
    assert launches.count("update") == 8
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(mine.state[p][name], twin.state[q][name]) for name in STATE)


UNFIT: dict[str, Callable[[AdamW, nn.Parameter], Any]] = {
    "gradient's strides": lambda mine, p: setattr(p, "grad", torch.ones_like(p).t()),
    "parameter's strides": lambda mine, p: setattr(p, "data", p.data.t()),
    "moment's strides": lambda mine, p: mine.state[p]["exp_avg"].t_(),
    "moment's dtype": lambda mine, p: mine.state[p].update(exp_avg=mine.state[p]["exp_avg"].double()),
    "moment's size": lambda mine, p: mine.state[p].update(exp_avg_sq=mine.state[p]["exp_avg_sq"][:5]),
    "parameter's size": lambda mine, p: setattr(p, "data", p.data[:5]),
    "step's class": lambda mine, p: mine.state[p].update(step=1.0),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_no_longer_fits_the_kernels_goes_to_pytorch(
    launches: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = nn.Parameter(torch.ones(6, 6, device=DEVICE))
    mine = optimizer([p], torch.tensor(1e-2, device=DEVICE), backend="triton")
    p.grad = torch.ones_like(p)
    mine.step()
    assert "update" in launches
    launches.clear()
    UNFIT[what](mine, p)
    asked: list[AdamW] = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: asked.append(self))
    mine.step()
    assert asked == [mine]
    assert launches == []


def test_a_sparse_gradient_gets_pytorchs_message() -> None:
    p = nn.Parameter(torch.ones(6, 6, device=DEVICE))
    mine = optimizer([p], torch.tensor(1e-2, device=DEVICE), backend="triton")
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        mine.step()


def test_a_capture_fills_its_table_once_and_keeps_what_it_reads() -> None:
    sizes = (3, 5)
    rows = [[torch.zeros(size) for size in sizes] for _ in range(ROLES)]
    table = _Table(torch.device("cpu"), (1, 1), sizes)
    assert not table.write(rows, capturing=True)  # no memory was put aside
    table.spare = torch.empty(ROLES, len(sizes), dtype=torch.int64)
    assert table.write(rows, capturing=True)
    expected = [[t.data_ptr() for t in row] for row in rows]
    assert table.addresses.tolist() == table.captured[0].tolist() == expected
    table.addresses.zero_()
    assert table.write(rows, capturing=True)
    assert not table.addresses.any()  # the capture's own copy fills it
    other = [[torch.zeros(size) for size in sizes]]
    assert table.write(other, capturing=False)
    assert table.addresses[0].tolist() == [t.data_ptr() for t in other[0]]
    assert not table.addresses[1:].any()
    assert table.captured[0].tolist() == expected
