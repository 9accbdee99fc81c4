"""Images at a path in any layout: a folder per class, a table of labels, or parquet files.

The table of labels, `labels.csv`, is beside images in a folder of any structure.

| columns | each example |
|---|---|
| `file`, `label` | a row: the file, relative to the table, and its class |
| `PatientID`, `label` | a DICOM file below the table's folder, with the class of its patient |

`part` (train or test) is optional. Any further column may be the run's `task.group`. Each example depends on its own
row and its own file alone, or with `PatientID` on the rows and files of its patient: otherwise one row more would
change another patient's examples.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloister.tasks.columns import LONGEST
from cloister.tasks.csv_files import read_rows, refuse_names
from cloister.tasks.labels import classes_of
from cloister.tasks.pictures.decode import content_of, is_image
from cloister.tasks.pictures.sources import (
    NAMED,
    PARTS,
    PATIENT,
    FolderPerClass,
    ParquetFiles,
    Part,
    Picture,
    Source,
    class_named,
    files_below,
    folders_in,
    is_group,
    left_out,
    patient_in,
)
from cloister.utils.errors import DataError
from cloister.utils.text import first_of

logger = logging.getLogger("cloister.tasks")
TABLE = "labels.csv"
FILE, LABEL, PART = "file", "label", "part"
"""Names of columns."""
LONGEST_CELL = 2000
"""Largest number of characters of a cell; a longer one counts as empty."""
ABSENT = ".absent"
"""Name in place of one that does not lead to a file in the table's folder. It is hidden, and never exists."""
Row = Mapping[str, str]
"""Cells of a row, by the names of the columns."""


@dataclass(frozen=True)
class LabelledFiles:
    """`Source` of the files that a table labels.

    Attributes:
        root: the folder of the table.
        files: of the images.
        pictures: in the order of `files`.
        stray: names, below the root, of files that are left out.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]
    stray: tuple[str, ...] = ()

    @classmethod
    def at(cls, table: Path, classes: Sequence[str], group: str, needs_label: bool = True) -> "LabelledFiles":
        """Find the images of a table.

        Args:
            table: path of the CSV file, in any dialect of `csv_files`.
            classes: the task's names, in its order.
            group: name of the column of groups, or `PATIENT` of DICOM files; empty: each image is a group.
            needs_label: whether an image without a label is at fault.

        Raises:
            DataError: the file is no table, lacks a column, or has one of them twice.
        """
        try:
            found_rows = read_rows(table, (FILE, PATIENT, LABEL))
            columns = found_rows.names
            refuse_names(table, columns, [name for name in columns if name])
        except DataError as error:
            raise error.of("") from None
        rows = [
            {name: cell if len(cell) <= LONGEST_CELL else "" for name, cell in zip(columns, row, strict=True)}
            if row
            else {}
            for row in found_rows.rows
        ]
        by_file = FILE in columns
        if (needs_label and LABEL not in columns) or not (by_file or PATIENT in columns):
            raise DataError(
                f"{table} must have a header with the columns {FILE} or {PATIENT}, and {LABEL}; found "
                f"{', '.join(columns) or 'no header'}"
            )
        # Rows of one patient decide each other's labels: by patient, no other groups are possible.
        groups = (*columns, PATIENT) if by_file else (PATIENT,)
        if group and group not in groups:
            raise DataError(
                f"task.group = {group!r} is none of the groups of {table}: {', '.join(dict.fromkeys(groups))}"
            )
        if by_file:
            found = _by_file(table.parent, rows, classes, group, needs_label)
        else:
            found = _by_patient(table.parent, rows, classes, needs_label)
        files, pictures = (tuple(part) for part in zip(*found, strict=True)) if found else ((), ())
        return cls(table.parent, files, pictures, left_out(table.parent, {*files, table}))

    def contents(self) -> Iterator[bytes]:
        """Yield the contents of the files, in order."""
        return map(content_of, self.files)


def _by_file(
    root: Path, rows: Sequence[Row], classes: Sequence[str], group: str, needs_label: bool
) -> list[tuple[Path, Picture]]:
    """Return an image for each row."""
    found = []
    for number, row in enumerate(rows, 1):
        name = PurePosixPath(row.get(FILE, "").replace("\\", "/"))
        is_inside = name.parts and not name.is_absolute() and ".." not in name.parts and "\0" not in str(name)
        path = root / name if is_inside else root / ABSENT
        label, fault = _label(row, classes), ""
        if not row:
            fault = "is a row with another number of cells than the header"
        elif needs_label and not 0 <= label < len(classes):
            fault = f"has a {LABEL} that is no class: {', '.join(classes)}"
        whose = row.get(group, "")
        if group and not is_group(whose):
            why = fault or f"has no cell of 1 to {LONGEST} characters in the column {group}"
            whose, fault = patient_in(path) if group == PATIENT and not fault else ("", why)
        place = f"{path.relative_to(root).as_posix()} (row {number} of the table)"
        found.append((path, Picture(place, label, _part(row), whose, fault)))
    return found


def _by_patient(
    root: Path, rows: Sequence[Row], classes: Sequence[str], needs_label: bool
) -> list[tuple[Path, Picture]]:
    """Return an image for each DICOM file, which has the label of its patient's rows."""
    of_patient: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_patient[row.get(PATIENT, "")].append(row)
    found = []
    for path in files_below(root):
        if not is_image(path):
            continue
        patient, fault = patient_in(path)
        own = of_patient.get(patient, []) if patient else []
        labels = {_label(row, classes) for row in own}
        label = labels.pop() if len(labels) == 1 else -1
        if not fault and not own:
            fault = f"is of a {PATIENT} without a row in the table"
        elif not fault and not 0 <= label < len(classes):
            fault = f"is of a {PATIENT} with several labels, or with one that is no class: {', '.join(classes)}"
        name, part = path.relative_to(root).as_posix(), _part(own[0] if own else {})
        found.append((path, Picture(name, label, part, patient, fault if needs_label else "")))
    return found


def _label(row: Row, classes: Sequence[str]) -> int:
    """Return the class of a row, by its name or number; -1: no class."""
    label = class_named(cell := row.get(LABEL, ""), classes)
    return int(classes_of([cell], len(classes), tuple(classes))[0]) if label is None else label


def _part(row: Row) -> Part:
    return PARTS.get(row.get(PART, "").lower(), "")


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
