"""Fixtures for tests of the privacy core."""

import numpy as np
import pytest

from cloister.privacy.mechanisms.grid import Adder, IntegerSums
from cloister.utils.cohort import updates


@pytest.fixture
def poisoned_memory(monkeypatch):
    """New memory holds NaN, and whole numbers that stand out: what was never written to shows."""
    empty = np.empty

    def poisoned(shape, dtype=float, *args, **options):
        memory = empty(shape, dtype, *args, **options)
        memory.fill(np.nan if memory.dtype.kind in "fc" else 85)
        return memory

    monkeypatch.setattr(np, "empty", poisoned)


@pytest.fixture
def unverified(monkeypatch):
    """A release that believes what a cohort says of its bound: what is broken before it then shows."""

    def add_up(self, cohort, span, weights, squares, sums, sign=1):
        rows = updates(cohort.rows, cohort.sent, span, np.zeros(len(cohort) * len(span)))
        sums.believed = getattr(sums, "believed", 0.0) + np.trunc(rows * weights[:, None]).sum(axis=0)

    monkeypatch.setattr(Adder, "add_up", add_up)
    monkeypatch.setattr(IntegerSums, "clear", lambda sums: setattr(sums, "believed", 0.0))
    monkeypatch.setattr(IntegerSums, "write", lambda sums, out: np.copyto(out, sums.believed))
