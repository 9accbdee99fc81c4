"""Files that tell no more than they should."""

import os

import numpy as np
import pytest

from cloister.utils.files import atomic_path, read_npz


def test_objects_are_no_arrays(tmp_path):
    np.savez(tmp_path / "objects.npz", a=np.array([print], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_npz(tmp_path / "objects.npz")


def test_nothing_is_written_through_a_link_that_waits_for_it(tmp_path):
    (tmp_path / "mine").write_text("keep")
    for process in range(os.getpid() - 2, os.getpid() + 3):
        (tmp_path / f".report.{process}.partial.html").symlink_to(tmp_path / "mine")
    with atomic_path(tmp_path / "report.html") as partial:
        partial.write_text("page")
    assert (tmp_path / "mine").read_text() == "keep" and (tmp_path / "report.html").read_text() == "page"
