"""Splits of benchmark data into training, test and validation sets, from two files or from one that is divided."""

import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Dataset, Examples, Task
from cloister.tasks.csv_files import header_of, is_header, is_table, lines_of
from cloister.tasks.making import read_by
from cloister.tasks.partition import SPLIT_SEED, holdout, numbered
from cloister.utils.errors import DataError
from cloister.utils.files import expanded

TESTED = 0.2
"""Share of each class that becomes test data, if there is a single file."""


def dataset_at(task: Task, path: str | Path, ending: str) -> Dataset:
    """Return the benchmark data in a folder or a file.

    A folder has the files `train` and `test`. Of a single file, a fifth is test data. With `task.partition = "natural"`
    each file of another folder is a site.

    Args:
        task: reads each file.
        path: of the folder or the file, as `task.data-path` states it.
        ending: of the names of files, such as `.csv`.

    Raises:
        DataError: the path is neither a file nor a complete folder; or a file has another format, or lacks the array or
            column that `task.group` names.
    """
    file = expanded(path)
    wanted = f"a {ending} file, a fifth of which is kept to test on, or a folder with train{ending} and test{ending}"
    try:
        if file.is_file():
            examples = _examples(task, file)
            train, test = holdout(task.strata(examples.y), TESTED, np.random.default_rng(SPLIT_SEED), examples.groups)
            parts = examples.take(train), replace(examples.take(test), faults=())
        elif task.config.partition == "natural" and not (file / f"train{ending}").is_file():
            return dataset_of_sites(task, file, sorted(file.glob(f"*{ending}")))
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
        raise error.of("task.data-path") from None


def dataset_of_sites(task: Task, folder: Path, places: Sequence[Path]) -> Dataset:
    """Return the benchmark data of sites, each read as its node would read it.

    Args:
        task: reads each site's data.
        folder: of the sites, for the message.
        places: file or folder of each site.

    Raises:
        DataError: there are no sites, or one has no data of the task.
    """
    if not places or all(place.stem.lower() in ("train", "test") for place in places):
        raise DataError(
            f"task.partition = 'natural' needs a folder with the data of each site; {folder} has {len(places)} sites"
        )
    try:
        parts = [_examples(task, place) for place in places]
    except DataError as error:
        taken = f"; task.partition = 'natural' takes each part of {folder} as a site"
        raise DataError(f"{error}{taken}", error.first) from None
    names = np.repeat([place.name for place in places], list(map(len, parts)))
    return dataset_of_owners(task, parts, numbered(names, np.random.default_rng(SPLIT_SEED)))


def dataset_of_owners(task: Task, parts: Sequence[Examples], owners: NDArray[np.intp]) -> Dataset:
    """Return the benchmark data of several sites. A fifth of each class of each site is test data.

    Args:
        task: of the examples.
        parts: all with groups, those that `task.group` names, or all without.
        owners: the site of each example of all parts, from 0.
    """
    examples = Examples.joined(parts)
    _, classes = np.unique(task.strata(examples.y), return_inverse=True)
    strata = owners * (int(classes.max(initial=0)) + 1) + classes
    train, test = holdout(strata, TESTED, np.random.default_rng(SPLIT_SEED), examples.groups)
    own = examples.take(train)
    return Dataset(
        own,
        replace(examples.take(test), faults=()),
        owners=owners[train],
        groups={} if own.groups is None else {task.config.group: own.groups},
    )


def _examples(task: Task, path: Path) -> Examples:
    """Return the examples of a file, in the groups that `task.group` names."""
    names: Sequence[str] = []
    if task.config.group:
        # Read names only from the user's own files. For a site's file, an error names only what is missing.
        with suppress(ValueError, OSError, DataError, zipfile.BadZipFile):
            if path.suffix.lower() == ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    names = list(archive.files)
            elif is_table(path):
                found, _ = header_of(lines_of(path)[0], (task.config.group,))
                names = found if is_header(found) else ()
    if names and task.config.group not in names:
        raise DataError(
            f"task.group = {task.config.group!r} names no array or column of {path}, which has {', '.join(names)}; "
            "task.group = '' protects each example by itself"
        )
    return read_by(task, path)


def with_validation(task: Task, data: Dataset) -> Dataset:
    """Return the data with a validation set.

    If there is none, half of the test examples become it. The half is drawn from each class. If test examples have
    owners, half of the owners are drawn instead, and all their examples become it.

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

    The split depends on the labels alone, of shape (n,).

    Raises:
        DataError: one half would be empty.
    """
    return _refuse_empty(*holdout(labels, 0.5, np.random.default_rng(SPLIT_SEED)))


def _refuse_empty(ours: NDArray[np.intp], others: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    if not len(ours) or not len(others):
        count = len(ours) + len(others)
        raise DataError(f"{count} test examples are too few of each class to take half of them for validation")
    return ours, others
