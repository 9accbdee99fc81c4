"""Images in a folder of any structure, whose labels are in a table beside them: `labels.csv`.

| columns | each example |
|---|---|
| `file`, `label` | a row: the file, relative to the table, and its class |
| `PatientID`, `label` | a DICOM file below the table's folder, with the class of its patient |

`part` (train or test) is optional. Any further column may be the run's `task.group`. Each example depends on its own
row and its own file alone, or with `PatientID` on the rows and files of its patient: otherwise one row more would
change another patient's examples.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cloister.tasks.columns import LONGEST
from cloister.tasks.csv_files import read_rows, refuse_names
from cloister.tasks.labels import classes_of
from cloister.tasks.pictures.decode import content_of, is_image
from cloister.tasks.pictures.sources import (
    PARTS,
    PATIENT,
    Part,
    Picture,
    class_named,
    files_below,
    is_group,
    left_out,
    patient_in,
)
from cloister.utils.errors import DataError

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
