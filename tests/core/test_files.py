"""Files that tell no more than they should."""

import os
import tracemalloc

import numpy as np
import pytest

from cloister.utils.files import LARGEST_TEXT, atomic_path, read_npz, read_text, write_npz


def test_arrays_take_no_more_memory_than_their_file(tmp_path):
    """A small file that somebody else made may say that it holds any number of numbers."""
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.float32)}
    write_npz(tmp_path / "own.npz", arrays)
    found = read_npz(tmp_path / "own.npz")
    assert found.keys() == arrays.keys() and all((found[name] == arrays[name]).all() for name in arrays)
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 21))
    assert (tmp_path / "bomb.npz").stat().st_size < 1 << 15
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="larger than the file"):
            read_npz(tmp_path / "bomb.npz")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_objects_are_no_arrays(tmp_path):
    np.savez(tmp_path / "objects.npz", a=np.array([print], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_npz(tmp_path / "objects.npz")


def test_only_a_file_of_some_size_is_read(tmp_path):
    (tmp_path / "text").write_text("ε")
    assert read_text(tmp_path / "text") == "ε"
    (tmp_path / "device").symlink_to("/dev/null")
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path / "device")
    with (tmp_path / "text").open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    with pytest.raises(OSError, match="larger than 256 MB"):
        read_text(tmp_path / "text")


def test_nothing_is_written_through_a_link_that_waits_for_it(tmp_path):
    (tmp_path / "mine").write_text("keep")
    for process in range(os.getpid() - 2, os.getpid() + 3):
        (tmp_path / f".report.{process}.partial.html").symlink_to(tmp_path / "mine")
    with atomic_path(tmp_path / "report.html") as partial:
        partial.write_text("page")
    assert (tmp_path / "mine").read_text() == "keep" and (tmp_path / "report.html").read_text() == "page"
