import pytest
import torch

import oqc
from oqc.analysis import METRICS, SEPARATION, chance_level, geometry, mechanism, overlap
from oqc.config import FFN, Model
from oqc.report.records import MECHANISM

SMALL = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "width": 16, "depth": 2, "heads": 2}


def model_with(**ffn):
    return oqc.create_model(Model(**SMALL, ffn=FFN(**ffn)), seed=0)


def batches(n=10, size=7):
    g = torch.Generator().manual_seed(1)
    x, labels = torch.randn(n, 1, 8, 8, generator=g), torch.arange(n) % 3
    return [(x[i : i + size], labels[i : i + size]) for i in range(0, n, size)]


@pytest.mark.parametrize("host", ["mlp", "swiglu", "afbo"])
@pytest.mark.parametrize("complement", ["none", "unprojected", "full", "dynamic"])
def test_one_pass_has_what_its_parts_have(host, complement):
    model, data = model_with(host=host, complement=complement, rank=4), batches()
    got = mechanism(model, data)
    assert tuple(got) == METRICS
    # Through the blocks' own forward, not by the literal equations.
    beside = {} if complement == "none" else overlap(model, data)
    for name, value in beside.items():
        assert got[name] == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6))
    with torch.no_grad():
        features = torch.cat([model.eval().forward_features(x) for x, _ in data])
    expected = geometry(features, torch.cat([labels for _, labels in data]))
    assert None not in expected.values()
    assert {name: got[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_what_a_model_has_no_part_for_is_none():
    absent = {c: {n for n, v in mechanism(model_with(complement=c, rank=4), batches()).items() if v is None}
              for c in ("none", "unprojected", "full")}  # fmt: skip
    assert absent["none"] == {"before", "after", "chance", "hidden_cosine", "gate_mean", "gate_std", "gate_token_std"}
    assert absent["unprojected"] == {"before", "after", "chance"}
    assert not absent["full"]


def test_full_is_measured_in_hidden_space():
    model = model_with(complement="full", rank=4)
    got = mechanism(model, batches())
    assert got["chance"] == chance_level(model.blocks[0].ffn.hidden_features)
    assert got["hidden_cosine"] == pytest.approx(got["after"], abs=1e-6)


def test_batches_do_not_matter_and_the_model_is_left_as_it_was():
    model = model_with(complement="static", rank=4).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert mechanism(model, batches(size=3)) == pytest.approx(mechanism(model, batches(size=10)), rel=1e-5, abs=1e-7)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)


def test_weights_that_are_not_finite_give_none_and_no_error():
    model = model_with(complement="lowrank", rank=4)
    with torch.no_grad():
        model.pos_embed.fill_(torch.nan)
    got = mechanism(model, batches())
    assert {name for name, value in got.items() if value is not None} == {
        "chance",
        "gate_mean",
        "gate_std",
        "gate_token_std",
    }


def test_no_batches():
    with pytest.raises(ValueError, match="at least one batch"):
        mechanism(model_with(), [])


def test_the_separation_set_beside_the_papers_is_a_candidate():
    assert SEPARATION in METRICS
    assert SEPARATION.startswith("separation_")


def test_every_metric_has_its_place_in_a_row():
    assert set(MECHANISM) == set(METRICS)
