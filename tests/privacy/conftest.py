"""What tests of the privacy core share."""

import numpy as np
import pytest


@pytest.fixture
def poisoned_memory(monkeypatch):
    """New memory holds NaN, and whole numbers that stand out: what was never written to shows."""
    empty = np.empty

    def poisoned(shape, dtype=float, *args, **options):
        memory = empty(shape, dtype, *args, **options)
        memory.fill(np.nan if memory.dtype.kind in "fc" else 85)
        return memory

    monkeypatch.setattr(np, "empty", poisoned)
