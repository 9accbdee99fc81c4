"""Decoded images: made once, made anew when anything changes, whole or absent, and never held in memory."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from mri import SIZE, folders, jpeg, mri, put, scan

from cloister.tasks.datasets.alzheimer_mri import CLASSES
from cloister.tasks.pictures import cache, decode
from cloister.tasks.pictures.cache import FOLDER, KEPT, decoded
from cloister.tasks.pictures.finding import find_pictures
from cloister.tasks.pictures.form import Form, Note
from cloister.utils.errors import DataError


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def images(tmp_path):
    return folders(tmp_path / "images", 3)


def pixels(root, size=SIZE, order=range(12)):
    return decoded(find_pictures(root, CLASSES), Form((size, size)), order).pixels


@pytest.fixture
def count(monkeypatch):
    """Count the images that were decoded."""
    calls = []
    real = cache.decode
    monkeypatch.setattr(cache, "decode", lambda *given: calls.append(1) or real(*given))
    return lambda: [len(calls), calls.clear()][0]


def changed_under_its_old_time(path):
    times = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def mapped(array):
    """Return whether an array is a part of a file, and no copy of it."""
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_images_are_decoded_once(images, count):
    first = np.array(pixels(images))
    assert count() == 12
    assert np.array_equal(pixels(images), first) and count() == 0
    (file,) = (images / FOLDER).iterdir()
    assert file.suffix == ".npy" and (images / FOLDER).stat().st_mode & 0o77 == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda root: put(root / CLASSES[0] / "new.jpg", jpeg(scan(0, 9))),
        lambda root: (root / CLASSES[1] / "scan (1).jpg").unlink(),
        lambda root: put(root / CLASSES[1] / "scan (1).jpg", jpeg(scan(1, 9, (30, 30)))),
        lambda root: os.utime(root / CLASSES[1] / "scan (1).jpg", (1, 1)),
        lambda root: changed_under_its_old_time(root / CLASSES[1] / "scan (1).jpg"),
        lambda root: (root / CLASSES[1] / "scan (1).jpg").rename(root / CLASSES[2] / "moved.jpg"),
    ],
    ids=["added", "removed", "changed", "touched", "changed under its old time", "moved"],
)
def test_files_that_change_are_decoded_anew(images, count, change):
    pixels(images)
    count()
    change(images)
    source = find_pictures(images, CLASSES)
    found = decoded(source, Form((SIZE, SIZE)), range(len(source.pictures))).pixels
    assert count() == len(found) == len(source.pictures)


def test_another_size_and_another_order_are_other_files(images, count):
    first = np.array(pixels(images))
    means = first.mean(axis=(1, 2, 3)).reshape(4, 3)
    assert (np.diff(means.mean(axis=1)) > 0.1).all(), "the classes are told by their grey"
    backwards = pixels(images, order=range(11, -1, -1))
    assert np.array_equal(backwards, first[::-1]) and count() == 24
    assert pixels(images, size=20).shape == (12, 20, 20, 1) and count() == 12


def test_only_a_few_sizes_are_kept(images):
    for size in range(SIZE, SIZE + KEPT + 3):
        pixels(images, size)
    assert len(list((images / FOLDER).iterdir())) == KEPT


def test_files_of_another_process_are_left_alone_or_gone(images, monkeypatch):
    """It may be writing one, and may have removed another one since it was listed."""
    source, listed = find_pictures(images, CLASSES), Path.glob
    order = range(len(source.pictures))
    writing = images / FOLDER / ".x.npy.1.partial.npy"
    decoded(source, Form((7, 7)), order)
    writing.touch()
    os.utime(writing, (0, 0))
    monkeypatch.setattr(Path, "glob", lambda place, pattern: [*listed(place, pattern), place / "gone.npy"])
    for size in range(8, 9 + KEPT):
        decoded(source, Form((size, size)), order)
    assert writing.exists() and len(list(listed(images / FOLDER, "*.npy"))) == KEPT + 1


def test_what_another_process_forgets_at_once_was_opened_before(images, monkeypatch):
    source = find_pictures(images, CLASSES)
    monkeypatch.setattr(cache, "forget_the_oldest", lambda place: [path.unlink() for path in place.glob("*.npy")])
    assert decoded(source, Form((7, 7)), range(len(source.pictures))).pixels.shape[1] == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\x93NUMPY nonsense"),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: np.save(file, np.zeros((12, SIZE, SIZE), np.float32)),
        lambda file: np.save(file, np.zeros((12, SIZE, SIZE, 1))),
    ],
    ids=["empty", "nonsense", "cut off", "another shape", "another type"],
)
def test_a_damaged_cache_is_made_anew(images, count, damage):
    first = np.array(pixels(images))
    (file,) = (images / FOLDER).iterdir()
    damage(file)
    count()
    assert np.array_equal(pixels(images), first) and count() == 12


def test_data_that_cannot_be_written_has_its_cache_elsewhere(images, caches, count):
    (images / FOLDER).write_text("no folder can be made here")
    first = np.array(pixels(images))
    assert count() == 12 and np.array_equal(pixels(images), first) and count() == 0
    assert len(list(caches.rglob("*.npy"))) == 1
    again = folders(images.parent / "others", 3)
    (again / FOLDER).write_text("")
    pixels(again)
    assert len(list(caches.rglob("*.npy"))) == 2, "other data of the same names"


def test_it_is_never_taken_for_a_class_nor_for_images(images):
    before = find_pictures(images, CLASSES).pictures
    pixels(images)
    put(images / FOLDER / "scan.jpg", jpeg(scan(0, 0)))
    assert find_pictures(images, CLASSES).pictures == before, "a folder beside those of classes would be refused"
    named = find_pictures(images, (*CLASSES, "cloister cache")).pictures
    assert {picture.label for picture in named} == set(range(len(CLASSES)))


def test_no_place_for_a_cache_is_one_clear_error(images, caches):
    (images / FOLDER).write_text("")
    caches.write_text("")
    with pytest.raises(DataError, match=r"can be kept in none of .*cloister-cache .*caches.*; set CLOISTER_CACHE"):
        pixels(images)


def test_a_full_disk_leaves_no_part_of_a_cache(images, monkeypatch, caches):
    rows = iter(range(5))

    def grey(*_):
        if next(rows) == 4:
            raise OSError(28, "No space left on device")
        return np.zeros((SIZE, SIZE, 1), np.float32), Note()

    monkeypatch.setattr(cache, "decode", grey)
    caches.write_text("")
    with pytest.raises(DataError, match="No space left on device"):
        pixels(images)
    assert not list((images / FOLDER).iterdir())


def test_an_interrupted_process_leaves_no_cache_that_is_read(images, monkeypatch, count):
    def grey(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cache, "decode", grey)
        pixels(images)
    assert np.isfinite(pixels(images)).all() and count() == 12


@pytest.mark.slow
def test_two_processes_at_once_read_the_same(images):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_picture_cache import pixels
from pathlib import Path
print("ready", flush=True)
sys.stdin.readline()
import hashlib
print(hashlib.sha256(pixels(Path({str(images)!r})).tobytes()).hexdigest())
"""
    command = [sys.executable, "-c", program]
    two = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert all(each.stdout.readline() == "ready\n" for each in two)
    for each in two:
        each.stdin.write("\n")
        each.stdin.flush()
    digests = {each.communicate()[0] for each in two}
    assert len(digests) == 1 and all(each.returncode == 0 for each in two)
    assert len(list((images / FOLDER).iterdir())) == 1 and np.isfinite(pixels(images)).all()


