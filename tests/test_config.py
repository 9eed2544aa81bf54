import json

import numpy as np
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
        ("train.lrr=1", r"unknown field 'train.lrr'; did you mean 'train.lr'\?"),
        ("trian.lr=1", r"unknown field 'trian.lr'; did you mean 'train.lr'\?"),
        ("rank=8", r"unknown field 'rank'; did you mean 'model.ffn.rank'\?"),
        ("image_size=8", "did you mean 'model.image_size' or 'data.image_size'"),
        ("model.patch=3", r"unknown field 'model.patch'; did you mean 'model.patch_size'\?"),
        ("modle.ffn.rnk=3", r"unknown field 'modle.ffn.rnk'; did you mean 'model.ffn.rank'\?"),
        ("model.nope=3", "unknown field 'model.nope'$"),
        ("model.ffn.rank.x=8", "unknown field 'model.ffn.rank.x'"),
        ("train.precision=fp16", "precision must be one of bf16, fp32, fp64, got 'fp16'$"),
        ("train.epochs=ten", "train.epochs must be a whole number, got 'ten'"),
        ("data.flip=maybe", "data.flip must be true or false, got 'maybe'"),
        ("train.epochs=0", "epochs must be more than 0 and finite, got 0"),
        ("train.mode=fast", "mode must be one of auto, eager, compiled, graph, got 'fast'$"),
        ("train.smoothing=1", "smoothing must be at least 0 and less than 1, got 1.0"),
        ("train.betas=0.9", "train.betas must be 2 numbers"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(ValueError, match=message):
        config.override(Run(), [setting])


@pytest.mark.parametrize(
    ("value", "meant"),
    [("foo", ""), ("low", "lowrank"), ("dynamc", "dynamic"), ("un", ""), ("", ""), ("full", "full")],
)
def test_a_guess_is_a_beginning_or_close(value, meant):
    assert config.nearest(value, config.COMPLEMENTS) == (f"; did you mean {meant!r}?" if meant else "")
    assert config.nearest("foo", config.HOSTS) == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Train(epochs=1.5), "epochs must be a whole number, got 1.5"),
        (lambda: Train(warmup="5"), "warmup must be a number, got '5'"),
        (lambda: Train(betas=0.9), "betas must be 2 numbers, got 0.9"),
        (lambda: Data(crop=None), "crop must be a whole number, got None"),
        (lambda: Data(image_size="32"), "image_size must be a whole number, got '32'"),
        (lambda: Run(model=3), "model must be a table of fields, got 3"),
    ],
)
def test_fields_of_another_kind_are_named_however_a_config_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_config_of_lists_and_numpy_numbers_is_the_one_that_json_gives_back():
    run = Run(train=Train(betas=[0.9, 0.99], epochs=np.int64(3), lr=np.float32(0.5)), model=Model(depth=np.int32(2)))
    assert run == config.from_dict(Run, json.loads(json.dumps(config.to_dict(run))))
    assert hash(run) == hash(Run(train=Train(betas=(0.9, 0.99), epochs=3, lr=0.5), model=Model(depth=2)))


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
