"""What is known of images before they are decoded."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Part = Literal["train", "test", ""]
"""Which half of a published split an image is in; empty: there is no split."""


@dataclass(frozen=True)
class Picture:
    """One image that is not decoded yet.

    Attributes:
        name: for a message, within the folder of its source.
        label: the number of its class; -1: of none.
        part: of the split that it came in.
    """

    name: str
    label: int
    part: Part


class Source(Protocol):
    """Images in the files of one folder, in an order that depends on the names of the files alone."""

    @property
    def root(self) -> Path:
        """That folder."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """All that would have to change for the images to change."""
        ...

    @property
    def pictures(self) -> Sequence[Picture]:
        """The images."""
        ...

    def contents(self) -> Iterator[bytes]:
        """The encoded images, in the order of `pictures`; no bytes for one that cannot be read.

        Raises:
            DataError: a file that holds many images cannot be read.
        """
        ...


def labels_of(source: Source) -> NDArray[np.int64]:
    """The class of each image, shape (n,)."""
    return np.array([picture.label for picture in source.pictures], np.int64)


def class_named(name: str, classes: Sequence[str]) -> int | None:
    """The number of the class that a name means, whatever its case and whatever stands between its words.

    Args:
        name: of a folder, or from a file.
        classes: the task's own names, in the task's order.

    Returns:
        None where it means none of them.
    """
    plain = [_letters(known) for known in classes]
    return plain.index(_letters(name)) if _letters(name) in plain else None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
