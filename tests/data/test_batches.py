"""Batches against a plain slow reference, image by image; and what they must not depend on."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch._dynamo.utils import counters

from oqc import seeding
from oqc.config import Data
from oqc.data import Batches, Dataset, Split, augment, eval_batches
from oqc.train.step import compile_function

N, C, H, W, B, SEED = 50, 3, 9, 7, 16, 3
PLAIN = {"crop": 0, "flip": False}
SETTINGS = {
    "plain": PLAIN,
    "crop": PLAIN | {"crop": 2},
    "large crop": PLAIN | {"crop": 11},
    "flip": PLAIN | {"flip": True},
    "cutout": PLAIN | {"cutout": 4},
    "odd cutout": PLAIN | {"cutout": 5},
    "mixup": PLAIN | {"mixup": 0.4},
    "cutmix": PLAIN | {"cutmix": 1.0},
    "all": {"crop": 2, "flip": True, "cutout": 3, "mixup": 0.2, "cutmix": 1.0},
}


def make_dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    split = Split(
        torch.randint(0, 256, (N, C, H, W), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (N,), generator=generator),
    )
    classes = tuple(str(i) for i in range(10))
    return Dataset("random", classes, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), split, None, split, "")


DATASET = make_dataset()


def batches(setting: dict[str, object], *, batch: int = B, dtype: torch.dtype = torch.float32, **rest: int) -> Batches:
    config = Data(name="random", **setting)
    return Batches(DATASET.train, DATASET, config, batch=batch, device="cpu", dtype=dtype, **({"seed": SEED} | rest))


def draw(kind: str, step: int, position: int) -> float:
    stream = seeding.key(SEED, "augment", kind)
    return seeding.uniform(stream, torch.tensor(step), torch.tensor(position)).item()


def reference_order(epoch: int) -> list[int]:
    """Indices by their hash of (seed, epoch, index)."""
    stream = seeding.key(SEED, "shuffle")
    hashes = [seeding.mix(seeding.mix(torch.tensor(i) + stream) + epoch).item() for i in range(N)]
    return sorted(range(N), key=hashes.__getitem__)


def reference_view(config: Data, epoch: int, step: int, position: int) -> tuple[np.ndarray, int]:
    index = reference_order(epoch)[step % (N // B) * B + position]
    image, p = DATASET.train.images[index].numpy(), config.crop
    if p:
        top = int(draw("crop_y", step, position) * (2 * p + 1))
        left = int(draw("crop_x", step, position) * (2 * p + 1))
        image = np.pad(image, ((0, 0), (p, p), (p, p)))[:, top : top + H, left : left + W]
    if config.flip and draw("flip", step, position) < 0.5:
        image = image[:, :, ::-1]
    x = image.astype(np.float64) / 255
    x = (x - np.array(DATASET.mean)[:, None, None]) / np.array(DATASET.std)[:, None, None]
    if config.cutout:
        top = int(draw("cutout_y", step, position) * H) - config.cutout // 2
        left = int(draw("cutout_x", step, position) * W) - config.cutout // 2
        x[:, max(top, 0) : max(top + config.cutout, 0), max(left, 0) : max(left + config.cutout, 0)] = 0
    return x, int(DATASET.train.labels[index])


def reference_sample(config: Data, epoch: int, step: int, position: int) -> tuple[np.ndarray, int, int, float]:
    x, label = reference_view(config, epoch, step, position)
    if not (config.mixup or config.cutmix):
        return x, label, label, 1.0
    stream = seeding.key(SEED, "augment", "offset")
    offset = 1 + int(seeding.uniform(stream, torch.tensor(step)).item() * (B - 1))
    other, other_label = reference_view(config, epoch, step, (position + offset) % B)
    u, v = (torch.tensor(draw(kind, step, position)) for kind in ("beta_u", "beta_v"))
    if config.cutmix and (not config.mixup or draw("choice", step, position) < 0.5):
        share = np.sqrt(1 - augment.symmetric_beta(u, v, config.cutmix).item())
        tall, wide = int(share * H), int(share * W)
        top = int(draw("box_y", step, position) * H) - tall // 2
        left = int(draw("box_x", step, position) * W) - wide // 2
        mixed, pasted = x.copy(), 0
        for i in range(max(top, 0), min(top + tall, H)):
            for j in range(max(left, 0), min(left + wide, W)):
                mixed[:, i, j] = other[:, i, j]
                pasted += 1
        return mixed, label, other_label, 1 - pasted / (H * W)
    lam = augment.symmetric_beta(u, v, config.mixup).item()
    return lam * x + (1 - lam) * other, label, other_label, lam


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_sample_equals_the_slow_reference(setting: dict[str, object]) -> None:
    source = batches(setting, dtype=torch.float64)
    for epoch, step in ((0, 0), (0, 2), (4, 13)):
        source.start_epoch(epoch)
        x, a, b, lam = source.next(torch.tensor(step))
        assert x.dtype == torch.float64
        for position in range(B):
            expected = reference_sample(source.config, epoch, step, position)
            np.testing.assert_allclose(x[position].numpy(), expected[0], rtol=0, atol=1e-6)
            assert (a[position].item(), b[position].item()) == expected[1:3]
            assert lam[position].item() == pytest.approx(expected[3], abs=1e-6)


def test_augmentation_takes_every_value() -> None:
    """All crops, both flips, all cutout centres occur about as often as they should."""
    u = seeding.uniform(1, torch.arange(20_000))
    counts = augment.below(u, 9).bincount(minlength=9)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    x, *_ = batches(SETTINGS["flip"]).next(torch.tensor(0))
    plain, *_ = batches(SETTINGS["plain"]).next(torch.tensor(0))
    flipped = [torch.equal(x[i], plain[i].flip(-1)) for i in range(B)]
    kept = [torch.equal(x[i], plain[i]) for i in range(B)]
    assert 0 < sum(flipped) < B, "decided for each sample"
    assert sum(flipped) + sum(kept) == B


@pytest.mark.parametrize("a", [0.1, 0.2, 0.5, 1.0, 2.5, 8.0])
def test_symmetric_beta_has_its_distribution(a: float) -> None:
    u, v = seeding.uniform(0, torch.tensor([[1], [2]]), torch.arange(20_000))
    samples = augment.symmetric_beta(u, v, a)
    assert samples.isfinite().all()
    assert samples.min() >= 0
    assert samples.max() <= 1
    assert stats.kstest(samples.numpy(), stats.beta(a, a).cdf).pvalue > 1e-3


def test_symmetric_beta_at_the_ends_of_the_uniforms() -> None:
    ends = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-24])
    for a in (1e-3, 0.2, 1.0, 100.0):
        samples = augment.symmetric_beta(ends[:, None], ends[None, :], a)
        assert samples.isfinite().all()
        assert ((samples >= 0) & (samples <= 1)).all()


def test_each_epoch_is_a_permutation() -> None:
    source = batches(PLAIN, batch=N)
    orders = []
    for epoch in range(4):
        source.start_epoch(epoch)
        x, labels, *_ = source.next(torch.tensor(epoch))
        assert sorted(labels.tolist()) == sorted(DATASET.train.labels.tolist())
        assert x.flatten(1).sum(1).sort().values.unique().numel() == N, "every image once"
        orders.append(tuple(labels.tolist()))
    assert len(set(orders)) == 4


def test_epochs_are_written_in_place() -> None:
    source = batches(PLAIN)
    where = source._order.data_ptr()
    source.start_epoch(7)
    assert source._order.data_ptr() == where


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_serve_the_batch_of_one_process(setting: dict[str, object], world: int) -> None:
    step = torch.tensor(11)
    alone = batches(setting).next(step)
    ranks = [batches(setting, rank=rank, world=world).next(step) for rank in range(world)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_same_seed_same_batches_other_seed_other_batches() -> None:
    step = torch.tensor(5)
    first, again, other = (batches(SETTINGS["all"], seed=seed).next(step) for seed in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_batch_is_a_function_of_epoch_and_step_alone() -> None:
    """Whatever was served before, as after a resume."""
    used, fresh = batches(SETTINGS["all"]), batches(SETTINGS["all"])
    for step in range(5):
        used.next(torch.tensor(step))
    used.start_epoch(2)
    fresh.start_epoch(2)
    expected, got = used.next(torch.tensor(6)), fresh.next(torch.tensor(6))
    assert all(torch.equal(p, q) for p, q in zip(expected, got, strict=True))


def test_one_augmentation_does_not_move_another() -> None:
    """Turning cutout on blanks squares and leaves order, crop and flip as they were."""
    step = torch.tensor(3)
    without, *_ = batches({"crop": 2, "flip": True}).next(step)
    x, *_ = batches({"crop": 2, "flip": True, "cutout": 3}).next(step)
    assert torch.equal(x, torch.where(x == 0, x, without))
    assert 0 < (x == 0).sum() <= B * C * 9


def test_mixup_and_cutmix_both_occur() -> None:
    step = torch.tensor(1)
    both = batches({"crop": 0, "flip": False, "mixup": 1.0, "cutmix": 1.0}).next(step)[3]
    mixed = batches(PLAIN | {"mixup": 1.0}).next(step)[3]
    cut = batches(PLAIN | {"cutmix": 1.0}).next(step)[3]
    chosen = both == cut
    assert 0 < chosen.sum() < B
    assert torch.equal(both, torch.where(chosen, cut, mixed))


def test_next_traces_into_one_graph() -> None:
    """No host values, no shapes that depend on data: what a captured CUDA graph needs."""
    source = batches(SETTINGS["all"])
    traced = torch.compile(source.next, backend="aot_eager", fullgraph=True)
    for step in (0, 9):
        expected, got = source.next(torch.tensor(step)), traced(torch.tensor(step))
        assert all(torch.equal(p, q) for p, q in zip(expected, got, strict=True))


def same_bits(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> bool:
    found, expected = ([(p.dtype, p.cpu().contiguous().view(torch.uint8)) for p in parts] for parts in (one, two))
    return all(p[0] == q[0] and torch.equal(p[1], q[1]) for p, q in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "large crop", "all"])
def test_compiled_batches_are_the_same_bits(name: str) -> None:
    """Also in other epochs and of other seeds, for which nothing is compiled anew."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for seed in (SEED, 8):
        eager, compiled = batches(SETTINGS[name], seed=seed), batches(SETTINGS[name], seed=seed)
        compiled.compile(functools.partial(compile_function, deterministic=True))
        for epoch, step in ((0, 0), (0, 2), (4, 13), (2, 2**40 + 1)):
            eager.start_epoch(epoch)
            compiled.start_epoch(epoch)
            assert same_bits(compiled.next(torch.tensor(step)), eager.next(torch.tensor(step)))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["plain", "crop", "large crop", "flip", "cutout", "odd cutout"])
