"""Every source, in every published form, gives exactly its images and labels; packs are taken again quickly."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import data_samples as samples
import numpy as np
import pytest
from PIL import Image

from oqc.config import Data
from oqc.data import images, load
from oqc.data.unpickle import loads

FORMS = [*samples.FORMS, ("tiny-imagenet", "jpeg")]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_official_folder(name: str, form: str, tmp_path: Path, official: Callable[..., None]) -> None:
    official(name, form)
    sample = samples.sample(name, form)
    folder = samples.extracted(sample.files, tmp_path / samples.layout_of(name, form).folder)
    dataset = load(Data(name=name, root=str(folder)))
    assert samples.same(dataset, sample)
    assert load(Data(name=name, root=str(tmp_path))).digest == dataset.digest, "a parent folder is found too"


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_official_archive(name: str, form: str, tmp_path: Path, official: Callable[..., None]) -> None:
    sample, layout = samples.sample(name, form), samples.layout_of(name, form)
    archive = samples.archived(sample.files, tmp_path / layout.archive, layout.folder)
    official(name, form, archive)
    assert samples.same(load(Data(name=name, root=str(archive))), sample)
    assert samples.same(load(Data(name=name, root=str(tmp_path))), sample)


def test_tiny_imagenet_class_names(tmp_path: Path, official: Callable[..., None]) -> None:
    official("tiny-imagenet", "jpeg")
    samples.extracted(samples.tiny_sample().files, tmp_path)
    assert load(Data(name="tiny-imagenet", root=str(tmp_path))).classes == ("thing 0", "thing 1", "thing 2")


def test_the_pack_in_the_cache_serves_without_root(tmp_path: Path, official: Callable[..., None]) -> None:
    official("cifar100", "binary")
    sample = samples.sample("cifar100", "binary")
    root = samples.extracted(sample.files, tmp_path / "files")
    load(Data(name="cifar100", root=str(root)))
    shutil.rmtree(root)
    assert samples.same(load(Data(name="cifar100")), sample)


def test_a_folder_of_the_same_name_is_another_set(
    tmp_path: Path, official: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    official("cifar100", "binary")
    sample = samples.sample("cifar100", "binary")
    load(Data(name="cifar100", root=str(samples.extracted(sample.files, tmp_path / "files"))))
    monkeypatch.chdir(tmp_path)
    samples.image_tree(tmp_path / "cifar100", ("train", "test"))
    assert load(Data(name="./cifar100", root=".")).name == "cifar100-files"
    assert samples.same(load(Data(name="cifar100")), sample)


def test_packs_that_differ_need_a_root(tmp_path: Path, official: Callable[..., None]) -> None:
    official("cifar100", "binary")
    files = samples.sample("cifar100", "binary").files
    load(Data(name="cifar100", root=str(samples.extracted(files, tmp_path / "a"))))
    changed = files | {"test.bin": files["test.bin"][:-1] + b"\0"}
    load(Data(name="cifar100", root=str(samples.extracted(changed, tmp_path / "b"))))
    with pytest.raises(ValueError, match="give root"):
        load(Data(name="cifar100"))


def test_pickles_of_python_3_are_read_too() -> None:
    content = {b"data": RNG.integers(0, 256, (2, 5), dtype=np.uint8), b"labels": [1, 2]}
    got = loads(pickle.dumps(content, protocol=2), "x")
    assert np.array_equal(got[b"data"], content[b"data"])
    assert got[b"labels"] == [1, 2]


def test_digits() -> None:
    dataset = load(Data(name="digits"))
    assert dataset.train.images.shape == (1438, 1, 8, 8)
    assert len(dataset.test) == 359
    assert dataset.train.images.max() == 255
    pixels = dataset.train.images.double() / 255
    assert dataset.mean[0] == pytest.approx(pixels.mean().item(), abs=1e-12)
    assert dataset.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=1e-12)
    for digit in range(10):
        count = int((dataset.train.labels == digit).sum()), int((dataset.test.labels == digit).sum())
        assert count[1] == round(0.2 * sum(count)), "the test part is a fifth of every class"


def test_the_second_load_takes_less_than_a_second() -> None:
    first = load(Data(name="digits"))
    start = time.perf_counter()
    second = load(Data(name="digits"))
    assert time.perf_counter() - start < 1.0
    assert second.digest == first.digest


def test_val_is_stratified_and_fixed_by_its_own_seed() -> None:
    dataset = load(Data(name="digits", val=0.1))
    whole = load(Data(name="digits"))
    assert dataset.val is not None
    counts = whole.train.labels.bincount()
    assert dataset.val.labels.bincount().tolist() == [round(0.1 * n) for n in counts.tolist()]
    assert (dataset.val.labels.bincount() + dataset.train.labels.bincount()).tolist() == counts.tolist()
    together = sorted(image.numpy().tobytes() for part in (dataset.val, dataset.train) for image in part.images)
    assert together == sorted(image.numpy().tobytes() for image in whole.train.images)
    again, other = load(Data(name="digits", val=0.1, crop=0)), load(Data(name="digits", val=0.1, val_seed=1))
    assert again.val is not None
    assert other.val is not None
    assert again.val.images.equal(dataset.val.images)
    assert not other.val.images.equal(dataset.val.images)
    assert whole.digest == dataset.digest


def test_val_that_holds_out_nothing() -> None:
    with pytest.raises(ValueError, match=r"val must hold out at least one image, got 0\.001"):
        load(Data(name="digits", val=0.001))


@pytest.mark.parametrize("axes", ["NHWC", "NCHW", "NHW"])
def test_npz(axes: str, tmp_path: Path) -> None:
    channels = 1 if axes == "NHW" else 3
    x = RNG.integers(0, 256, (30, channels, 6, 7), dtype=np.uint8)
    y = np.arange(30, dtype=np.uint8) % 3
    stored = {"NHWC": x.transpose(0, 2, 3, 1), "NCHW": x, "NHW": x[:, 0]}[axes]
    file = tmp_path / "own.npz"
    np.savez(
        file, x_train=stored[:20], y_train=y[:20], x_test=stored[20:], y_test=y[20:, None], classes=["a", "b", "c"]
    )
    dataset = load(Data(name=str(file)))
    assert samples.same(dataset, samples.Sample({}, x[:20], y[:20], x[20:], y[20:]))
    assert dataset.classes == ("a", "b", "c")
    assert dataset.name == "own"


@pytest.mark.parametrize("test", ["val", "test"])
def test_image_folder(test: str, tmp_path: Path) -> None:
    dataset = load(Data(name=str(samples.image_tree(tmp_path / "own", ("train", test)))))
    assert dataset.classes == ("ant", "bee")
    assert dataset.train.labels.tolist() == [0] * 5 + [1] * 5
    assert dataset.train.images[:, 0, 0, 0].tolist() == [0] * 5 + [100] * 5
    assert dataset.test.images[:, 1, 7, 7].tolist() == [0, 10, 20, 30, 40] * 2


def test_image_folder_without_parts_is_divided(tmp_path: Path) -> None:
    dataset = load(Data(name="own", root=str(samples.image_tree(tmp_path / "own", ("",)).parent)))
    assert dataset.train.labels.tolist() == [0] * 4 + [1] * 4
    assert dataset.test.labels.tolist() == [0, 1]


def test_images_of_several_sizes_need_image_size(tmp_path: Path) -> None:
    root = samples.image_tree(tmp_path / "own", ("train", "test"))
    Image.new("RGB", (20, 10), (0, 0, 200)).save(root / "train" / "bee" / "wide.png")
    with pytest.raises(ValueError, match=r"not of one size \(train/ant/0.png is 8x8, train/bee/wide.png is 20x10\)"):
        load(Data(name=str(root)))
    dataset = load(Data(name=str(root), image_size=6))
    assert dataset.train.images.shape == (11, 3, 6, 6)
    assert dataset.train.images[-1, 2].eq(200).all()


def test_arrays_are_resized_too() -> None:
    dataset = load(Data(name="digits", image_size=16))
    assert dataset.train.images.shape == (1438, 1, 16, 16)
    assert dataset.mean[0] == pytest.approx(load(Data(name="digits")).mean[0], abs=0.02)


def test_a_changed_source_is_packed_anew(tmp_path: Path) -> None:
    root = samples.image_tree(tmp_path / "own", ("train", "test"))
    before = load(Data(name=str(root))).digest
    file = root / "train" / "ant" / "0.png"
    Image.new("RGB", (8, 8), (255, 255, 255)).save(file)
    os.utime(file, ns=(1, 1))
    assert load(Data(name=str(root))).digest != before


def test_unknown_names_are_told() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        load(Data(name="cifar-100"))


def test_a_root_without_the_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar-100-binary/, cifar-100-binary\.tar\.gz"):
        load(Data(name="cifar100", root=str(tmp_path)))


def test_images_are_read_on_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def pool(workers: int) -> ThreadPoolExecutor:
        asked.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(images, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert list(images._parallel(abs, [-1, 2])) == [1, 2]
    assert asked == [3]
