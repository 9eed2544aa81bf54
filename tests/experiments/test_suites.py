"""What a suite does around its runs: what is left to do, when it stops, what it refuses. The runs are made up here."""

import itertools
import json
import signal
import time

import pytest

from oqc import config as configs
from oqc.experiments import job as job_module
from oqc.experiments import suites
from oqc.experiments.job import Limited, OutOfTime, without_root
from oqc.experiments.suites import SUITES, reproduce
from oqc.report import append_record, read_records
from oqc.train import RunFolder, Silent

TINY = {"data": "digits", "epochs": 1}


def made_up(job, seconds=1.0):
    return {
        "preset": job.preset, "seed": job.seed, "best": 50.0, "final": 50.0, "parameters": 1, "images_per_s": 1.0,
        "per_epoch": [], "mechanism": {}, "config": configs.to_dict(without_root(job.run)), "environment": {},
        "seconds": seconds, "setup_seconds": 0.0,
    }  # fmt: skip


@pytest.fixture
def runs(monkeypatch):
    """The jobs that were run, none of them really."""
    ran = []

    def train_jobs(todo, device, stop, *, may_start, **_):
        for job in itertools.takewhile(may_start, todo):
            ran.append((job.preset, job.seed))
            yield job, made_up(job)

    monkeypatch.setattr(suites, "train_jobs", train_jobs)
    return ran


def test_finished_pairs_are_never_run_again(runs, tmp_path):
    first = reproduce("table1", tmp_path, seeds=1, **TINY)
    assert runs == [(name, 0) for name in SUITES["table1"]]
    assert not first.left
    runs.clear()
    assert reproduce("table1", tmp_path, seeds=1, **TINY).records == first.records
    assert runs == []
    reproduce("designs", tmp_path, seeds=1, **TINY)  # shares two rows with table1
    assert runs == [(name, 0) for name in SUITES["designs"][2:]]
    runs.clear()
    second = reproduce("table1", tmp_path, seeds=2, **TINY)
    assert runs == [(name, 1) for name in SUITES["table1"]]
    assert [(r["preset"], r["seed"]) for r in second.records] == [(n, s) for s in (0, 1) for n in SUITES["table1"]]
    assert len(read_records(tmp_path / "runs.jsonl")) == 13


def test_a_line_cut_short_by_a_kill_is_run_again(runs, tmp_path):
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    path = tmp_path / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    runs.clear()
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    assert runs == [("cifar100_vit_tiny_pr", 0)]
    assert len(read_records(path)) == 2


def test_no_run_is_started_that_would_not_end_in_time(runs, tmp_path, monkeypatch):
    now = 0.0

    limits = []

    def train_jobs(todo, device, stop, *, may_start, limit, **_):
        nonlocal now
        for job in itertools.takewhile(may_start, todo):
            limits.append(limit(job))
            now += 25
            yield job, made_up(job, seconds=25)

    monkeypatch.setattr(suites, "train_jobs", train_jobs)
    monkeypatch.setattr(suites.time, "monotonic", lambda: now)
    found = reproduce("table1", tmp_path, seeds=1, minutes=1, **TINY)
    assert [r["preset"] for r in found.records] == list(SUITES["table1"][:2])  # a third would end at 75 s
    assert [job.preset for job in found.left] == list(SUITES["table1"][2:])
    assert found.signal is None
    assert limits == [60, None]  # how long a run takes is known from the first one on
    assert [record["wall_seconds"] for record in found.records] == [25, 25]
    # Another process knows from the file how long a run takes.
    with pytest.raises(ValueError, match=r"--minutes 0.4 is too short for a run: one takes about 25 s here"):
        reproduce("table1", tmp_path, seeds=1, minutes=0.4, **TINY)
    assert len(reproduce("table1", tmp_path, seeds=1, minutes=0, **TINY).records) == 2  # what is left?
    assert len(reproduce("table1", tmp_path, seeds=1, minutes=1, **TINY).records) == 4
    assert not reproduce("table1", tmp_path, seeds=1, minutes=1, **TINY).left


