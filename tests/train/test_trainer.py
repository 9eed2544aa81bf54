from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import TinyNet, poison, run_until, tiny_config, tiny_data, tiny_trainer, without_times

from oqc.train import Diverged, Evaluator, Silent, Status, Trainer, load_weights, many, replay_rate, train_many
from oqc.train.folder import Row
from oqc.train.numerics import DTYPES


class Heard(Silent):
    def __init__(self) -> None:
        self.statuses: list[Status] = []
        self.rows: list[Row] = []

    def status(self, status: Status) -> None:
        self.statuses.append(status)

    def evaluated(self, row: Row) -> None:
        self.rows.append(row)


def test_it_learns_and_says_so() -> None:
    heard = Heard()
    trainer = tiny_trainer(tiny_config(epochs=15), progress=heard, val=16)
    summary = trainer.fit()
    assert summary.best > 60  # chance is 25
    assert summary.history == heard.rows
    assert [row["epoch"] for row in summary.history] == list(range(1, 16))
    assert summary.history[-1]["train_loss"] < summary.history[0]["train_loss"]
    assert summary.parameters == sum(p.numel() for p in trainer.model.parameters())
    assert (summary.steps, summary.epochs, summary.non_finite) == (120, 15, 0)
    assert heard.statuses
    assert {(s.total, s.epochs) for s in heard.statuses} == {(120, 15)}
    assert all(1 <= s.epoch <= 15 and s.loss > 0 and s.images_per_s > 0 for s in heard.statuses)


def test_best_final_and_choice_by_validation_are_kept_apart() -> None:
    trainer = tiny_trainer(tiny_config(epochs=4), val=16)
    scores = {"test": iter([10.0, 90.0, 50.0, 40.0]), "val": iter([1.0, 2.0, 3.0, 3.0])}
    for name, evaluator in trainer.evaluators.items():
        evaluator.start = lambda name=name: torch.tensor(next(scores[name]))  # type: ignore[method-assign]
    summary = trainer.fit()
    assert (summary.best, summary.final, summary.at_best_val) == (90.0, 40.0, 50.0)
    assert tiny_trainer(tiny_config(epochs=1)).fit().at_best_val is None


def test_evaluations_come_every_so_many_epochs_and_at_the_end() -> None:
    summary = tiny_trainer(tiny_config(epochs=5, eval_every=2)).fit()
    assert [row["epoch"] for row in summary.history] == [2, 4, 5]


def test_identical_runs_have_identical_hashes() -> None:
    config = tiny_config({"cutmix": 1.0}, ema=0.9)
    one, two = tiny_trainer(config, drop=0.2).fit(), tiny_trainer(config, drop=0.2).fit()
    assert one.parameter_hash == two.parameter_hash
    assert without_times(one) == without_times(two)
    other = tiny_trainer(tiny_config({"cutmix": 1.0}, ema=0.9, seed=1), drop=0.2).fit()
    assert other.parameter_hash != one.parameter_hash


def test_every_image_counts_once_with_a_short_last_batch() -> None:
    data, model = tiny_data(test=30), TinyNet()
    x = (data.test.images.float() / 255 - 0.4) / 0.25
    expected = 100 * (model.eval()(x).argmax(1) == data.test.labels).double().mean().item()
    for batch in (7, 30, 64):
        evaluator = Evaluator(model.train(), data.test, data, torch.device("cpu"), precision="fp32", batch=batch)
        assert evaluator.start().item() == pytest.approx(expected)
        assert model.training


@pytest.mark.parametrize("precision", list(DTYPES))
def test_precisions(precision: str) -> None:
    trainer = tiny_trainer(tiny_config(epochs=2, precision=precision))
    summary = trainer.fit()
    assert next(trainer.model.parameters()).dtype == DTYPES[precision]
    assert summary.non_finite == 0


def test_too_many_non_finite_steps_stop_with_a_usable_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(epochs=6, nan_limit=5)
    trainer = tiny_trainer(config, tmp_path / "run")
    poison(trainer, range(20, 48))
    with pytest.raises(Diverged, match=r"in a row had a non-finite loss.*nan_limit.*checkpoints"):
        trainer.fit()
    assert trainer.done < 48
    reference = tiny_trainer(config)
    run_until(reference, 20, signal.SIGTERM)
    saved = load_weights(tmp_path / "run")
    assert all(torch.equal(value, saved[name]) for name, value in reference.model.state_dict().items())
    again = tiny_trainer(config, tmp_path / "run", resume=True)
    assert again.fit().non_finite == trainer.done - 20


