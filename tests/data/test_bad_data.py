"""Bad data is a clear error: nothing runs, and nothing is left behind in the cache."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import data_samples as samples
import numpy as np
import pytest
from PIL import Image

from oqc.config import Data
from oqc.data import archives, load, unpickle
from oqc.data.images import eight_bit

Untouched = Callable[[], bool]
Official = Callable[..., None]
ARCHIVES = [("cifar100", "binary"), ("cifar10", "python"), ("tiny-imagenet", "jpeg")]


def small_archive(name: str, form: str, folder: Path) -> Path:
    layout = samples.layout_of(name, form)
    return samples.archived(samples.sample(name, form).files, folder / layout.archive, layout.folder)


@pytest.mark.parametrize(("name", "form"), ARCHIVES)
def test_wrong_checksum(name: str, form: str, tmp_path: Path, official: Official, untouched: Untouched) -> None:
    archive = small_archive(name, form, tmp_path)
    official(name, form)
    expected = samples.layout_of(name, form).md5
    with pytest.raises(ValueError, match=rf"md5 is [0-9a-f]{{32}}, expected .*{expected}"):
        load(Data(name=name, root=str(archive)))
    assert untouched()


@pytest.mark.parametrize(("name", "form"), ARCHIVES)
@pytest.mark.parametrize("share", [0.3, 0.999])
def test_truncated_archive(
    name: str, form: str, share: float, tmp_path: Path, official: Official, untouched: Untouched
) -> None:
    archive = small_archive(name, form, tmp_path)
    data = archive.read_bytes()
    archive.write_bytes(data[: int(share * len(data))])
    official(name, form, archive)
    with pytest.raises(ValueError, match=rf"{archive.name} is damaged or cut short"):
        load(Data(name=name, root=str(archive)))
    assert untouched()


@pytest.mark.parametrize("cut", [1, 3074])
def test_truncated_records(cut: int, tmp_path: Path, official: Official, untouched: Untouched) -> None:
    official("cifar100", "binary")
    files = samples.sample("cifar100", "binary").files
    samples.extracted(files | {"train.bin": files["train.bin"][:-cut]}, tmp_path / "set")
    with pytest.raises(ValueError, match=r"train\.bin must be records of 3074 bytes|must have 200 images.*got 199"):
        load(Data(name="cifar100", root=str(tmp_path / "set")))
    assert untouched()


def test_missing_file(tmp_path: Path, official: Official, untouched: Untouched) -> None:
    official("cifar10", "python")
    files = samples.sample("cifar10", "python").files
    del files["data_batch_4"]
    with pytest.raises(ValueError, match="has no file data_batch_4"):
        load(Data(name="cifar10", root=str(samples.extracted(files, tmp_path / "set"))))
    assert untouched()


def test_corrupt_images_are_named_and_counted(tmp_path: Path, untouched: Untouched) -> None:
    root = samples.image_tree(tmp_path / "own", ("train", "test"))
    (root / "train" / "bee" / "2.png").write_bytes(b"not an image")
    whole = (root / "test" / "ant" / "4.png").read_bytes()
    (root / "test" / "ant" / "4.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"2 of 20 images can't be read: train/bee/2\.png .*test/ant/4\.png"):
        load(Data(name=str(root)))
    assert untouched()


@pytest.mark.parametrize("part", ["train", "test"])
def test_empty_class(part: str, tmp_path: Path, untouched: Untouched) -> None:
    root = samples.image_tree(tmp_path / "own", ("train", "test"))
    (root / "train" / "cow").mkdir()
    Image.new("RGB", (8, 8)).save(root / "train" / "cow" / "0.png")
    (root / "test" / "cow").mkdir()
    Image.new("RGB", (8, 8)).save(root / "test" / "cow" / "0.png")
    (root / part / "cow" / "0.png").unlink()
    (root / part / "cow" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=f"class '{part}/cow' is empty"):
        load(Data(name=str(root)))
    assert untouched()


def test_class_only_in_test(tmp_path: Path, untouched: Untouched) -> None:
    root = samples.image_tree(tmp_path / "own", ("train", "test"))
    (root / "test" / "cow").mkdir()
    with pytest.raises(ValueError, match="class 'cow' is not a folder of"):
        load(Data(name=str(root)))
    assert untouched()


def test_label_out_of_range_in_records(tmp_path: Path, official: Official, untouched: Untouched) -> None:
    official("cifar100", "binary")
    files = samples.sample("cifar100", "binary").files
    records = bytearray(files["test.bin"])
    records[1] = 100
    root = samples.extracted(files | {"test.bin": bytes(records)}, tmp_path / "set")
    with pytest.raises(ValueError, match="test label 100 is out of range, the labels are 0 to 99"):
        load(Data(name="cifar100", root=str(root)))
    assert untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": np.array([0, -1])}, "test label -1 is out of range"),
        ({"y_test": np.array([0, 2])}, "test label 2 is out of range"),
        ({"y_train": np.array([0, 0, 0])}, "class '1' has no training images"),
        ({"y_train": np.array([0, 1])}, "3 train images but labels"),
        ({"y_train": np.array([0.0, 1.0, 1.0])}, "y_train must be whole numbers"),
        ({"x_train": np.zeros((3, 4, 4))}, "x_train must be uint8"),
        ({"x_test": np.zeros((2, 5, 5), np.uint8)}, "test images are"),
        ({"x_test": np.zeros((0, 4, 4), np.uint8), "y_test": np.zeros(0, int)}, "the test part has no images"),
        ({"x_train": np.array([object()] * 3)}, "can't be read as .npz"),
        ({"x_train": np.zeros((3, 0, 4), np.uint8), "x_test": np.zeros((2, 0, 4), np.uint8)}, "without a pixel"),
    ],
)
def test_bad_npz(change: dict[str, np.ndarray], message: str, tmp_path: Path, untouched: Untouched) -> None:
    good = {
        "x_train": np.zeros((3, 4, 4), np.uint8),
        "y_train": np.array([0, 1, 1]),
        "x_test": np.zeros((2, 4, 4), np.uint8),
        "y_test": np.array([0, 1]),
        "classes": np.array(["0", "1"]),
    }
    np.savez(tmp_path / "own.npz", **(good | change))
    with pytest.raises(ValueError, match=message):
        load(Data(name=str(tmp_path / "own.npz")))
    assert untouched()


def test_npz_with_missing_arrays_and_a_damaged_one(tmp_path: Path, untouched: Untouched) -> None:
    np.savez(tmp_path / "own.npz", x_train=np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(ValueError, match="missing: y_train, x_test, y_test"):
        load(Data(name=str(tmp_path / "own.npz")))
    (tmp_path / "own.npz").write_bytes(b"PK broken")
    with pytest.raises(ValueError, match=r"can't be read as \.npz"):
        load(Data(name=str(tmp_path / "own.npz")))
    assert untouched()


@pytest.mark.parametrize("member", ["cifar-100-binary/../../evil", "/evil", "../evil", "cifar-100-binary\\..\\evil"])
@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_archive_that_leaves_the_folder(
    member: str, suffix: str, tmp_path: Path, official: Official, untouched: Untouched
) -> None:
    path = tmp_path / f"set{suffix}"
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(member, b"x")
    else:
        with tarfile.open(path, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo(member), io.BytesIO())
    official("cifar100", "binary", path)
    with pytest.raises(ValueError, match="leaves the folder"):
        load(Data(name="cifar100", root=str(path)))
    assert untouched()
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_archive_with_a_link(kind: bytes, tmp_path: Path, official: Official, untouched: Untouched) -> None:
    path = tmp_path / "set.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo("cifar-100-binary/train.bin")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    official("cifar100", "binary", path)
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load(Data(name="cifar100", root=str(path)))
    assert untouched()


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_archive_that_unpacks_to_too_much(suffix: str, tmp_path: Path) -> None:
    path = samples.archived({"zeros": bytes(4 << 20)}, tmp_path / f"set{suffix}", "top")
    assert path.stat().st_size < 1 << 16
    with pytest.raises(ValueError, match="unpacks to more than 1 MiB"):
        archives.open_archive(path, "top", cap=1 << 20)
    assert len(archives.open_archive(path, "top", cap=5 << 20).read("zeros")) == 4 << 20


def test_archive_that_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"text")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"text" * 1000))
    for name in ("plain", "packed.gz"):
        with pytest.raises(ValueError, match="is damaged or cut short"):
            archives.open_archive(tmp_path / name, "top")


class Evil:
    """Writes a file when it is unpickled by a plain unpickler."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.proof), "w"))


