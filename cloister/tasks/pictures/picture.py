"""Metadata of images that are not decoded yet."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Part = Literal["train", "test", ""]
"""Half of a published split that an image is in; empty: there is no split."""


@dataclass(frozen=True)
class Picture:
    """One image that is not decoded yet.

    Attributes:
        name: for a message, relative to the folder of its source.
        label: the number of its class; -1: no class.
        part: of the published split.
    """

    name: str
    label: int
    part: Part


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
