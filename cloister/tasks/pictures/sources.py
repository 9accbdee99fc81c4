"""Images in a folder per class or in parquet files.

A parquet file has the layout of Hugging Face image datasets: a column `image` with encoded bytes, and `label`.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.columns import LONGEST
from cloister.tasks.pictures.decode import DIRECTORY, MAX_BYTES, content_of, is_image
from cloister.tasks.pictures.form import Unreadable
from cloister.tasks.pictures.medical import is_dicom, patient_of
from cloister.utils.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Array, DataType, Scalar
    from pyarrow.parquet import ParquetFile


Part = Literal["train", "test", ""]
"""Half of a published split that an image is in; empty: there is no split."""
PARTS: dict[str, Part] = {"train": "train", "test": "test"}
"""Folders above the class folders, by their names in lower case."""
PART = re.compile(r"(train|test)(?![a-z])")
"""Prefix of the name of a file of a split."""
NAMED = 5
"""Largest number of folders that an error names."""
MAX_LABEL_DIGITS, MAX_LABEL_LETTERS = 9, 200
"""Largest number of digits of a numeric label, and of bytes of a label in text. A longer label is not a class."""
IMAGES_AT_ONCE, LABELS_AT_ONCE = 64, 2**16
"""Number of images, and of labels, read at once."""
MAX_IMAGE_BYTES, MAX_LABEL_BYTES = 2**29, 2**26
"""Largest uncompressed size in bytes of the image column, and of the label column, of one row group.
Larger row groups are not read: reading takes a few times as much memory.
"""
PATIENT = "PatientID"
"""The patient's number in the header of a DICOM file: the name of its groups."""
logger = logging.getLogger("cloister.tasks")


@dataclass(frozen=True)
class Picture:
    """One image that is not decoded yet.

    Attributes:
        name: for a message, relative to the folder of its source.
        label: the number of its class; -1: no class.
        part: of the published split.
        group: name of the group of the run's `task.group`, such as a patient; empty: no group, or not known.
        fault: reason why it cannot be used, known before it is decoded; empty: none.
    """

    name: str
    label: int
    part: Part
    group: str = ""
    fault: str = ""


class Source(Protocol):
    """Images in the files of one folder, in an order that depends only on the names of the files."""

    @property
    def root(self) -> Path:
        """Folder of the files."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """All files that the images are read from."""
        ...

    @property
    def pictures(self) -> Sequence[Picture]:
        """Metadata of the images."""
        ...

    def contents(self) -> Iterator[bytes]:
        """Yield the encoded images, in the order of `pictures`.

        An unreadable image gives empty bytes.

        Raises:
            DataError: a file of many images cannot be read.
        """
        ...


def labels_of(source: Source) -> NDArray[np.int64]:
    """Return the class of each image, shape (n,)."""
    return np.array([picture.label for picture in source.pictures], np.int64)


def class_named(name: str, classes: Sequence[str]) -> int | None:
    """Return the number of the class with this name.

    Case, spaces and punctuation are ignored.

    Args:
        name: of a folder, or from a file.
        classes: the task's own names, in the task's order.

    Returns:
        None if the name matches no class.
    """
    plain = [_letters(known) for known in classes]
    return plain.index(_letters(name)) if _letters(name) in plain else None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@dataclass(frozen=True)
class FolderPerClass:
    """`Source` of one image per file.

    Attributes:
        root: the folder above the class folders, or above `train` and `test`.
        files: of the images.
        pictures: in the order of `files`.
        stray: names, below the root, of files that are left out: no images, or outside of class folders.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]
    stray: tuple[str, ...] = ()

    @classmethod
    def at(cls, root: Path, classes: Sequence[str], tolerant: bool = False, group: str = "") -> "FolderPerClass":
        """Find the images in the class folders, which may be below `train` and `test`.

        Args:
            root: see above.
            classes: the task's names, in its order.
            tolerant: leave out images in folders of no class.
            group: name of the groups; empty: each image is a group. DICOM files have `PATIENT`.

        Raises:
            DataError: beside class folders there is a folder with images whose name matches no class.
        """
        folders: list[tuple[Path, int, Part]] = []
        others: list[Path] = []
        for folder in folders_in(root):
            # The folders inside `train` and `test` replace these two.
            part = PARTS.get(folder.name.lower(), "")
            for inner in folders_in(folder) if part else [folder]:
                label = class_named(inner.name, classes)
                if label is not None:
                    folders.append((inner, label, part))
                elif any(map(is_image, _entries(inner))):
                    others.append(inner)
        if folders and others and not tolerant:
            name = others[0].relative_to(root)
            raise DataError(f"{root}: the folder {name} holds images and is named like no class: {', '.join(classes)}")
        files, pictures = list[Path](), list[Picture]()
        for folder, number, half in folders:
            for path in files_below(folder):
                if is_image(path):
                    files.append(path)
                    patient, fault = patient_in(path) if group else ("", "")
                    pictures.append(Picture(path.relative_to(root).as_posix(), number, half, patient, fault))
        return cls(root, tuple(files), tuple(pictures), left_out(root, set(files)) if files else ())

    def contents(self) -> Iterator[bytes]:
        """Yield the contents of the files, in order."""
        return map(content_of, self.files)


