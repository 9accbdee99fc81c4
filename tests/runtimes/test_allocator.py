"""The memory of a round's models is there in the next round."""

import ctypes
import subprocess
import sys

import pytest

from cloister.simulation import grid

ROUNDS = """
import ctypes, resource, sys
import numpy as np
from cloister.simulation.grid import keep_memory

PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # pages are small, whatever the system's setting

def round():
    models = [np.ones(800_000, np.float32) for _ in range(16)]

if sys.argv[1] == "kept":
    keep_memory()
for _ in range(2):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def has_glibc():
    try:
        return hasattr(ctypes.CDLL(None), "mallopt") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    except (OSError, TypeError):
        return False


def faults(kind):
    done = subprocess.run([sys.executable, "-c", ROUNDS, kind], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not has_glibc(), reason="settings of glibc")
def test_pages_of_models_are_not_touched_anew_in_every_round():
    # 64 models of 782 pages.
    assert faults("kept") < 100 < 10_000 < faults("as it is")


def test_nothing_happens_without_glibc(monkeypatch):
    class Musl:
        pass

    monkeypatch.setattr(grid.ctypes, "CDLL", lambda name: Musl())
    grid.keep_memory.__wrapped__()