def test_two_protocols_in_one_file_are_refused(runs, tmp_path):
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    before = (tmp_path / "runs.jsonl").read_bytes()
    message = r"runs.jsonl has cifar100_vit_tiny, seed 0, with train.epochs 1, but now it would be 2; .*--results"
    for suite in ("vit-tiny", "hosts"):  # also where it shares no row
        with pytest.raises(ValueError, match=message):
            reproduce(suite, tmp_path, seeds=1, data="digits", epochs=2)
    with pytest.raises(ValueError, match=r"with data.name digits, but now it would be cifar100"):
        reproduce("vit-tiny", tmp_path, seeds=1, data="cifar100")
    assert (tmp_path / "runs.jsonl").read_bytes() == before
    assert len(runs) == 2


def test_a_field_that_came_later_does_not_make_another_protocol(runs, tmp_path):
    job = suites.plan("vit-tiny", 1, "digits", 1)[0]
    record = made_up(job)
    del record["config"]["train"]["nan_limit"]
    append_record(tmp_path / "runs.jsonl", record)
    assert not reproduce("vit-tiny", tmp_path, seeds=1, **TINY).left
    record["seed"], record["config"]["train"]["colour"] = 1, "red"
    append_record(tmp_path / "runs.jsonl", record)
    with pytest.raises(ValueError, match=r"cifar100_vit_tiny, seed 1, .* unknown field 'train.colour'"):
        reproduce("vit-tiny", tmp_path, seeds=1, **TINY)


def test_a_second_process_is_kept_out(runs, tmp_path):
    with RunFolder(tmp_path).held(), pytest.raises(ValueError, match=f"another process is training in {tmp_path}"):
        reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    assert not runs
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)


