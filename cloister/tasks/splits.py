"""Splits of benchmark data: training and test files, one file that is divided, and the server's validation set."""

import csv
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.making import read_by
from cloister.tasks.partition import SPLIT_SEED, holdout
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

TESTED = 0.2
"""Test share of each class of a single file."""


def dataset_at(task: Task, path: str | Path, ending: str) -> Dataset:
    """Return the benchmark data in a folder or a file.

    A folder has the files `train` and `test`. Of a single file, a fifth is test data.

    Args:
        task: reads each file.
        path: of the folder or the file, as `task.data-path` states it.
        ending: of the names of files, such as `.csv`.

    Raises:
        DataError: there is neither, a file is not in the task's format, or it lacks the array or column `task.group`.
    """
    file = expanded(path)
    wanted = f"a {ending} file, a fifth of which is kept to test on, or a folder with train{ending} and test{ending}"
    try:
        if file.is_file():
            examples = _examples(task, file)
            strata, rng = task.strata(examples.y), np.random.default_rng(SPLIT_SEED)
            if examples.groups is None:
                train, test = holdout(strata, TESTED, rng)
            else:  # whole groups, stratified by the first row of each
                _, first, places = np.unique(examples.groups, return_index=True, return_inverse=True)
                train, test = (np.flatnonzero(np.isin(places, part)) for part in holdout(strata[first], TESTED, rng))
            parts = examples.take(train), examples.take(test)
        elif not file.is_dir():
            raise DataError(f"there is no file or folder at {file}; name {wanted}")
        else:
            if missing := [name for name in (f"train{ending}", f"test{ending}") if not (file / name).is_file()]:
                there = sorted(found.name for found in file.glob(f"*{ending}"))
                one = f"; to use {there[0]} alone, name {file / there[0]}" if len(there) == 1 else ""
                raise DataError(f"the folder {file} lacks {' and '.join(missing)}; name {wanted}{one}")
            parts = _examples(task, file / f"train{ending}"), _examples(task, file / f"test{ending}")
        groups = parts[0].groups
        return Dataset(*parts) if groups is None else Dataset(*parts, groups={task.config.group: groups})
    except DataError as error:
        raise DataError(f"task.data-path: {str(error).removeprefix('data-path: ')}", error.first) from None


def _examples(task: Task, path: Path) -> Examples:
    """Return the examples of a file, in the groups that `task.group` names."""
    names: Sequence[str] = []
    if task.config.group:
        # Only the user's own files are read for names: for a site's file, a message names only what is missing.
        with suppress(ValueError, OSError, csv.Error, StopIteration, zipfile.BadZipFile):
            if path.suffix.lower() == ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    names = list(archive.files)
            elif path.suffix.lower() == ".csv":
                with path.open(newline="", encoding="utf-8-sig") as file:
                    names = [name.strip() for name in next(csv.reader(file))]
    if names and task.config.group not in names:
        raise DataError(
            f"task.group = {task.config.group!r} names no array or column of {path}, which has {', '.join(names)}; "
            "task.group = '' protects each example by itself"
        )
    return read_by(task, path)


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
        chosen = np.random.default_rng(SPLIT_SEED).permutation(names)[: len(names) // 2]
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
    return _refuse_empty(*holdout(labels, 0.5, np.random.default_rng(SPLIT_SEED)))


def _refuse_empty(ours: NDArray[np.intp], others: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    if not len(ours) or not len(others):
        count = len(ours) + len(others)
        raise DataError(f"{count} test examples are too few of each class to take half of them for validation")
    return ours, others
