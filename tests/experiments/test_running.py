"""Real runs, in processes and in turn."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import re
import signal
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from oqc.config import Run, from_dict
from oqc.experiments import running
from oqc.experiments.job import Built, Job, Limited, OutOfTime
from oqc.experiments.running import train_jobs
from oqc.experiments.suites import run_of
from oqc.models import counting
from oqc.report.records import FIELDS, append_record, read_records, rows, speed_of
from oqc.train import many
from oqc.train.step import room_for_compiled_models
from oqc.train.stopping import Stopped, StopRequest, stop_on_signals

CPU = torch.device("cpu")
TIMES = ("images_per_s", "images_per_s_alone", "seconds", "setup_seconds", "environment", "diverged")


def job(preset, seed=0, **train):
    run = run_of(preset, seed, "digits", 1)
    return Job(preset, dataclasses.replace(run, train=dataclasses.replace(run.train, **train)))


JOBS = [job("cifar100_swiglu_lowrank_r56"), job("cifar100_vit_tiny"), job("cifar100_mlp", lr=1e30, nan_limit=1)]


def without_times(record):
    """What must repeat; the step at which a divergence is noticed need not."""
    return {k: v for k, v in record.items() if k not in TIMES}


def in_turn(jobs, *, shared=False):
    return dict(running._in_turn(iter(jobs), jobs, CPU, StopRequest(), lambda job: running.Silent(), shared))


@pytest.fixture
def alone(monkeypatch):
    """Nothing to compile on a CPU: no process for that."""
    monkeypatch.setattr(running, "_compiling_ahead", lambda todo, device: contextlib.nullcontext(lambda: False))


@pytest.fixture(scope="module")
def in_processes():
    return {one.preset: found for one, found in train_jobs(JOBS, CPU, StopRequest(), workers=2)}


def test_a_record_holds_the_whole_run(in_processes):
    for one in JOBS[:2]:
        record = in_processes[one.preset]
        assert set(FIELDS) < set(record)
        assert json.loads(json.dumps(record)) == record
        config = from_dict(Run, record["config"])
        assert config == one.run
        assert record["parameters"] == counting.parameters(config.model)
        assert [point["epoch"] for point in record["per_epoch"]] == [1]
        assert record["best"] == record["final"] == record["per_epoch"][0]["test"]
        assert min(record["seconds"], record["setup_seconds"], record["images_per_s"]) > 0
        assert record["environment"]["threads"] == 1
        assert not re.search(r'"/|command', json.dumps(record))


def test_mechanism_is_there_for_every_host(in_processes):
    branch, plain = (in_processes[one.preset]["mechanism"] for one in JOBS[:2])
    assert None not in branch.values()
    assert branch["after"] < 1e-5 < branch["before"]
    missing = {name for name, value in plain.items() if value is None}
    assert missing == {"before", "after", "chance", "hidden_cosine", "gate_mean", "gate_std", "gate_token_std"}


def test_a_run_that_diverges_is_recorded_as_such(in_processes, tmp_path):
    record = in_processes["cifar100_mlp"]
    assert record["diverged"]["epoch"] == 1
    assert 1 <= record["diverged"]["step"] <= 1438 // JOBS[2].run.train.batch  # as soon as the host looks
    assert from_dict(Run, record["config"]) == JOBS[2].run
    assert record["environment"]["threads"] == 1
    assert not {"best", "final", "images_per_s", "mechanism"} & record.keys()
    append_record(tmp_path / "runs.jsonl", record)
    assert read_records(tmp_path / "runs.jsonl") == [record]
    assert rows([record]) == []


def test_a_run_that_diverges_keeps_the_epochs_before(alone, monkeypatch):
    """One that would go on for ten is stopped in its second."""
    one = job("cifar100_mlp", epochs=10, nan_limit=1)

    class Poisoned(Built):
        def __init__(self, *args):
            super().__init__(*args)
            batches, sound = self.trainer.step.batches, self.trainer.step.batches.next

            def next_(step):
                x, *rest = sound(step)
                return torch.where(step == self.trainer.per_epoch, torch.nan, x), *rest

            batches.next = next_

    monkeypatch.setattr(running, "Built", Poisoned)
    [record] = in_turn([one]).values()
    assert record["diverged"]["epoch"] == 2
    assert [point["epoch"] for point in record["per_epoch"]] == [1]
    assert record["seconds"] > 0


def test_in_turn_in_this_process_it_is_the_same(in_processes, monkeypatch):
    monkeypatch.setattr(many, "GAIN", 1e9)  # no gain is enough: one at a time
    found = in_turn(JOBS)
    assert list(found) == JOBS
    for one, record in found.items():
        assert without_times(record) == without_times(in_processes[one.preset])
    assert not multiprocessing.active_children()


def test_side_by_side_where_that_is_faster(in_processes, alone, monkeypatch):
    monkeypatch.setattr(many, "GAIN", 0.0)  # whatever is measured is a gain
    found = in_turn(JOBS[:2])
    assert [record.pop("at_once") for record in found.values()] == [2, 2]
    assert all(record["images_per_s_alone"] > 0 for record in found.values())
    for one, record in found.items():
        expected = without_times(in_processes[one.preset])
        assert without_times(record) == {k: v for k, v in expected.items() if k != "at_once"}


def test_beside_other_work_nothing_is_measured(alone, monkeypatch):
    for module in ("oqc.train.many", "oqc.experiments.job"):
        monkeypatch.setattr(f"{module}.replay_rate", lambda *args: pytest.fail("measured a shared device"))
    one, two = in_turn(JOBS[:2], shared=True).values()
    assert "images_per_s_alone" not in one.keys() | two.keys()
    assert one["at_once"] == two["at_once"] == 1
    ((_, record),) = train_jobs(JOBS[1:2], CPU, StopRequest(), workers=1, shared=True)
    assert record["shared_device"] is True
    assert speed_of(record) is None
    (row,) = rows([record])
    assert (row["images_per_s"], row["seconds"]) == (None, None)


def test_a_run_that_takes_too_long_lets_those_beside_it_end():
    limits = {JOBS[0].preset: 1e9, JOBS[1].preset: 1e-3}
    long = [dataclasses.replace(one, run=dataclasses.replace(one.run, train=train)) for one, train in (
        (JOBS[0], JOBS[0].run.train), (JOBS[1], dataclasses.replace(JOBS[1].run.train, epochs=1000)))]  # fmt: skip
    options = {"limit": lambda job: limits[job.preset], "workers": 2}
    [(kept, record)] = train_jobs(long, CPU, StopRequest(), **options)
    assert kept.preset == JOBS[0].preset
    assert record["best"] > 0
    with pytest.raises(OutOfTime, match="it would take about"):
        list(train_jobs(long[1:], CPU, StopRequest(), **options))


def test_in_turn_a_run_that_takes_too_long_ends_after_an_epoch(alone):
    train = dataclasses.replace(JOBS[1].run.train, epochs=1000)
    long = [dataclasses.replace(JOBS[1], run=dataclasses.replace(JOBS[1].run, train=train))]
    limited = functools.partial(running._limited, running.Silent())
    with pytest.raises(OutOfTime, match="it would take about"):
        list(running._in_turn(iter(long), long, CPU, StopRequest(), lambda job: limited(job, 1e-3), False))


def test_in_turn_too_little_time_for_a_run_keeps_one_that_diverged_before(alone):
    watch = {JOBS[2]: running.Silent(), JOBS[1]: Limited(running.Silent(), 1000, 1e-3)}
    found = running._in_turn(iter(watch), list(watch), CPU, StopRequest(), watch.get, True)
    assert [one for one, _ in found] == JOBS[2:]


def test_a_record_that_comes_with_the_news_of_a_killed_worker_is_kept(monkeypatch):
    class Ended(Future):
        number = 0

        def __hash__(self):
            return self.number  # the order in a set

    class Pool(contextlib.nullcontext):
        def submit(self, work, job, limit):
            ended = Ended()
            if job == JOBS[0]:
                ended.set_exception(BrokenProcessPool())
            else:
                ended.number = 1
                ended.set_result({"best": 1.0})
            return ended

    monkeypatch.setattr(running, "ProcessPoolExecutor", lambda *args, **options: Pool(Pool()))
    outcomes = train_jobs(JOBS[:2], CPU, StopRequest(), workers=2)
    kept, record = next(outcomes)
    assert (kept, record["best"]) == (JOBS[1], 1.0)
    with pytest.raises(ChildProcessError, match=f"the process of {JOBS[0]} was killed"):
        next(outcomes)


def test_as_many_processes_as_cores_that_this_one_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert (running.cpu_workers(None), running.cpu_workers(2)) == (3, 2)
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert running.cpu_workers(None) == 8


def test_a_group_in_which_one_diverges_keeps_the_others(in_processes, alone, monkeypatch):
    monkeypatch.setattr(many, "GAIN", 0.0)
    builds = []
    monkeypatch.setattr(running, "Built", lambda *args: builds.append(args[0]) or Built(*args))
    found = in_turn(JOBS[1:])
    for one, record in found.items():
        expected = without_times(in_processes[one.preset])
        assert without_times(record) == expected | {"at_once": 2}
        assert ("diverged" in record) == (one == JOBS[2])
    assert builds.count(JOBS[1]) <= 2  # nothing is trained again: one to see how many fit, one to train


class Signalling(running.Silent):
    """Sends a signal at the first evaluation of a run."""

    def evaluated(self, row):
        if row["epoch"] == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_the_last_evaluation_ends_it_all(alone):
    with stop_on_signals() as stop:
        found = list(running._in_turn(iter(JOBS[:2]), JOBS[:2], CPU, stop, lambda job: Signalling(), True))
    assert [one for one, _ in found] == JOBS[:1]
    assert found[0][1]["best"] > 0
    assert stop.signal == signal.SIGTERM


def test_a_signal_leaves_the_records_of_those_in_a_group_that_ended(alone, monkeypatch):
    monkeypatch.setattr(many, "GAIN", 0.0)
    jobs = [JOBS[1], JOBS[2], job("cifar100_mlp", epochs=2)]
    watch = {one: running.Silent() for one in jobs[:2]} | {jobs[2]: Signalling()}
    found = []
    with stop_on_signals() as stop, pytest.raises(Stopped, match="stopped by SIGTERM"):
        found.extend(running._in_turn(iter(jobs), jobs, CPU, stop, watch.get, False))
    assert [one for one, _ in found] == jobs[:2]
    assert found[0][1]["best"] > 0
    assert "diverged" in found[1][1]


def test_a_finished_run_is_kept_without_its_mechanism(alone, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("oqc.experiments.job.mechanism_on_test", fail)
    [record] = in_turn(JOBS[1:2]).values()
    assert record["best"] > 0
    assert set(record["mechanism"].values()) == {None}


def test_more_models_than_pytorch_keeps_compiled():
    import torch._dynamo.config as dynamo

    before = dynamo.recompile_limit
    with room_for_compiled_models():
        assert dynamo.recompile_limit >= 64
    assert dynamo.recompile_limit == before


@pytest.mark.gpu
def test_on_a_gpu_it_repeats_with_every_metric():
    jobs = [
        job(name, mode="auto", precision="bf16") for name in ("cifar100_full_r64", "cifar100_swiglu", "cifar100_mlp")
    ]
    first, second = (
        {one.preset: found for one, found in train_jobs(jobs, torch.device("cuda", 0), StopRequest())} for _ in range(2)
    )
    for preset, record in first.items():
        assert record["environment"]["gpu"]
        assert without_times(record) | {"at_once": 0} == without_times(second[preset]) | {"at_once": 0}
    assert None not in first["cifar100_full_r64"]["mechanism"].values()
    assert first["cifar100_full_r64"]["mechanism"]["after"] < 1e-5
    assert first["cifar100_mlp"]["mechanism"]["effective_rank"] > 1
