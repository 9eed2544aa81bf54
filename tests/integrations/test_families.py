"""Every family of the table, and the table itself."""

import pytest
import torch
from integration_families import FAMILIES, build, check, documented, images, output, table

from oqc.integrations.injection import inject, remove

IDS = [f"{family.library}-{family.name}" for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_family(family):
    row = check(family)
    assert row.replaced >= 2
    assert row.unchanged
    assert row.moves
    assert row.equal


@pytest.mark.parametrize("family", FAMILIES, ids=IDS)
def test_base_checkpoint_loads_and_weights_stay_the_same_objects(family):
    model = build(family)
    before, pointers = dict(model.named_parameters()), {n: p.data_ptr() for n, p in model.named_parameters()}
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    inject(model, "lowrank", rank=4)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] and after[name].data_ptr() == pointers[name] for name in before)
    new = after.keys() - before.keys()
    assert new
    assert all(".complement." in name for name in new)
    branch = {name: after[name].detach().clone() for name in new}
    for parameter in before.values():
        torch.nn.init.normal_(parameter)
    model.load_state_dict(checkpoint)
    assert all(torch.equal(after[name], branch[name]) for name in new)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in checkpoint.items())


def test_identity_start_in_bf16_and_with_dropout():
    """The same bits in training mode too: the branch draws nothing, so dropout's masks stay."""
    for family in FAMILIES[:1] + [f for f in FAMILIES if f.library == "torchvision"][:1]:
        model = build(family).bfloat16()
        x = images(family).bfloat16()
        for training in (False, True):
            torch.manual_seed(0)
            before = output(model.train(training), x)
            report = inject(model, "full", rank=4)
            torch.manual_seed(0)
            assert torch.equal(output(model, x), before), report
            remove(model)


def test_table_in_the_docs():
    """Written by `python tests/integrations/integration_families.py`."""
    assert documented() == table()