def test_malicious_pickle_is_not_executed(tmp_path: Path, official: Official, untouched: Untouched) -> None:
    official("cifar100", "python")
    files = samples.sample("cifar100", "python").files
    evil = pickle.dumps({b"data": Evil(tmp_path / "proof")}, protocol=2)
    root = samples.extracted(files | {"train": evil}, tmp_path / "set")
    with pytest.raises(ValueError, match=r"train can't be read: it asks for (io|_io)\.open"):
        load(Data(name="cifar100", root=str(root)))
    assert not (tmp_path / "proof").exists()
    assert untouched()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", r"asks for os\.system"),
        (b"c__builtin__\neval\n(S'1'\ntR.", r"asks for (__builtin__|builtins)\.eval"),
        (b"cnumpy\nload\n(S'x'\ntR.", r"asks for numpy\.load"),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "is not latin1"),
        (b"cnumpy\ndtype\n(S'O'\ntR.", "is not a number's"),
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(J\xff\xff\xff\x7ftS'b'\ntR.", "as numpy writes"),
        (b"cnumpy\nndarray\n((J\xff\xff\xff\x7fttR.", "not callable"),
        (b"S'x'\nQ.", "outside the file"),
        (pickle.dumps([1, 2]), "must hold a dict, got list"),
        (b"", "can't be read"),
        (b"\x80\x02}(", "can't be read"),
    ],
)
def test_only_plain_pickles_are_read(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        unpickle.loads(data, "some file")
    assert str(caught.value).startswith("some file")


def test_tiny_imagenet_with_a_strange_class(tmp_path: Path, official: Official, untouched: Untouched) -> None:
    official("tiny-imagenet", "jpeg")
    files = samples.tiny_sample().files
    files["val/val_annotations.txt"] = files["val/val_annotations.txt"].replace(b"n00000001", b"n99999999", 1)
    with pytest.raises(ValueError, match="has class 'n99999999'"):
        load(Data(name="tiny-imagenet", root=str(samples.extracted(files, tmp_path / "set"))))
    assert untouched()


def test_npz_damaged_inside_or_of_another_form(tmp_path: Path, untouched: Untouched) -> None:
    path = tmp_path / "own.npz"
    np.savez_compressed(path, x_train=np.arange(4000, dtype=np.uint8).reshape(10, 20, 20))
    data = bytearray(path.read_bytes())
    for place in range(40, 60):
        data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"own\.npz can't be read as \.npz"):
        load(Data(name=str(path)))
    images = np.zeros((3, 4, 4), np.uint8)  # a label this high would make as many classes
    np.savez(path, x_train=images, y_train=np.array([0, 1, 10**9]), x_test=images, y_test=np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="y_train has the label 1000000000, but only 3 images"):
        load(Data(name=str(path)))
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"can't be read as \.npz: it holds one array without a name"):
        load(Data(name=str(path)))
    assert untouched()


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [(8, 99, "compression method is not supported"), (6, 1, "is encrypted"), (4, 200, "zip file version")],
)
def test_npz_that_asks_for_what_zipfile_has_not(place: int, value: int, why: str, tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x_train=np.zeros((3, 4, 4), np.uint8))
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 2 + place] = value  # in the directory at the end, by the offsets of a file's header
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"own\.npz can't be read as \.npz: .*{why}"):
        load(Data(name=str(path)))