def patient_in(path: Path) -> tuple[str, str]:
    """Return the PatientID of a DICOM file, and the reason why there is none; both are empty for an unreadable file."""
    content = content_of(path)
    if content and not is_dicom(content):
        return "", f"has no {PATIENT}, as only DICOM files have"
    try:
        patient = patient_of(content) if content else ""
    except Unreadable as reason:
        return "", str(reason)
    if is_group(patient):
        return patient, ""
    return "", f"has no {PATIENT} of 1 to {LONGEST} characters" if content else ""


def is_group(name: str) -> bool:
    """Return whether a text is the name of a group: it has 1 to `LONGEST` characters.

    The names of all images are in one array, where each takes the room of the longest.
    """
    return 0 < len(name) <= LONGEST


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, by name.

    Links to folders are skipped: if the target is here too, its images would count twice.
    """
    return [path for path in _entries(folder) if _is_folder(path) and not path.name.startswith(".")]


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, by name.

    If the folder is unreadable, log this and return an empty list. This module uses `os.path` to test paths: `Path`
    raises for one behind an inaccessible link.
    """
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        logger.warning("%s cannot be read (%s); what is in it is left out", error.filename, error.strerror)
        return []


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder and all its subfolders, and links to files."""
    return [path for path in _leaves_below(folder) if not os.path.isdir(path)]


def _leaves_below(folder: Path) -> list[Path]:
    """Return the files in a folder and all its subfolders, and links to files or folders."""
    found, left = [], [folder]
    while left:
        entries = _entries(left.pop())
        left += filter(_is_folder, entries)
        found += [path for path in entries if not _is_folder(path)]
    return sorted(found)


def left_out(root: Path, used: Collection[Path]) -> tuple[str, ...]:
    """Return the names, below a folder, of visible files that are not used, and of links to folders.

    The user may expect them to be used: they have no label, or another suffix than images.
    """
    names = [path.relative_to(root) for path in _leaves_below(root) if path not in used]
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return tuple(name.as_posix() for name in visible if name.name.upper() != DIRECTORY)


@dataclass(frozen=True)
class ParquetFiles:
    """`Source` of many images per file.

    Attributes:
        root: the folder of the files.
        files: by name.
        pictures: in the order of `files` and of their rows.
        rows: number of labels of each file.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]
    rows: tuple[int, ...]

    @classmethod
    def at(cls, files: Sequence[Path], classes: Sequence[str]) -> "ParquetFiles":
        """Find the images in one or more parquet files of one folder.

        Args:
            files: in the order of the images.
            classes: the task's names, in its order. If a file names its labels, those names decide. Otherwise a label
                is the number of a class.

        Raises:
            DataError: pyarrow is not installed, or a file lacks the columns, or names another class.
        """
        labels, pictures = [_labels(path, classes) for path in files], list[Picture]()
        for path, found in zip(files, labels):
            match = PART.match(path.name.lower())
            part = cast(Part, match[1]) if match else ""
            pictures += [Picture(f"{path.name} row {row}", int(label), part) for row, label in enumerate(found)]
        return cls(files[0].parent, tuple(files), tuple(pictures), tuple(map(len, labels)))

    def contents(self) -> Iterator[bytes]:
        """Yield one image per label.

        After a read error in a file, its further images are empty. Other files are read.
        """
        for path, rows in zip(self.files, self.rows):
            yield from islice(chain(_images(path), repeat(b"")), rows)