def test_compiled_on_the_gpu_they_are_the_cpus_bits(name: str, deterministic: bool) -> None:
    torch._dynamo.reset()  # PyTorch would run the ninth setting uncompiled
    before = counters["stats"]["unique_graphs"]
    expected, config = batches(SETTINGS[name]), Data(name="random", **SETTINGS[name])
    source = Batches(DATASET.train, DATASET, config, batch=B, seed=SEED, device="cuda")
    source.compile(functools.partial(compile_function, deterministic=deterministic))
    for epoch, step in ((0, 0), (0, 2), (4, 13), (2, 2**40 + 1)):
        source.start_epoch(epoch)
        expected.start_epoch(epoch)
        assert same_bits(source.next(torch.tensor(step, device="cuda")), expected.next(torch.tensor(step)))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.gpu
def test_a_captured_graph_serves_what_the_cpu_does() -> None:
    config = Data(name="random", **SETTINGS["all"])
    source = Batches(DATASET.train, DATASET, config, batch=B, seed=SEED, device="cuda")
    expected_source = batches(SETTINGS["all"])
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        source.next(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = source.next(step)
        step.add_(1)
    for number in range(6):
        source.start_epoch(number // source.steps_per_epoch)
        expected_source.start_epoch(number // source.steps_per_epoch)
        graph.replay()
        x, a, b, lam = (t.cpu() for t in out)
        expected = expected_source.next(torch.tensor(number))
        assert torch.equal(a, expected[1])
        assert torch.equal(b, expected[2])
        torch.testing.assert_close(lam, expected[3], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(x, expected[0], rtol=1e-6, atol=1e-6)


def test_bad_batch_sizes() -> None:
    with pytest.raises(ValueError, match=r"batch must be 1 to 50 .*, got 51"):
        batches(PLAIN, batch=51)
    with pytest.raises(ValueError, match="batch 16 with 3"):
        batches(PLAIN, world=3)
    assert batches(PLAIN, batch=17).steps_per_epoch == 2


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("batch", [7, 50, 64])
def test_evaluation_serves_every_image_once_in_order(world: int, batch: int) -> None:
    parts: list[tuple[Tensor, Tensor]] = []
    for rank in range(world):
        parts += eval_batches(
            DATASET.test, DATASET, batch=batch, device="cpu", dtype=torch.float64, rank=rank, world=world
        )
    assert max(len(x) for x, _ in parts) <= batch
    x, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (DATASET.mean, DATASET.std))
    assert torch.equal(labels, DATASET.test.labels)
    torch.testing.assert_close(x, (DATASET.test.images.double() / 255 - mean) / std, rtol=0, atol=1e-12)


def test_bfloat16_batches() -> None:
    x, *_ = batches(SETTINGS["all"], dtype=torch.bfloat16).next(torch.tensor(0))
    expected, *_ = batches(SETTINGS["all"]).next(torch.tensor(0))
    assert torch.equal(x, expected.bfloat16())
