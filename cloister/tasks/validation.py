"""Validation set of the server: examples that train the initial model, disjoint from the test set."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.base import Dataset, Task
from cloister.tasks.partition import holdout

VALIDATION_SEED = 0
"""A constant, so that every run of every strategy is scored on the same examples."""


def with_validation(task: Task, data: Dataset) -> Dataset:
    """Return the data with a validation set.

    If there is none, half of the test examples become it. The half is drawn from each class. If test examples have
    owners, it is all examples of half of the owners.

    Args:
        task: of the data.
        data: with or without `validation`.

    Raises:
        DataError: there are too few test examples.
    """
    if data.validation is not None:
        return data
    strata = task.strata(data.test.y)
    owners = data.test_owners
    if owners is None:
        ours, test = halves(strata)
    else:
        names = np.unique(owners)
        chosen = np.random.default_rng(VALIDATION_SEED).permutation(names)[: len(names) // 2]
        is_ours = np.isin(owners, chosen)
        ours, test = _refuse_empty(np.flatnonzero(is_ours), np.flatnonzero(~is_ours))
        owners = owners[test]
    return replace(data, test=data.test.take(test), test_owners=owners, validation=data.test.take(ours))


def halves(labels: NDArray) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Split test examples into two halves, class by class, and return their indices.

    Equal labels, of shape (n,), give equal halves.

    Raises:
        DataError: one half would be empty.
    """
    return _refuse_empty(*holdout(labels, 0.5, np.random.default_rng(VALIDATION_SEED)))


def _refuse_empty(ours: NDArray[np.intp], others: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    if not len(ours) or not len(others):
        count = len(ours) + len(others)
        raise DataError(f"{count} test examples are too few of each class to take half of them for validation")
    return ours, others
