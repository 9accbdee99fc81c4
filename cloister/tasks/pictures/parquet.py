"""Parquet files as Hugging Face publishes sets of images: a column `image` with the bytes of files, and `label`."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.tasks.pictures.picture import Part, Picture, class_named

PART = re.compile(r"(train|test)(?![a-z])")
"""What the name of a file of a split begins with."""
DIGITS = 9
"""Of a label: one of more is none."""
ROWS = 64
"""Read at once: a few megabytes."""


@dataclass(frozen=True)
class ParquetFiles:
    """A `Source` of many images a file.

    Attributes:
        root: the folder of the files.
        files: by name.
        pictures: in the order of `files` and of their rows.
    """

    root: Path
    files: tuple[Path, ...]
    pictures: tuple[Picture, ...]

    @classmethod
    def at(cls, files: Sequence[Path], classes: Sequence[str]) -> "ParquetFiles":
        """The images in these files, one or more, of one folder.

        Args:
            files: in the order to take them in.
            classes: the task's names, in its order. Where a file names its labels, those names decide; where it does
                not, a label is the number of a class.

        Raises:
            DataError: pyarrow is not installed, or a file has no such columns, or names another class.
        """
        pictures = tuple(
            Picture(f"{path.name} row {row}", int(label), _part(path))
            for path in files
            for row, label in enumerate(_labels(path, classes))
        )
        return cls(files[0].parent, tuple(files), pictures)

    def contents(self) -> Iterator[bytes]:
        """The images, row by row; no bytes from where on a file cannot be read: it says nothing of the other files."""
        for path in self.files:
            file = _opened(path)
            left = file.metadata.num_rows
            with suppress(ValueError, OSError):
                # The name of a file beside its bytes is not needed, and may be no text.
                column = "image.bytes" if "bytes" in str(file.schema_arrow.field("image").type) else "image"
                for rows in file.iter_batches(ROWS, columns=[column]):
                    yield from map(_bytes, rows.column(0).to_pylist())
                    left -= len(rows)
            yield from repeat(b"", left)


def _part(path: Path) -> Part:
    found = PART.match(path.name.lower())
    return cast(Part, found[1]) if found else ""


def _bytes(image: object) -> bytes:
    """What a cell holds: `{"bytes": ..., "path": ...}`, or the bytes alone."""
    content = image.get("bytes") if isinstance(image, dict) else image
    return content if isinstance(content, bytes) else b""


def _opened(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        remedy = "pip install 'cloister[parquet]'"
        raise DataError(f"{path} is a parquet file, which needs pyarrow to be read: {remedy}") from None
    try:
        return parquet.ParquetFile(path)
    except (ValueError, OSError):
        raise _unreadable(path) from None


def _unreadable(path: Path) -> DataError:
    return DataError(f"{path} must be a parquet file with the columns image (the bytes of files) and label (integers)")


def _labels(path: Path, classes: Sequence[str]) -> NDArray[np.int64]:
    """The class of each row, shape (n,); -1 where there is none."""
    file = _opened(path)
    try:
        column = file.read(columns=["label"]).column("label")
        values = column.cast("binary") if _is_text(column.type) else column
        labels = np.array([_number(value, classes) for value in values.to_pylist()], np.int64)
        file.schema_arrow.field("image")
    except (ValueError, OSError, KeyError):
        raise _unreadable(path) from None
    names = _names(file.schema_arrow.metadata or {})
    return labels if names is None else _numbered(labels, names, classes, path)


def _is_text(kind: Any) -> bool:
    """Whether a column holds text, in whatever way it is stored."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _number(value: object, classes: Sequence[str]) -> int:
    """A label by itself: a whole number, or the name of a class; -1 where it is neither."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else -1
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace").strip()
        value = int(text) if text.isdecimal() and len(text) < DIGITS else class_named(text, classes)
    return value if isinstance(value, int) and abs(value) < 10**DIGITS else -1


def _names(metadata: dict[bytes, bytes]) -> list[str] | None:
    """What the labels mean, where the file says it."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _numbered(labels: NDArray[np.int64], names: list[str], classes: Sequence[str], path: Path) -> NDArray[np.int64]:
    """Labels as the task numbers its classes."""
    numbers = [class_named(name, classes) for name in names]
    if None in numbers:
        unknown = names[numbers.index(None)]
        raise DataError(f"{path} names a class {unknown!r}; the task's classes are {', '.join(classes)}")
    known = (labels >= 0) & (labels < len(names))
    return np.where(known, np.array([*numbers, -1], np.int64)[np.where(known, labels, -1)], -1)
