"""Text that came from elsewhere, made fit for a terminal or a page, and numbers of things in words."""

import re
import sys

import numpy as np
from numpy.typing import NDArray

_PART = re.compile(r"[^_\-/. ]*[_\-/. ]+|[^_\-/. ]+")


def clean(text: str) -> str:
    """The text with whatever cannot be printed (control characters, halves of characters) replaced by a sign for it."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def only_text(array: NDArray[np.str_]) -> NDArray[np.str_]:
    """The same, but empty where a number in a cell is no character: Python would refuse all cells for the one.

    Args:
        array: of text, of any shape; a file may hold any four bytes as a character.
    """
    if not array.dtype.itemsize:
        return array
    numbers = np.ascontiguousarray(array)[..., None].view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    return np.where((numbers > sys.maxunicode).any(axis=-1), "", array)


def parts(name: str) -> list[str]:
    """A name in the parts between which a line may end: behind a space and the signs that join words."""
    return _PART.findall(name)


def counted(number: int, noun: str) -> str:
    """So many things.

    Args:
        number: ≥ 0.
        noun: of one of them; its plural ends in s.

    Examples:
        >>> counted(1, "round"), counted(0, "round")
        ('1 round', '0 rounds')
    """
    return f"{number} {noun}{'s' * (number != 1)}"