def test_mistakes_show_before_anything_runs(runs, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"suite must be one of table1, .*got 'tabel1'; did you mean 'table1'"):
        reproduce("tabel1", out, **TINY)
    with pytest.raises(
        ValueError, match="data must be one of cifar100, digits, got 'cifar10'; did you mean 'cifar100'"
    ):
        reproduce("table1", out, data="cifar10")
    with pytest.raises(ValueError, match="seeds must be more than 0"):
        reproduce("table1", out, seeds=0)
    for minutes in (float("nan"), float("inf"), -1):
        with pytest.raises(ValueError, match=f"--minutes must be 0 or more and finite, got {minutes}"):
            reproduce("table1", out, minutes=minutes, **TINY)
    with pytest.raises(ValueError, match=r"--data-dir must be .* of cifar100, got .*nowhere, which does not exist"):
        reproduce("table1", out, data_dir=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--data-dir .*: root must be or hold one of cifar-100-binary"):
        reproduce("table1", out, data_dir=tmp_path)
    assert len(reproduce("table1", out / "asked", seeds=1, data_dir=tmp_path, minutes=0).left) == 5  # needs no data
    assert [path.name for path in out.iterdir()] == ["asked"]
    (out / "runs.jsonl").write_text('{"preset": "cifar100_afbo"}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl, line 1: the record has no seed"):
        reproduce("table1", out, **TINY)
    assert not runs


def test_the_place_of_the_data_reaches_the_run_but_not_the_file(tmp_path, monkeypatch):
    roots = []

    def train_jobs(todo, device, stop, **_):
        roots.extend(job.run.data.root for job in todo)
        yield from ((job, made_up(job)) for job in todo)

    monkeypatch.setattr(suites, "train_jobs", train_jobs)
    monkeypatch.setattr(suites, "load", lambda data: None)
    found = reproduce("vit-tiny", tmp_path / "out", seeds=1, data_dir=tmp_path)
    assert roots == [str(tmp_path)] * 2
    assert not found.left
    assert str(tmp_path) not in (tmp_path / "out" / "runs.jsonl").read_text()
    assert not reproduce("vit-tiny", tmp_path / "out", seeds=1).left


def diverged(job, seconds=1.0):
    record = made_up(job, seconds) | {"diverged": {"epoch": 1, "step": 7}}
    return {k: v for k, v in record.items() if k not in ("best", "final", "parameters", "images_per_s", "mechanism")}


def test_a_run_that_diverged_is_recorded_and_not_run_again(runs, tmp_path, monkeypatch):
    """A suite with such a run ends; how long it took says nothing of others."""
    again, told = suites.train_jobs, []

    class Listening(suites.Unwatched):
        def end(self, job, found, left):
            told.append(left)

    def train_jobs(todo, device, stop, **_):
        yield todo[0], diverged(todo[0], 500.0)
        yield todo[1], made_up(todo[1])

    monkeypatch.setattr(suites, "train_jobs", train_jobs)
    found = reproduce("vit-tiny", tmp_path, seeds=1, watch=Listening(), **TINY)
    assert told == [None, 0]
    assert not found.left
    assert ["diverged" in record for record in found.records] == [True, False]
    monkeypatch.setattr(suites, "train_jobs", again)
    assert reproduce("vit-tiny", tmp_path, seeds=1, **TINY) == found
    assert runs == []
    path = tmp_path / "runs.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[1])  # its line is taken out: asked for again
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    assert runs == [("cifar100_vit_tiny", 0)]


def test_runs_that_all_diverge_are_no_sign_of_too_short_a_time(tmp_path, monkeypatch):
    def train_jobs(todo, device, stop, *, may_start, **_):
        now = suites.time.monotonic()
        yield todo[0], diverged(todo[0])
        monkeypatch.setattr(suites.time, "monotonic", lambda: now + 120)
        assert not may_start(todo[1])

    monkeypatch.setattr(suites, "train_jobs", train_jobs)
    assert len(reproduce("vit-tiny", tmp_path, seeds=1, minutes=1, **TINY).left) == 1


def test_a_signal_between_runs_starts_no_other(runs, tmp_path):
    class Impatient(suites.Unwatched):
        def end(self, job, found, left):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.01)

    found = reproduce("table1", tmp_path, seeds=1, watch=Impatient(), **TINY)
    assert found.signal == signal.SIGTERM
    assert len(runs) == len(found.records) == len(read_records(tmp_path / "runs.jsonl")) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_time_left_is_told(runs, tmp_path):
    told = []

    class Listening(suites.Unwatched):
        def begin(self, done, total, left):
            told.append((done, total, left))

        def end(self, job, found, left):
            told.append(left)

    reproduce("vit-tiny", tmp_path, seeds=1, watch=Listening(), **TINY)
    assert told[0] == (0, 2, None)
    assert told[1] > 0
    assert told[2] == 0
    reproduce("vit-tiny", tmp_path, seeds=2, watch=Listening(), workers=1, **TINY)
    assert told[3] == (2, 4, 2.0)  # two runs of a second each, by the file
    reproduce("vit-tiny", tmp_path, seeds=4, watch=Listening(), workers=2, **TINY)
    assert told[6] == (4, 8, 2.0)  # four, two at the same time
    assert told[7] == 2.0  # three: two, then one; however long this process took to start
    json.dumps(told)


def test_a_file_that_cannot_be_written_is_named_before_anything_is_run(runs, tmp_path, monkeypatch):
    reproduce("vit-tiny", tmp_path, seeds=1, **TINY)
    runs.clear()
    allowed = suites.os.access
    closed = tmp_path / "runs.jsonl"
    monkeypatch.setattr(suites.os, "access", lambda path, mode: path != closed and allowed(path, mode))
    with pytest.raises(ValueError, match=r"--results .*runs\.jsonl cannot be written"):
        reproduce("vit-tiny", tmp_path, seeds=2, **TINY)
    monkeypatch.setattr(suites.os, "access", lambda path, mode: path != tmp_path and allowed(path, mode))
    with pytest.raises(ValueError, match=r"--results must be a folder that can be written, but .* cannot be"):
        reproduce("vit-tiny", tmp_path, seeds=2, **TINY)
    assert not runs


def test_a_full_disk_is_told_with_the_results_file(runs, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("oqc.report.records.os.fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / 'runs.jsonl'}'"):
        reproduce("vit-tiny", tmp_path, seeds=1, **TINY)


def test_records_that_do_not_tell_how_long_they_took_to_start(tmp_path):
    job = suites.plan("vit-tiny", 1, **{"data": TINY["data"], "epochs": TINY["epochs"]})[0]
    record = made_up(job, 3.0)
    del record["setup_seconds"]
    assert suites._Clock([record]).expected(job) == 3.0


def test_the_time_that_another_machine_took_tells_nothing(runs, tmp_path):
    told = []

    class Listening(suites.Unwatched):
        def begin(self, done, total, left):
            told.append(left)

    jobs = suites.plan("vit-tiny", 2, "digits", 1)
    for job, place in zip(jobs[:2], ({"gpu": "NVIDIA H200"}, {"device": "cpu"}), strict=True):
        append_record(tmp_path / "runs.jsonl", made_up(job, 100.0) | {"environment": place})
        reproduce("vit-tiny", tmp_path, seeds=2, minutes=0, device="cpu", workers=1, watch=Listening(), **TINY)
    assert told == [None, 200.0]


def test_runs_side_by_side_are_not_counted_twice():
    jobs = suites.plan("vit-tiny", 2, "digits", 1)
    earlier = [made_up(job, 100.0) | {"at_once": 2} for job in jobs[:2]]
    assert suites._Clock(earlier).left(jobs[2:]) == 100.0
    assert suites._Clock(earlier).expected(jobs[2]) == 100.0  # from the start of one to its end


def test_the_time_left_on_a_cpu_is_that_of_the_process_that_ends_last():
    jobs = suites.plan("vit-tiny", 2, "digits", 1)
    clock = suites._Clock([made_up(jobs[0], 100.0)], 8)
    assert (clock.left(jobs[:1]), clock.left(jobs), clock.left([])) == (100.0, 100.0, 0.0)
    assert suites._Clock([made_up(jobs[0], 100.0)], 3).left(jobs) == 200.0
    clock = suites._Clock([made_up(jobs[0], 100.0), made_up(jobs[1], 10.0)], 2)  # one preset takes longer
    assert (clock.left(jobs), clock.left(jobs[:3])) == (110.0, 110.0)


def test_runs_that_diverged_took_their_time_too(monkeypatch):
    now = 0.0
    monkeypatch.setattr(suites.time, "monotonic", lambda: now)
    jobs = suites.plan("vit-tiny", 2, "digits", 1)
    clock = suites._Clock([])
    clock.add(diverged(jobs[0], 500.0))
    clock.add(made_up(jobs[1], 100.0))
    now = 660.0  # a tenth more than the runs took
    assert clock.left(jobs[2:3]) == pytest.approx(110.0)


def test_a_time_too_short_for_one_run_is_told_after_an_epoch(tmp_path):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"--minutes 0.5 is too short for a run: it would take about \d+ s here"):
        reproduce("vit-tiny", tmp_path, seeds=1, minutes=0.5, workers=1, data="digits", epochs=10_000)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "runs.jsonl").exists()
    with pytest.raises(ValueError, match=r"is too short for a run: it was over before one could start"):
        reproduce("vit-tiny", tmp_path, seeds=1, minutes=1e-9, workers=1, data="digits", epochs=1)