@pytest.mark.parametrize("start", [24, 26])
def test_a_run_that_diverged_is_no_success_when_resumed(tmp_path: Path, start: int) -> None:
    """In its last step, after which none is left, or with fewer left than the limit."""
    config = tiny_config(nan_limit=6)
    for resume in (False, True, True):
        trainer = tiny_trainer(config, tmp_path / "run", resume=resume)
        trainer.pace.most = 1
        poison(trainer, range(start, 32))
        with pytest.raises(Diverged, match=r"\d steps in a row"):
            trainer.fit()
        assert not (tmp_path / "run" / "summary.json").exists()


def test_non_finite_steps_below_the_limit_are_counted() -> None:
    trainer = tiny_trainer(tiny_config(nan_limit=3))
    poison(trainer, [1, 2, 9, 10, 31])
    summary = trainer.fit()
    assert summary.non_finite == 5
    assert [row["non_finite"] for row in summary.history] == [2, 4, 4, 5]


def test_an_epoch_without_a_finite_step_has_no_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_config(epochs=2, nan_limit=50), tmp_path / "run")
    poison(trainer, range(8))
    assert trainer.fit().history[0]["train_loss"] is None
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["train_loss"] is None


def test_many_equal_alone_and_keep_their_order() -> None:
    configs = [tiny_config(epochs=2, seed=seed) for seed in range(3)]
    together = train_many([lambda c=c: tiny_trainer(c) for c in configs])
    assert [s.parameter_hash for s in together] == [tiny_trainer(c).fit().parameter_hash for c in configs]
    with pytest.raises(ValueError, match="at_once"):
        train_many([], at_once=0)


def test_a_run_that_diverges_lets_the_others_finish(tmp_path: Path) -> None:
    def bad() -> Trainer:
        trainer = tiny_trainer(tiny_config(nan_limit=2), tmp_path / "bad")
        poison(trainer, range(4, 32))
        return trainer

    with pytest.raises(Diverged):
        train_many([bad, lambda: tiny_trainer(tiny_config(), tmp_path / "good")])
    assert (tmp_path / "good" / "summary.json").exists()
    assert not (tmp_path / "bad" / "summary.json").exists()


@pytest.mark.parametrize("building", [False, True])
def test_as_many_run_at_once_as_have_memory(monkeypatch: pytest.MonkeyPatch, building: bool) -> None:
    """The third has none, to be built or to run."""

    def third() -> Trainer:
        if building:
            raise torch.OutOfMemoryError
        return tiny_trainer()

    def rate(trainers: list[Trainer], steps: int) -> float:
        if len(trainers) == 3:
            raise torch.OutOfMemoryError
        return 100.0 * len(trainers)

    monkeypatch.setattr(many, "replay_rate", rate)
    trainers = [tiny_trainer()]
    assert many.faster_together(trainers, [tiny_trainer, tiny_trainer, third]) == len(trainers) == 2


def test_measuring_leaves_the_state_alone() -> None:
    trainer = tiny_trainer(tiny_config(ema=0.9))
    trainer.step(0)
    before = {name: value.clone() for name, value in trainer.step.state().items()}
    assert replay_rate([trainer], 4) > 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.step.state().items())


def test_a_batch_larger_than_the_data_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch"):
        tiny_trainer(tiny_config(batch=1000), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_device_is_named() -> None:
    config = dataclasses.replace(tiny_config())
    with pytest.raises(ValueError, match="device"):
        tiny_trainer(config, device="gpu")


def test_short_epochs_are_looked_at_too() -> None:
    """However fast the steps go by, the host looks once between two evaluations."""
    seen: list[int] = []

    class Watching(Silent):
        def status(self, status: Status) -> None:
            seen.append(status.epoch)

    trainer = tiny_trainer(tiny_config(epochs=40), progress=Watching())
    trainer.pace.interval = 1e9
    trainer.fit()
    assert set(range(3, 41)) <= set(seen)
