"""Benchmark data in files: separate training and test files, or one file that is split."""

import csv
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.partition import holdout

PARTS_SEED = 0
"""A constant, so that every run of every strategy is scored on the same examples."""
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
            strata, rng = task.strata(examples.y), np.random.default_rng(PARTS_SEED)
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
    names = _names_in(path) if task.config.group else []
    if names and task.config.group not in names:
        raise DataError(
            f"task.group = {task.config.group!r} names no array or column of {path}, which has {', '.join(names)}; "
            "task.group = '' protects each example by itself"
        )
    return task.read(path)


def _names_in(path: Path) -> Sequence[str]:
    """Return the array names of an `.npz` file or the column names of a table.

    It is empty for another kind of file. Only the user's own files are read this way. For a site's file, a message
    names only missing arrays and columns.
    """
    with suppress(ValueError, OSError, csv.Error, StopIteration, zipfile.BadZipFile):
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return list(archive.files)
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                return [name.strip() for name in next(csv.reader(file))]
    return []
