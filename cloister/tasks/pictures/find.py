"""Which of the layouts a path holds."""

from collections.abc import Sequence
from pathlib import Path

from cloister.core.errors import DataError
from cloister.tasks.pictures.folders import PARTS, FolderPerClass, folders_in
from cloister.tasks.pictures.parquet import ParquetFiles
from cloister.tasks.pictures.picture import Source

NAMED = 5
"""Folders that an error names."""


def find_pictures(path: Path, classes: Sequence[str], tolerant: bool = False) -> Source:
    """The images at a path: a folder with a folder per class, a folder of parquet files, or one parquet file.

    Either folder may also be the only one of its kind in the folder that is named.

    Args:
        path: of a folder or a file.
        classes: the task's names, in its order.
        tolerant: leave out images in folders of no class, each by itself; otherwise they are an error.

    Raises:
        DataError: there are no such images, or they lie in more than one such folder.
    """
    if not path.exists():
        raise DataError(f"there is no file or folder at {path}; name a folder with a folder of images for each class")
    found = _at(path, classes, tolerant)
    if not found and path.is_dir():
        found = [source for folder in folders_in(path) for source in _at(folder, classes, tolerant)]
    if len(found) > 1:
        raise DataError(f"{', '.join(str(source.root) for source in found)} all hold images; name one of them")
    if not found:
        raise DataError(
            f"no images at {path}; expected folders of images named {', '.join(classes)}, which may lie below train "
            f"and test, or parquet files{_instead(path)}"
        )
    return found[0]


def _instead(path: Path) -> str:
    """Which folders there are in place of those that were expected."""
    there = _folders_named(path) if path.is_dir() else []
    others = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
    return f"; there are folders named {', '.join(there[:NAMED])}{others}" if there else ""


def _folders_named(path: Path) -> list[str]:
    """The folders in a folder, and in place of `train` and `test` those in these."""
    below = {folder: folders_in(folder) if folder.name.lower() in PARTS else [] for folder in folders_in(path)}
    return [each.relative_to(path).as_posix() for folder, inner in below.items() for each in inner or [folder]]


def _at(path: Path, classes: Sequence[str], tolerant: bool) -> list[Source]:
    """The images of this very path, or nothing."""
    parquet = sorted(path.glob("*.parquet")) if path.is_dir() else [path] if path.suffix.lower() == ".parquet" else []
    if parquet:
        source: Source = ParquetFiles.at(parquet, classes)
    elif path.is_dir():
        source = FolderPerClass.at(path, classes, tolerant)
    else:
        return []
    return [source] if source.pictures else []
