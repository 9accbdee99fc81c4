"""Parquet files in the layout of Hugging Face image datasets: a column `image` with encoded bytes, and `label`."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.pictures.formats import MAX_BYTES
from cloister.tasks.pictures.picture import Part, Picture, class_named

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

PART = re.compile(r"(train|test)(?![a-z])")
"""Prefix of the name of a file of a split."""
MAX_LABEL_DIGITS, MAX_LABEL_LETTERS = 9, 200
"""Largest number of digits of a numeric label, and of bytes of a label in text. A longer label is not a class."""
IMAGES_AT_ONCE, LABELS_AT_ONCE = 64, 2**16
"""Number of images, and of labels, read at once."""
MAX_IMAGE_BYTES, MAX_LABEL_BYTES = 2**29, 2**26
"""Largest uncompressed size in bytes of the image column, and of the label column, of one row group.
Larger row groups are not read: reading takes a few times as much memory.
"""


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


def _batches(file: "ParquetFile", number: int, column: str, rows: int) -> Iterator[Any]:
    """Yield the cells of a column of a row group, as arrays of at most `rows` rows."""
    for batch in file.iter_batches(max(1, rows), row_groups=[number], columns=[column]):
        yield batch.column(0)


def _has_bytes(kind: Any) -> bool:
    """Return whether cells are `{"bytes": ..., "path": ...}` instead of plain bytes."""
    from pyarrow import types

    return bool(types.is_struct(kind)) and kind.get_field_index("bytes") >= 0


def _bytes(cell: Any) -> bytes:
    """Return the bytes in a cell; none for another type, or above `MAX_BYTES`."""
    if hasattr(cell, "as_buffer") and cell.is_valid and cell.as_buffer().size > MAX_BYTES:
        return b""
    content = cell.as_py()
    return content if isinstance(content, bytes) else b""


def _opened(path: Path) -> "ParquetFile":
    try:
        from pyarrow import parquet
    except ImportError:
        remedy = "pip install 'cloister[parquet]'"
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
    try:
        labels = np.array([_number(value, classes) for value in _label_cells(file)], np.int64)
        file.schema_arrow.field("image")
    except Exception:  # as above
        raise _unreadable(path) from None
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


def _label_cells(file: "ParquetFile") -> Iterator[object]:
    """Yield the values of the column `label`, text as bytes.

    Raises:
        ValueError: the labels of a row group exceed `MAX_LABEL_BYTES`.
    """
    from pyarrow import types

    for number in range(file.num_row_groups):
        if (size := _size(file, number, "label")) > MAX_LABEL_BYTES:
            raise ValueError("labels are too long")
        for cells in _batches(file, number, "label", min(LABELS_AT_ONCE, MAX_LABEL_BYTES // size)):
            kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
            is_text = types.is_string(kind) or types.is_large_string(kind)
            yield from (cells.cast("binary") if is_text else cells).to_pylist()


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
