"""The benchmark data of a task in files: one for training and one for testing, or one that is divided."""

from pathlib import Path

import numpy as np

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Task
from cloister.tasks.partition import holdout

SPLIT_SEED = 0
"""Fixed here, not configured: every run of every strategy is scored on the same examples."""
TESTED = 0.2
"""Share of each class of one file that is kept to test on."""


def dataset_at(task: Task, path: str | Path, ending: str) -> Dataset:
    """What a simulation deals out: the files `train` and `test` in a folder, or one file, a fifth of it to test on.

    Args:
        task: reads each file.
        path: of the folder or the file, as `task.data-path` says it.
        ending: of the names of files, such as `.csv`.

    Raises:
        DataError: there is neither, or a file is not what the task reads.
    """
    try:
        return _read(task, expanded(path), ending)
    except DataError as error:
        raise DataError(f"task.data-path: {str(error).removeprefix('data-path: ')}", error.first) from None


def _read(task: Task, path: Path, ending: str) -> Dataset:
    wanted = f"a {ending} file, a fifth of which is kept to test on, or a folder with train{ending} and test{ending}"
    if path.is_file():
        examples = task.read(path)
        train, test = holdout(task.strata(examples.y), TESTED, np.random.default_rng(SPLIT_SEED))
        return Dataset(examples.take(train), examples.take(test))
    if not path.is_dir():
        raise DataError(f"there is no file or folder at {path}; name {wanted}")
    if missing := [name for name in (f"train{ending}", f"test{ending}") if not (path / name).is_file()]:
        there = sorted(found.name for found in path.glob(f"*{ending}"))
        one = f"; to use {there[0]} alone, name {path / there[0]}" if len(there) == 1 else ""
        raise DataError(f"the folder {path} lacks {' and '.join(missing)}; name {wanted}{one}")
    train_part, test_part = (task.read(path / f"{part}{ending}") for part in ("train", "test"))
    return Dataset(train_part, test_part)
