"""Two gloo processes train as one process does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_run import run_until, tiny_config, tiny_trainer

from oqc.train import Summary, Trainer, load_weights, train_many
from oqc.train.stopping import Stopped, StopRequest

CONFIG = tiny_config({"mixup": 0.3}, epochs=3, precision="fp64", clip=0.5)


def _join(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def _leave() -> None:
    """Together: a rank that goes while the other still talks to it ends that one with an error. And at once: threads
    that PyTorch takes down with the interpreter can end it with an abort, after all is done."""
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _whole(rank: int, folder: str) -> None:
    _join(rank, folder)
    trainer = tiny_trainer(CONFIG, Path(folder) / "run")
    summary = trainer.fit()
    state = {name: value.clone().contiguous() for name, value in trainer.step.state().items()}
    state["accuracies"] = torch.tensor([row["test_accuracy"] for row in summary.history], dtype=torch.float64)
    state["losses"] = torch.tensor([row["train_loss"] for row in summary.history], dtype=torch.float64)
    safetensors.torch.save_file(state, f"{folder}/rank{rank}.safetensors")
    _leave()


def _run_signalled(trainer: Trainer, rank: int) -> None:
    stop = StopRequest()
    try:
        for _ in trainer.run(stop):
            if rank == 1 and trainer.done == 3:
                stop.signal = signal.SIGTERM
    except Stopped:
        return
    raise AssertionError("the run went on")


def _signalled(rank: int, folder: str) -> None:
    """Only rank 1 gets the signal; both stop at the same step, and a resume ends as the whole run did."""
    _join(rank, folder)
    trainer = tiny_trainer(CONFIG, Path(folder) / "run")
    trainer.pace.most = 2
    _run_signalled(trainer, rank)
    done = torch.tensor(trainer.done)
    dist.broadcast(done, 0)
    assert done == trainer.done < 24
    resumed = tiny_trainer(CONFIG, Path(folder) / "run", resume=True)
    assert resumed.done == trainer.done
    summary = resumed.fit()
    state = {f"model.{name}": value.clone() for name, value in resumed.model.state_dict().items()}
    state["losses"] = torch.tensor([row["train_loss"] for row in summary.history], dtype=torch.float64)
    safetensors.torch.save_file(state, f"{folder}/rank{rank}.safetensors")
    _leave()


@pytest.fixture(scope="module")
def alone() -> tuple[Trainer, torch.Tensor]:
    trainer = tiny_trainer(CONFIG)
    summary = trainer.fit()
    return trainer, torch.tensor([row["train_loss"] for row in summary.history], dtype=torch.float64)


def test_two_ranks_equal_one_process(tmp_path: Path, alone: tuple[Trainer, torch.Tensor]) -> None:
    mp.spawn(_whole, args=(str(tmp_path),), nprocs=2)
    trainer, losses = alone
    ranks = [safetensors.torch.load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    for name, value in trainer.step.state().items():
        if name.startswith("train."):
            continue
        torch.testing.assert_close(ranks[0][name], value, rtol=0, atol=1e-12)
        assert torch.equal(ranks[0][name], ranks[1][name])
    torch.testing.assert_close(ranks[0]["losses"], losses, rtol=0, atol=1e-12)
    assert torch.equal(ranks[0]["accuracies"], ranks[1]["accuracies"])
    written = load_weights(tmp_path / "run")
    assert all(torch.equal(value, ranks[0][f"model.{name}"]) for name, value in written.items())


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path: Path, alone: tuple[Trainer, torch.Tensor]) -> None:
    mp.spawn(_signalled, args=(str(tmp_path),), nprocs=2)
    trainer, losses = alone
    found = safetensors.torch.load_file(tmp_path / "rank0.safetensors")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(found[f"model.{name}"], value, rtol=0, atol=1e-12)
    torch.testing.assert_close(found["losses"], losses, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_resume_may_change_the_number_of_processes(tmp_path: Path, alone: tuple[Trainer, torch.Tensor]) -> None:
    run_until(tiny_trainer(CONFIG, tmp_path / "run"), 11, signal.SIGTERM)
    mp.spawn(_resumed, args=(str(tmp_path),), nprocs=2)
    trainer, _ = alone
    written = load_weights(tmp_path / "run")
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=0, atol=1e-12)


def _resumed(rank: int, folder: str) -> None:
    _join(rank, folder)
    tiny_trainer(CONFIG, Path(folder) / "run", resume=True).fit()
    _leave()


def _signalled_between(rank: int, folder: str) -> None:
    """Only rank 1 gets the signal, when nothing of the first run asks for one any more."""
    _join(rank, folder)
    finish = Trainer._finish

    def signalled(self: Trainer) -> Summary:
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return finish(self)

    Trainer._finish = signalled  # type: ignore[method-assign]
    with pytest.raises(Stopped, match="1 more run is left") as end:
        train_many([lambda: tiny_trainer(CONFIG)] * 2)
    assert isinstance(end.value.outcomes[0], Summary)
    _leave()


@pytest.mark.slow
def test_a_signal_to_one_rank_between_two_runs_stops_both(tmp_path: Path) -> None:
    mp.spawn(_signalled_between, args=(str(tmp_path),), nprocs=2)