def test_images_stay_on_the_disk(tmp_path):
    """Hold only a few images in memory, of a data set as it is loaded and of one that is decoded."""
    root = folders(tmp_path / "images", 50)
    whole = 200 * 64 * 64 * 4
    mri(root).load()  # what is imported for it takes memory too
    for _ in ("decoding", "reading"):
        tracemalloc.start()
        data = mri(root, image_size=64).load()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert all(mapped(part.x) for part in (data.train, data.validation, data.test))
        assert peak < whole / 3
    assert not mapped(data.train.take(np.arange(3)).x)


def test_folders_of_other_names_are_named_in_place_of_those_that_were_expected(tmp_path):
    for name in ("ring", "square", *(f"more-{number}" for number in range(4))):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError) as refused:
        find_pictures(tmp_path, ("Mild", "Moderate"))
    expected = (
        "folders of images named Mild, Moderate, which may lie below train and test, or labels.csv, or parquet files"
    )
    there = "there are folders named more-0, more-1, more-2, more-3, ring and 1 more"
    assert str(refused.value) == f"no images at {tmp_path}; expected {expected}; {there}"
    for name in ("more-0", "ring", "square"):
        (tmp_path / name).rename(tmp_path / f"more-1/{name}")
    (tmp_path / "more-1").rename(tmp_path / "Train")
    with pytest.raises(DataError, match=r"there are folders named Train/more-0, Train/ring, Train/square, more-2"):
        find_pictures(tmp_path, ("Mild", "Moderate"))


class TestWantOfMemory:
    """It passes, so that what it leaves out is not kept."""

    @pytest.fixture
    def short(self, monkeypatch):
        """Fail once, as a library does without memory."""

        def once(error):
            errors, real = [error], decode._decoded

            def fails(*given):
                if errors:
                    raise errors.pop()
                return real(*given)

            monkeypatch.setattr(decode, "_decoded", fails)

        return once

    @pytest.mark.parametrize("error", [MemoryError(), type("error", (Exception,), {"code": -4})("Insufficient memory")])
    def test_leaves_one_image_out_until_the_next_start(self, images, short, error):
        short(error)
        source = find_pictures(images, CLASSES)
        first = decoded(source, Form((SIZE, SIZE)), range(12))
        assert [note.reason[:17] for note in first.notes if note.reason] == ["needs more memory"]
        assert not [*images.rglob("*.npy")] and np.isnan(first.pixels).any(axis=(1, 2, 3)).sum() == 1
        second = decoded(source, Form((SIZE, SIZE)), range(12))
        assert not any(note.reason for note in second.notes) and np.isfinite(second.pixels).all()

    def test_of_a_damaged_image_is_no_excuse(self, images, short):
        short(ValueError("damaged"))
        found = decoded(find_pictures(images, CLASSES), Form((SIZE, SIZE)), range(12))
        assert sum(note.reason == "is damaged" for note in found.notes) == 1
        assert [*images.rglob("*.npy")]