def test_a_limit_holds_from_the_first_evaluation_alone(monkeypatch):
    seen, now = [], 100.0

    class Listening(Silent):
        def evaluated(self, row):
            seen.append(row["epoch"])

    monkeypatch.setattr(job_module.time, "monotonic", lambda: now)
    limited = Limited(Listening(), 10, 50.0)
    now = 112.0  # two seconds to build, ten of training
    with pytest.raises(OutOfTime, match="102 s"):
        limited.evaluated({"epoch": 1, "seconds": 10.0})
    limited.evaluated({"epoch": 2, "seconds": 1000.0})
    now = 100.0
    limited = Limited(Listening(), 10, 50.0)
    now = 104.0
    limited.evaluated({"epoch": 2, "seconds": 4.0})
    assert seen == [1, 2, 2]


def test_runs_beside_other_work_do_not_tell_how_long_one_takes(tmp_path):
    jobs = suites.plan("vit-tiny", 2, **{"data": TINY["data"], "epochs": TINY["epochs"]})
    slow, fast = made_up(jobs[0], 500.0) | {"shared_device": True}, made_up(jobs[1], 2.0)
    assert suites._Clock([slow, fast]).expected(jobs[0]) == 2.0
    assert suites._Clock([slow]).expected(jobs[0]) == 500.0  # better than nothing
