"""Any complement on any host through one class."""

import copy

import pytest
import timm
import torch
from torch import nn

import oqc
from oqc.config import HOSTS
from oqc.nn import KINDS, OQCFFN, Complement
from oqc.nn.hosts import host_class
from oqc.ops import rankspace, reference

ORTHOGONAL = [name for name, kind in KINDS.items() if kind.space != "none"]


def ffn(host="mlp", complement="lowrank", rank=8, **options):
    torch.manual_seed(0)
    return OQCFFN(16, 24, host=host, complement=complement, rank=rank, **options)


@pytest.mark.parametrize("complement", KINDS)
@pytest.mark.parametrize("host", HOSTS)
def test_backends_share_parameters_and_agree(host, complement):
    module = ffn(host, complement).double()
    other = ffn(host, complement, backend="reference").double()
    assert list(module.state_dict()) == list(other.state_dict())
    other.load_state_dict(module.state_dict())
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    y = module(x)
    assert torch.allclose(y, other(x), atol=1e-12, rtol=1e-10)
    with_names, named = module.intermediates(x)
    assert torch.allclose(y, with_names, atol=1e-12, rtol=1e-10)
    assert {"b", "q", "q_perp", "delta", "gate", "h"} <= set(named)
    assert ("m" in named) == (complement in ORTHOGONAL)
    assert named["gate"].shape == (3, 9, 1)


@pytest.mark.parametrize("complement", KINDS)
def test_every_parameter_gets_a_gradient(complement):
    module = ffn("afbo", complement)
    module(torch.randn(3, 9, 16)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters()), [
        n for n, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]


@pytest.mark.parametrize("complement", ORTHOGONAL)
@pytest.mark.parametrize(("host", "groups"), [*((h, 1) for h in HOSTS), ("afbo", 4)])
def test_post_projection_overlap_in_float32(host, groups, complement):
    """Mean |cos| of the projected feature and m at most 1e-7 over 1e5 tokens, literal and rank-space."""
    module = ffn(host, complement, groups=groups)
    with torch.no_grad():
        x = torch.randn(1563, 64, 16)
        _, maps, b = module._hidden(x)
        _, named = module.intermediates(x)
        part = module.complement
        kappa, z = rankspace.coefficients(
            b,
            *part.branches(x, maps),
            part.gate(x),
            part.lift.weight,
            None if part.project is None else part.project.weight,
            space=part.kind.space,
            normalise=part.kind.normalise,
            eps=part.eps,
        )
        rebuilt = z.double()  # in rank space, z is q_perp up to a positive factor
        if part.kind.space == "hidden":
            rebuilt = kappa.double() * b.double() + z.double() @ part.lift.weight.double().T
        m = named["m"].double()
        before = torch.cosine_similarity(named["q"].double(), m, dim=-1).abs().mean()
        after = [torch.cosine_similarity(v.double(), m, dim=-1).abs().mean() for v in (named["q_perp"], rebuilt)]
    assert x.shape[0] * x.shape[1] >= 1e5
    assert before > 0.02
    assert max(after) <= 1e-7, after


class Spy:
    """Counts how often the literal path runs."""

    def __init__(self, monkeypatch):
        self.calls = 0
        original = reference.update

        def counted(*args, **kwargs):
            self.calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(oqc.ops.reference, "update", counted)


def literal_runs(monkeypatch, module):
    spy = Spy(monkeypatch)
    y = module(torch.randn(2, 9, 16))
    assert torch.isfinite(y).all()
    return spy.calls


class LoRALinear(nn.Linear):
    """A linear layer with something added, as adapters have it."""

    def forward(self, x):
        return super().forward(x) + x.sum(-1, keepdim=True)


def test_identity_is_used_where_it_holds(monkeypatch):
    assert literal_runs(monkeypatch, ffn()) == 0


@pytest.mark.parametrize("case", ["dropout", "norm", "lora", "hook", "pre_hook", "lift_hook", "parametrized", "asked"])
def test_literal_path_where_the_identity_is_not_valid(monkeypatch, case):
    module = ffn(
        drop=0.1 if case == "dropout" else 0.0,
        norm_layer=nn.LayerNorm if case == "norm" else None,
        backend="reference" if case == "asked" else "torch",
    )
    host = module.host
    if case == "lora":
        host.fc2 = LoRALinear(24, 16)
    elif case == "hook":
        host.fc2.register_forward_hook(lambda m, i, o: o * 2)
    elif case == "pre_hook":
        host.fc2.register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    elif case == "lift_hook":
        module.complement.lift.register_forward_hook(lambda m, i, o: o * 2)
    elif case == "parametrized":
        nn.utils.parametrizations.weight_norm(host.fc2)
    assert literal_runs(monkeypatch, module) == 1
    if case == "dropout":  # in evaluation nothing stands between h and W
        assert literal_runs(monkeypatch, module.eval()) == 0