def test_hidden_files_and_links_that_lead_nowhere_are_not_images(tmp_path: Path) -> None:
    plain, strange = tmp_path / "plain", tmp_path / "strange"
    for folder in (plain, strange):
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True)
            for i in range(6):
                Image.fromarray(np.full((4, 4, 3), 20 * i, np.uint8)).save(folder / name / f"{i}.png")
    (strange / "a" / ".ipynb_checkpoints").mkdir()
    (strange / "a" / ".ipynb_checkpoints" / "0-checkpoint.png").write_bytes((strange / "a" / "0.png").read_bytes())
    (strange / "a" / "._0.png").write_bytes(b"\0\5\26\7")
    (strange / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (strange / "a" / "around").symlink_to(strange / "a")
    (strange / "loop").symlink_to(".")
    names = archives.open_folder(strange).names
    assert names == archives.open_folder(plain).names
    assert load(Data(name=str(strange))).digest == load(Data(name=str(plain))).digest


def test_an_unreadable_image_is_named_without_the_reader(tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    (tmp_path / "set" / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"a/0\.png \(no image format is known for it\)"):
        load(Data(name=str(tmp_path / "set")))


@pytest.mark.parametrize("names", [("training", "validation"), ("Train", "Test"), ("val", "test"), ("test",)])
def test_parts_of_other_names_are_not_taken_for_classes(
    names: tuple[str, ...], tmp_path: Path, untouched: Untouched
) -> None:
    root = samples.image_tree(tmp_path / "set", names)
    with pytest.raises(ValueError, match=rf"has {', '.join(sorted(names))} with folders in it: name the parts train"):
        load(Data(name=str(root)))
    assert untouched()


def test_a_class_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    root = samples.image_tree(tmp_path / "set", ("",))
    next(root.iterdir()).rename(root / "test")
    (root / "test" / ".ipynb_checkpoints").mkdir()
    assert "test" in load(Data(name=str(root))).classes


def test_one_class_is_nothing_to_learn(tmp_path: Path, untouched: Untouched) -> None:
    images, labels = np.zeros((6, 8, 8, 3), np.uint8), np.zeros(6, np.int64)
    np.savez(tmp_path / "one.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    with pytest.raises(ValueError, match=r"one\.npz: all images are of one class, '0': there is nothing to tell apart"):
        load(Data(name=str(tmp_path / "one.npz")))
    assert untouched()


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "floats"), ("int32", "of 32 bits")])
def test_pixels_that_do_not_say_what_is_white_are_named(
    dtype: str, kind: str, tmp_path: Path, untouched: Untouched
) -> None:
    root = samples.image_tree(tmp_path / "set", ("",))
    pixels = np.random.default_rng(0).integers(0, 255, (8, 8)).astype(dtype)
    Image.fromarray(pixels).save(next(root.iterdir()) / "odd.tif")
    with pytest.raises(ValueError, match=rf"1 of \d+ images can't be read: .*odd\.tif \(its pixels are {kind}"):
        load(Data(name=str(root)))
    assert untouched()


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untouched: Untouched
) -> None:
    root = samples.image_tree(tmp_path / "set", ("",))
    closed, scandir = [str(sorted(root.iterdir())[0]), str(root / "lost+found")], os.scandir
    (root / "lost+found").mkdir()

    def refusing(path: str) -> object:  # as for a user without the right; tests may run as one who has all
        if str(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ValueError, match=rf"{closed[0]} can't be read: Permission denied"):
        load(Data(name=str(root)))
    assert untouched()
    del closed[0]
    assert load(Data(name=str(root))).classes == ("ant", "bee")


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match=r"the cache .*file/cache cannot be written; set OQC_DATA to another folder"):
        load(Data(name="digits"))


def test_text_that_is_called_npz(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("a, b, c\n")
    with pytest.raises(ValueError, match=r"text\.npz can't be read as \.npz: it is no zip archive, as an \.npz is"):
        load(Data(name=str(tmp_path / "text.npz")))


def test_tiffs_of_signed_16_bits_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 0x4000, np.int32)).save(tmp_path / "wide.tif")
    with Image.open(tmp_path / "wide.tif") as wide:
        wide.tag_v2[258] = (16,)  # what such a file says; Pillow reads both into the same mode
        assert np.asarray(eight_bit(wide)).max() == 0x40