def _images(path: Path) -> Iterator[bytes]:
    """Yield the images of a file, up to the first error: pyarrow raises many types."""
    with suppress(Exception):
        file = _opened(path)
        # The file name beside the bytes is not needed, and may not be valid text.
        column = "image.bytes" if _has_bytes(file.schema_arrow.field("image").type) else "image"
        for number in range(file.num_row_groups):
            if (size := _size(file, number, "image")) > MAX_IMAGE_BYTES:
                yield from repeat(b"", file.metadata.row_group(number).num_rows)
                continue
            for cells in _batches(file, number, column, min(IMAGES_AT_ONCE, MAX_IMAGE_BYTES // size)):
                yield from map(_bytes, cells.field("bytes") if _has_bytes(cells.type) else cells)


def _size(file: "ParquetFile", number: int, name: str) -> int:
    """Return the bytes of a column of a row group, at least 1.

    With a dictionary, many rows may share one stored cell.
    """
    group = file.metadata.row_group(number)
    columns = [group.column(each) for each in range(group.num_columns)]
    return 1 + sum(each.total_uncompressed_size for each in columns if each.path_in_schema.startswith(name))


def _batches(file: "ParquetFile", number: int, column: str, rows: int) -> Iterator["Array"]:
    """Yield the cells of a column of a row group, as arrays of at most `rows` rows."""
    for batch in file.iter_batches(max(1, rows), row_groups=[number], columns=[column]):
        yield batch.column(0)


def _has_bytes(kind: "DataType") -> bool:
    """Return whether cells are `{"bytes": ..., "path": ...}` instead of plain bytes."""
    from pyarrow import types

    return bool(types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _bytes(cell: "Scalar") -> bytes:
    """Return the bytes in a cell; none for another type, or above `MAX_BYTES`."""
    if hasattr(cell, "as_buffer") and cell.is_valid and cell.as_buffer().size > MAX_BYTES:
        return b""
    content = cell.as_py()
    return content if isinstance(content, bytes) else b""


def _opened(path: Path) -> "ParquetFile":
    try:
        from pyarrow import parquet
    except ImportError:
        remedy = "pip install 'cloister-fl[parquet]'"
        raise DataError(f"{path} is a parquet file, which needs pyarrow to be read: {remedy}") from None
    try:
        return parquet.ParquetFile(path)
    except Exception:  # pyarrow raises many types
        raise _unreadable(path) from None


def _unreadable(path: Path) -> DataError:
    return DataError(f"{path} must be a parquet file with the columns image (the bytes of files) and label (integers)")


def _labels(path: Path, classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the class of each row, shape (n,); -1 for a label that is no class.

    If the file's Hugging Face metadata names the labels, their numbers are mapped to the task's by name.
    """
    file = _opened(path)
    from pyarrow import types

    classified: list[int] = []
    try:
        for number in range(file.num_row_groups):
            if (size := _size(file, number, "label")) > MAX_LABEL_BYTES:
                raise ValueError("labels are too long")
            for cells in _batches(file, number, "label", min(LABELS_AT_ONCE, MAX_LABEL_BYTES // size)):
                kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
                is_text = types.is_string(kind) or types.is_large_string(kind)
                values = (cells.cast("binary") if is_text else cells).to_pylist()
                classified += [_number(value, classes) for value in values]
        file.schema_arrow.field("image")
    except Exception:  # as above
        raise _unreadable(path) from None
    labels = np.array(classified, np.int64)
    try:
        found = json.loads((file.schema_arrow.metadata or {})[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return labels
    if not isinstance(found, list):
        return labels
    names = [str(name) for name in found]
    numbers = [class_named(name, classes) for name in names]
    if None in numbers:
        unknown = names[numbers.index(None)]
        raise DataError(f"{path} names a class {unknown!r}; the task's classes are {', '.join(classes)}")
    known = (labels >= 0) & (labels < len(names))
    return np.where(known, np.array([*numbers, -1], np.int64)[np.where(known, labels, -1)], -1)


def _number(value: object, classes: Sequence[str]) -> int:
    """Return the class number of a label.

    The label is a whole number or the name of a class; another label gives -1.
    """
    if isinstance(value, float):
        value = int(value) if value.is_integer() else -1
    if isinstance(value, bytes) and len(value) <= MAX_LABEL_LETTERS:
        text = value.decode("utf-8", "replace").strip()
        value = int(text) if text.isdecimal() and len(text) < MAX_LABEL_DIGITS else class_named(text, classes)
    return value if isinstance(value, int) and abs(value) < 10**MAX_LABEL_DIGITS else -1