def test_hook_on_the_output_projection_sees_h():
    seen = []
    module = ffn()
    module.host.fc2.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    x = torch.randn(2, 9, 16)
    module(x)
    assert torch.allclose(seen[0], module.intermediates(x)[1]["h"])


def test_use_conv_is_the_same_function_with_channels_first():
    for host in ("mlp", "afbo"):
        plain, conv = ffn(host), ffn(host, use_conv=True)
        conv.load_state_dict(plain.state_dict())
        x = torch.randn(2, 16, 4, 4)
        assert torch.allclose(conv(x), plain(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_signature_is_timms():
    import inspect

    from timm.layers import Mlp

    names = list(inspect.signature(Mlp.__init__).parameters)
    assert list(inspect.signature(OQCFFN.__init__).parameters)[: len(names)] == names


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("bias", [(False, True), (True, False), [False, False]])
def test_bias_and_dropout_in_pairs_as_timms(host, bias):
    module = ffn(host, bias=bias, drop=(0.1, 0.0), backend="triton")
    assert [module.host.fc2.bias is not None, module.host.up()[0].bias is not None] == [bias[1], bias[0]]
    assert (module.host.drop1.p, module.host.drop2.p) == (0.1, 0.0)
    assert parameters(module.host) == host_class(host).parameters_of(16, 24, 16, bias)
    assert OQCFFN(16, match=4.0, host=host, bias=bias, rank=4).hidden_features % 8 == 0
    other = copy.deepcopy(module.eval())
    other.backend = "reference"
    x = torch.randn(2, 9, 16)
    assert torch.allclose(module(x), other(x), atol=1e-5)
    if host == "mlp":
        timms = timm.layers.Mlp(16, 24, bias=bias, drop=(0.1, 0.0))
        plain = OQCFFN(16, 24, bias=bias, drop=(0.1, 0.0), complement="none")
        plain.load_state_dict(timms.state_dict())
        assert torch.equal(plain.eval()(x), timms.eval()(x))


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("weight_init", ["", "jax", "moco"])
@pytest.mark.parametrize("complement", ["lowrank", "static", "dynamic"])
def test_timms_initialiser_leaves_the_gate_alone(weight_init, complement):
    from functools import partial

    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=3,
        weight_init=weight_init,
        mlp_layer=partial(OQCFFN, complement=complement, rank=4),
    )
    for block in model.blocks:
        part = block.mlp.complement
        if complement == "dynamic":
            assert part.gate_map.weight.abs().max() == 0
            assert part.gate_map.bias.item() == -2
        else:
            assert abs(part.beta.item() - (-2 if complement == "lowrank" else 0)) < 0.05
        assert 0.01 < part.u.weight.std() < 0.03
    assert not torch.equal(model.blocks[0].mlp.complement.u.weight, model.blocks[1].mlp.complement.u.weight)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("complement", KINDS)
def test_a_complement_does_not_shift_what_the_rest_draws(complement):
    def draw(name):
        torch.manual_seed(3)
        module = OQCFFN(16, 24, complement=name, rank=4)
        return [*module.host.parameters(), torch.randn(4)]

    assert all(torch.equal(a, b) for a, b in zip(draw("none"), draw(complement), strict=True))


def test_gate_starts():
    starts = {name: ffn(complement=name).complement.gate(torch.randn(1, 1, 16)).flatten()[0].item() for name in KINDS}
    low = torch.sigmoid(torch.tensor(-2.0)).item()
    assert starts["full"] == starts["lowrank"] == starts["shared"] == pytest.approx(low)
    assert starts["dynamic"] == pytest.approx(low)
    assert starts["static"] == pytest.approx(0.5, abs=0.02)
    assert starts["unprojected"] == pytest.approx(0.5, abs=0.02)
    assert starts["ungated"] == 1
    assert ffn(gate_init=1.5).complement.beta.item() == 1.5


def test_dynamic_gate_is_one_number_a_token():
    module = ffn(complement="dynamic")
    nn.init.normal_(module.complement.gate_map.weight)
    gate = module.complement.gate(torch.randn(2, 9, 16))
    assert gate.shape == (2, 9, 1)
    assert gate.std() > 0.05


def test_shared_projection_reads_the_hosts_own_maps():
    module = ffn("afbo", "shared")
    assert not hasattr(module.complement, "u")
    x = torch.randn(2, 9, 16)
    u, v = module.complement.branches(x, module.host.maps(x))
    assert torch.equal(u, module.host.map_a(x)[..., :8])
    assert torch.equal(v, module.host.map_b(x)[..., :8])


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("gradients", [True, False])
def test_an_activation_in_place_leaves_a_shared_projection_its_maps(backend, gradients):
    module = ffn("mlp", "shared", act_layer=lambda: nn.ReLU(inplace=True), backend=backend)
    plain = ffn("mlp", "shared", act_layer=nn.ReLU, backend="reference")
    x = torch.randn(2, 9, 16)
    with torch.set_grad_enabled(gradients):
        assert torch.allclose(module(x), plain(x), atol=1e-5)
        assert torch.equal(module.intermediates(x)[1]["q"], plain.intermediates(x)[1]["q"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be from 1 to the hidden width 24, got 0"),
        ({"rank": 25}, "rank must be from 1 to the hidden width 24, got 25"),
        ({"complement": "low_rank"}, "complement must be one of .*'low_rank'; did you mean 'lowrank'"),
        ({"rank": 4.0}, "rank must be a whole number, got 4.0"),
        ({"groups": 0}, "groups must be a whole number from 1 on, got 0"),
        ({"out_features": -4}, "out_features must be a whole number from 1 on, got -4"),
        ({"grid": 3}, r"grid must be None or \(rows, columns\), got 3"),
        ({"act_layer": "gelu"}, "act_layer must be a class of modules or a function that makes one, got 'gelu'"),
        ({"act_layer": nn.GELU()}, "act_layer must be a class of .*, got a GELU that is made already"),
        ({"norm_layer": nn.LayerNorm(24)}, "norm_layer must be a class of .*, got a LayerNorm that is made already"),
        ({"norm_layer": "layer"}, "norm_layer must be a class of modules or a function that makes one, got 'layer'"),
        ({"eps": "x"}, "eps must be more than 0 and finite, got 'x'"),
        ({"gate_init": "x"}, "gate_init must be a finite number, got 'x'"),
        ({"bias": "no"}, "bias must be one value or two, got 'no'"),
        ({"drop": (0.1, 0.1, 0.1)}, r"drop must be one value or two, got \(0.1, 0.1, 0.1\)"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype of floating point, got 'float32'"),
        ({"backend": "tritn"}, "backend must be one of .*'tritn'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ffn(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OQCFFN(16, 48),
        lambda: oqc.mlp_layer()(16, 48),
        lambda: oqc.inject(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))),
        lambda: oqc.create_model("deep_vit_mlp", hidden=48, complement="lowrank"),
    ],
)
def test_a_default_rank_that_does_not_fit_is_told_to_be_that(make):
    message = "^rank must be from 1 to the hidden width 48, got 56, which is the default: give a smaller rank$"
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_widths_and_inputs():
    with pytest.raises(ValueError, match=r"hidden_features must be a whole number from 1 on, got 32\.0"):
        OQCFFN(16, 32.0)
    with pytest.raises(ValueError, match=r"with use_conv the input must be \[B, 16, h, w\], got \[2, 9, 16\]"):
        ffn(use_conv=True)(torch.randn(2, 9, 16))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("complement", ["full", "lowrank", "dynamic"])
def test_bf16_autocast_follows_float64(complement, backend):
    module = ffn("afbo", complement, backend=backend)
    exact = copy.deepcopy(module).double()
    x = torch.randn(4, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    truth = exact(x.double())
    assert (y.double() - truth).norm() / truth.norm() < 0.02


def test_pure_bf16_module():
    y = ffn("afbo", "full").bfloat16()(torch.randn(2, 9, 16, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16


def test_compiles_whole():
    for complement in ("lowrank", "full"):
        module = ffn("afbo", complement)
        x = torch.randn(2, 9, 16)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x), module(x), atol=1e-6)


def test_meta_device():
    module = OQCFFN(16, 24, complement="lowrank", rank=4, device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert isinstance(module.complement, Complement)


@pytest.mark.parametrize("complement", ["none", "lowrank"])
def test_dropout_between_acts_by_its_own_mode(complement):
    ffn = OQCFFN(8, 16, drop=0.5, complement=complement, rank=4).eval()
    x = torch.randn(2, 5, 8)
    assert torch.equal(ffn(x), ffn(x))
    ffn.host.drop1.train()  # Monte Carlo dropout
    assert not torch.equal(ffn(x), ffn(x))
    ffn.train()
    ffn.host.drop1, ffn.host.drop2 = nn.Identity(), nn.Identity()
    assert torch.equal(ffn(x), ffn(x))
    ffn.host.drop1.register_forward_hook(lambda module, given, out: 0 * out)
    assert torch.allclose(ffn(x), ffn.host.fc2.bias.expand(2, 5, 8))


def test_a_device_given_by_number_is_one():
    """0 is the first GPU, not nothing."""
    with pytest.raises((AssertionError, RuntimeError)):  # as PyTorch says that it is not there
        Complement("lowrank", 8, 16, 4, device=torch.cuda.device_count())
