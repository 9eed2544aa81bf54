import json

import pytest

from oqc import config
from oqc.config import FFN, Data, Model, Run, Train


def test_round_trip_through_json():
    run = Run(model=Model(ffn=FFN(complement="full", rank=12)), train=Train(betas=(0.8, 0.9)), data=Data(name="digits"))
    assert config.from_dict(Run, json.loads(json.dumps(config.to_dict(run)))) == run


def test_hash_names_the_content():
    assert config.content_hash(Run()) == config.content_hash(Run())
    assert config.content_hash(Run()) != config.content_hash(Run(train=Train(lr=1e-3)))


def test_override():
    run = config.override(
        Run(), ["train.lr=1e-3", "model.ffn.rank=32", "data.flip=no", "model.ffn.hidden=none", "train.betas=0.8,0.9"]
    )
    assert (run.train.lr, run.model.ffn.rank, run.data.flip, run.model.ffn.hidden) == (1e-3, 32, False, None)
    assert run.train.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.lr", "field=value, got 'train.lr'"),
        ("train.lrr=1", "unknown field 'train.lrr'; did you mean 'lr'"),
        ("trian.lr=1", "unknown field 'trian.lr'; did you mean 'train'"),
        ("train.epochs=ten", "train.epochs must be a whole number, got 'ten'"),
        ("data.flip=maybe", "data.flip must be true or false, got 'maybe'"),
        ("train.epochs=0", "epochs must be more than 0 and finite, got 0"),
        ("train.mode=fast", "mode must be one of auto, eager, compiled, graph, got 'fast'"),
        ("train.smoothing=1", "smoothing must be at least 0 and less than 1, got 1.0"),
        ("train.betas=0.9", "train.betas must be 2 numbers"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        config.override(Run(), [setting])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"depht": 3}}, "unknown field 'model.depht'; did you mean 'depth'"),
        ({"model": {"depth": "3"}}, "model.depth must be a whole number, got '3'"),
        ({"model": {"depth": True}}, "model.depth must be a whole number, got True"),
        ({"train": 3}, "train must be a table of fields, got 3"),
    ],
)
def test_bad_dicts_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        config.from_dict(Run, values)
