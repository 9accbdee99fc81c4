"""Detection of the layout of the images at a path: a folder per class, a table of labels, or parquet files."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloister.tasks.pictures.labelled import TABLE, LabelledFiles
from cloister.tasks.pictures.sources import (
    NAMED,
    PARTS,
    PATIENT,
    FolderPerClass,
    ParquetFiles,
    Picture,
    Source,
    folders_in,
    left_out,
)
from cloister.utils.errors import DataError
from cloister.utils.text import first_of

logger = logging.getLogger("cloister.tasks")


@dataclass(frozen=True)
class Together:
    """`Source` that combines several sources in one folder.

    Attributes:
        root: that folder.
        sources: in it.
    """

    root: Path
    sources: tuple[Source, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of all sources."""
        return tuple(path for source in self.sources for path in source.files)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Return the pictures of all sources, in the order of `sources`."""
        return tuple(picture for source in self.sources for picture in source.pictures)

    @property
    def stray(self) -> tuple[str, ...]:
        """Return the names, below the root, of files that no source uses."""
        return left_out(self.root, set(self.files))

    def contents(self) -> Iterator[bytes]:
        """Yield the encoded images of all sources."""
        for source in self.sources:
            yield from source.contents()


def find_pictures(path: Path, classes: Sequence[str], below: bool = True, group: str = "") -> Source:
    """Find the images at a path.

    A path is a folder with a folder per class or with a table of labels, that table, a folder of parquet files, or one
    parquet file.

    Args:
        path: of a folder or a file.
        classes: the task's names, in its order.
        below: whether the images may be in a subfolder of `path`, if exactly one subfolder has images.
        group: name of the groups, the run's `task.group`; empty: each image is a group.

    Raises:
        DataError: there are no such images, or several such folders, or several layouts, or no groups of this name.
    """
    _refuse_missing(path)
    found = _at(path, classes, group)
    if not found and below and path.is_dir():
        found = [source for folder in folders_in(path) for source in _at(folder, classes, group)]
    if len(found) > 1:
        raise DataError(
            f"{', '.join(str(source.root) for source in found)} all hold images; name one of them, or make each a "
            "site of a simulation: task.partition = 'natural'"
        )
    if not found:
        raise _no_images(path, classes)
    return found[0]


def sites_in(path: Path, classes: Sequence[str]) -> int:
    """Return the number of folders in a folder, if each holds images as that of a site does; otherwise 0.

    Args: as `find_pictures`.
    """
    folders = folders_in(path) if path.is_dir() else []
    try:
        return len(folders) * all(each.name.lower() not in PARTS and _at(each, classes, "") for each in folders)
    except DataError:
        return 0


def every_picture(path: Path, classes: Sequence[str], group: str = "") -> Source:
    """Find all images at exactly this path, in all layouts.

    Each image is found independently of the others. Images in folders of no class and unreadable parquet files are left
    out. A table of labels decides alone.

    Args: as `find_pictures`.

    Raises:
        DataError: there are no images, or no groups of this name.
    """
    _refuse_missing(path)
    if table := _table_at(path, classes, group):
        return table
    _refuse_groups(path, group)
    sources: list[Source] = [FolderPerClass.at(path, classes, True, group)] if path.is_dir() else []
    for file in [] if group else _parquet_files(path):
        try:
            sources.append(ParquetFiles.at([file], classes))
        except DataError as error:
            logger.warning("a parquet file is left out: %s", error)
    found = [source for source in sources if source.pictures]
    if not found:
        raise _no_images(path, classes)
    return found[0] if len(found) == 1 else Together(found[0].root, tuple(found))


def _table_at(path: Path, classes: Sequence[str], group: str) -> Source | None:
    """Return the source that a table of labels at a path describes, if there is one."""
    table = path / TABLE if path.is_dir() else path
    is_table = table.suffix.lower() == ".csv" and os.path.isfile(table)
    return LabelledFiles.at(table, classes, group) if is_table else None


def _refuse_groups(path: Path, group: str) -> None:
    """Refuse groups that images without a table do not have.

    Raises:
        DataError: names the places where groups may be.
    """
    if group and (group != PATIENT or not path.is_dir()):
        raise DataError(
            f"task.group = {group!r} needs an .npz file with that array, or labels.csv with that column, found {path}; "
            f"folders of DICOM files have {PATIENT}"
        )


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        raise DataError(f"there is no file or folder at {path}; name a folder with a folder of images for each class")


def _no_images(path: Path, classes: Sequence[str]) -> DataError:
    """Return an error that describes the folders found in place of the expected ones."""
    there: list[str] = []
    for folder in folders_in(path) if path.is_dir() else []:
        # The folders inside `train` and `test` replace these two.
        inner = folders_in(folder) if folder.name.lower() in PARTS else []
        there += [each.relative_to(path).as_posix() for each in inner or [folder]]
    instead = f"; there are folders named {first_of(there, NAMED)}" if there else ""
    return DataError(
        f"no images at {path}; expected folders of images named {', '.join(classes)}, which may lie below train "
        f"and test, or labels.csv, or parquet files{instead}"
    )


def _parquet_files(path: Path) -> list[Path]:
    """Return the parquet files at a path.

    In a folder, only regular files count: a pipe of that name does not.
    """
    if path.is_dir():
        return sorted(file for file in path.glob("*.parquet") if os.path.isfile(file))
    return [path] if path.suffix.lower() == ".parquet" else []


def _at(path: Path, classes: Sequence[str], group: str) -> list[Source]:
    """Return the source of the images at exactly this path, if there are any."""
    if table := _table_at(path, classes, group):
        return [table]
    _refuse_groups(path, group)
    sources: list[Source] = [FolderPerClass.at(path, classes, group=group)] if path.is_dir() else []
    if parquet := _parquet_files(path):
        sources.append(ParquetFiles.at(parquet, classes))
    found = [source for source in sources if source.pictures]
    if len(found) > 1:
        raise DataError(f"{path} holds folders of images and parquet files; keep one of the two there")
    return found
