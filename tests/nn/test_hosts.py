import pytest
import torch
from torch import nn
from torch.nn import functional as F

from oqc.config import HOSTS
from oqc.nn import OQCFFN, match_hidden
from oqc.nn.hosts import AFBO, GATES, CrossMap, CycleMap, host_class


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("host", HOSTS)
def test_parameter_formula_is_what_the_module_has(host):
    for bias in (True, False):
        ffn = OQCFFN(16, 24, 12, bias=bias, host=host, complement="none")
        assert parameters(ffn) == host_class(host).parameters_of(16, 24, 12, bias)


def test_grouped_parameter_formula():
    ffn = OQCFFN(32, 48, host="afbo", groups=4, complement="none")
    assert parameters(ffn) == AFBO.parameters_of(32, 48, 32, True, groups=4)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("host", HOSTS)
def test_matched_width_is_the_nearest_multiple_of_eight(host, groups):
    if host != "afbo" and groups != 1:
        return
    budget, width = 2 * 192 * 768 + 768 + 192, 192
    hidden = match_hidden(host, width, groups=groups)
    counts = {h: host_class(host).parameters_of(width, h, width, True, groups) for h in range(8, 2000, 8)}
    assert hidden == min(counts, key=lambda h: abs(counts[h] - budget))


def test_matched_widths_of_the_paper():
    assert match_hidden("afbo", 256) == 664
    assert match_hidden("afbo", 256, groups=4) == 984
    assert match_hidden("mlp", 256) == 1024


@pytest.mark.parametrize(("host", "act"), [("glu", torch.sigmoid), ("bilinear", None), ("swiglu", F.silu)])
def test_glu_family(host, act):
    ffn = OQCFFN(6, 8, host=host, complement="none")
    x = torch.randn(2, 3, 6)
    a, c = (
        F.linear(x, ffn.host.fc1_g.weight, ffn.host.fc1_g.bias),
        F.linear(x, ffn.host.fc1_x.weight, ffn.host.fc1_x.bias),
    )
    want = ffn.host.fc2((a if act is None else act(a)) * c)
    assert torch.equal(ffn(x), want)
    assert set(GATES) == {"glu", "bilinear", "reglu", "geglu", "swiglu"}


def test_cycle_map_reads_its_own_and_the_next_group():
    layer = CycleMap(8, 12, groups=4, bias=True).double()
    x = torch.randn(8, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x)  # [12, 8]
    for out in range(12):
        group = out // 3
        reads = {int(i) // 2 for i in jacobian[out].nonzero()}
        assert reads == {group, (group + 1) % 4}


def test_cross_map_feeds_every_output_group_from_every_input_group():
    layer = CrossMap(8, 12, groups=2, bias=True).double()
    jacobian = torch.autograd.functional.jacobian(layer, torch.randn(8, dtype=torch.float64))
    sources = [{int(i) // 4 for i in row.nonzero()} for row in jacobian]
    assert sources == [{0}, {1}] * 6  # interleaved: each output group of 6 channels hears from both


@pytest.mark.parametrize(("cls", "groups"), [(CycleMap, 2), (CycleMap, 4), (CrossMap, 2), (CrossMap, 4)])
def test_a_grouped_map_as_one_product(cls, groups):
    layer = cls(8, 12, groups=groups, bias=True).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(F.linear(x, layer.dense_weight(), layer.bias), layer(x))


def test_afbo_against_a_loop_over_the_grid():
    torch.manual_seed(0)
    ffn = OQCFFN(5, 8, host="afbo", complement="none", grid=(3, 2), prefix_tokens=2).double()
    host, x = ffn.host, torch.randn(2, 8, 5, dtype=torch.float64)
    a, c = host.maps(x)

    def spatial(t, conv):
        grid, out = t[:, 2:].view(2, 3, 2, 8), torch.zeros(2, 3, 2, 8, dtype=torch.float64)
        for i in range(3):
            for j in range(2):
                for di in range(-1, 2):
                    for dj in range(-1, 2):
                        if 0 <= i + di < 3 and 0 <= j + dj < 2:
                            out[:, i, j] += grid[:, i + di, j + dj] * conv.weight[:, 0, di + 1, dj + 1]
        return torch.cat([t[:, :2], (out + conv.bias).view(2, 6, 8)], dim=1)

    want = host.fc2(F.gelu(spatial(a, host.spatial_a)) * spatial(c, host.spatial_b))
    assert torch.allclose(ffn(x), want, atol=1e-12)


def test_afbo_takes_a_grid_of_any_shape_as_four_dimensions():
    ffn = OQCFFN(5, 8, host="afbo", complement="lowrank", rank=4).double()
    x = torch.randn(2, 4, 4, 5, dtype=torch.float64)
    assert torch.allclose(ffn(x).flatten(1, 2), ffn(x.flatten(1, 2)))
    assert ffn(torch.randn(1, 2, 7, 5, dtype=torch.float64)).shape == (1, 2, 7, 5)


@pytest.mark.parametrize(
    ("options", "tokens", "message"),
    [
        ({"grid": (4, 4)}, 17, "17 tokens.*needs 16"),
        ({"grid": (4, 4), "prefix_tokens": 1}, 16, "16 tokens.*needs 17"),
        ({}, 15, "15 tokens.*not a square"),
        ({"prefix_tokens": 5}, 5, "5 tokens"),
    ],
)
def test_token_count_must_be_the_grid_plus_prefix(options, tokens, message):
    ffn = OQCFFN(8, 16, host="afbo", rank=4, **options)
    with pytest.raises(ValueError, match=message):
        ffn(torch.randn(1, tokens, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "afbo", "groups": 3}, "groups must be 1 .dense. or an even number, got 3"),
        ({"host": "afbo", "groups": 16}, "groups must divide in_features"),
        ({"host": "mlp", "groups": 4}, "groups is for the afbo host"),
        ({"host": "swiglo"}, "host must be one of .*got 'swiglo'; did you mean 'swiglu'"),
    ],
)
def test_bad_host_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        OQCFFN(8, 16, rank=4, **options)


def test_norm_layer_and_dropout_stand_between_h_and_the_output():
    ffn = OQCFFN(8, 16, norm_layer=nn.LayerNorm, drop=0.5, complement="none").eval()
    x = torch.randn(2, 3, 8)
    assert torch.equal(ffn(x), ffn.host.fc2(ffn.host.norm(F.gelu(ffn.host.fc1(x)))))


@pytest.mark.parametrize("shape", [(9, 16), (16,), (2, 4, 2, 2, 16)])
def test_afbo_says_which_shapes_it_takes(shape):
    with pytest.raises(ValueError, match=rf"takes \[B, N, D\] or \[B, h, w, D\], got {len(shape)} dimensions"):
        OQCFFN(16, 48, host="afbo", rank=4)(torch.randn(shape))
