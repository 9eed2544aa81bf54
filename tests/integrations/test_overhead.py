"""Injection is quick, and the module around the branch costs little Python."""

import copy
import time

import timm
import torch
from timm.layers import Mlp
from torch.nn import functional as F

from oqc.integrations.injection import inject
from oqc.ops import rankspace


def test_vit_base_in_under_two_seconds():
    model = timm.create_model("vit_base_patch16_224")
    began = time.perf_counter()
    report = inject(model, "lowrank", rank=64)
    assert time.perf_counter() - began < 2
    assert len(report.replaced) == 12


def best(functions, rounds=150, calls=20):
    """Least seconds a call for each, in turns, so that a busy machine hurts all alike."""
    least = [float("inf")] * len(functions)
    for _ in range(rounds):
        for i, function in enumerate(functions):
            began = time.perf_counter()
            for _ in range(calls):
                function()
            least[i] = min(least[i], (time.perf_counter() - began) / calls)
    return least


def seconds_of_python():
    """(Python around the operations that injecting adds, everything that it adds), a block and forward.

    The first is what the modules take over the same tensor operations called directly, less what an MLP's take.
    """
    plain = Mlp(16, 32).eval()
    module = copy.deepcopy(plain)
    inject(module, "lowrank", rank=4)
    x, branch = torch.randn(1, 4, 16), module.complement

    def operations():
        b = F.gelu(F.linear(x, plain.fc1.weight, plain.fc1.bias))
        u, v = F.linear(x, branch.u.weight), F.linear(x, branch.v.weight)
        gate = branch.alpha.squeeze(0) * torch.sigmoid(branch.beta.squeeze(0))
        weights = plain.fc2.weight, plain.fc2.bias, branch.lift.weight, branch.project.weight
        return rankspace.output(b, u, v, gate, *weights, space="rank", normalise=True, eps=1e-6)

    def mlp_operations():
        b = F.gelu(F.linear(x, plain.fc1.weight, plain.fc1.bias))
        return F.linear(b, plain.fc2.weight, plain.fc2.bias)

    with torch.no_grad():
        whole, direct, mlp, mlp_direct = best([lambda: module(x), operations, lambda: plain(x), mlp_operations])
    return (whole - direct) - (mlp - mlp_direct), whole - mlp


def test_python_of_a_block():
    """The aim is 20 microseconds; twice that leaves room for a slow or busy machine."""
    python, _ = seconds_of_python()
    assert python < 40e-6


if __name__ == "__main__":
    torch.set_num_threads(1)
    python, everything = seconds_of_python()
    print(
        f"Python {1e6 * python:.1f} us, with the branch's own operations {1e6 * everything:.1f} us a block, eager CPU"
    )
