"""Leave out what small federations spend most of their time on, in tests that are not about it."""

import functools
import os
from collections.abc import Iterator

import numpy as np
import pytest
from sklearn import datasets

from cloister.privacy.accounting import account, accountants


@pytest.fixture(autouse=True, scope="module")
def quick_runs() -> Iterator[None]:
    """Shorten the runs of a module. A `conftest.py` that imports this fixture applies it to the modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        # A federation of four syncs a hundred files; none of them has to outlive a power cut.
        patch.setattr(os, "fsync", _left_to_the_system)
        # Each server parses the same text of 1,797 digits, and solves the same equation for ε.
        patch.setattr(datasets, "load_digits", _digits)
        patch.setattr(accountants, "gaussian_epsilon", functools.cache(accountants.gaussian_epsilon))
        yield


@pytest.fixture(autouse=True)
def coarse_accounts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Account in coarser steps, which is sound too: a claim has a loss distribution for each size of client."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("slow"):
            patch.setattr(account, "LOSS_STEPS", 2000)
            patch.setattr(account, "FINE", account.COARSE)
        yield


_load = datasets.load_digits


@functools.cache
def _digits(return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
    """Read the images and their labels once a process; a write to them is an error."""
    read: tuple[np.ndarray, np.ndarray] = _load(return_X_y=return_X_y)
    for array in read:
        array.setflags(write=False)
    return read


def _left_to_the_system(handle: object) -> None:
    """Sync nothing."""
