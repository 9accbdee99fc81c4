"""Cleaning of foreign text for a terminal or a page, and formatting of counts."""

import re
import sys

import numpy as np
from numpy.typing import NDArray

_PART = re.compile(r"[^_\-/. ]*[_\-/. ]+|[^_\-/. ]+")


def clean(text: str) -> str:
    """Replace unprintable characters, such as controls and surrogates, by U+FFFD."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def only_text(array: NDArray[np.str_]) -> NDArray[np.str_]:
    """Empty the cells with an invalid code point.

    Python would otherwise refuse the whole array.

    Args:
        array: of text, of any shape; a file may contain any four bytes as a character.
    """
    if not array.dtype.itemsize:
        return array
    numbers = np.ascontiguousarray(array)[..., None].view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    return np.where((numbers > sys.maxunicode).any(axis=-1), "", array)


def parts(name: str) -> list[str]:
    """Split a name after spaces and `_-/.`, where a line may break."""
    return _PART.findall(name)


def counted(number: int, noun: str) -> str:
    """Format a number of things.

    Args:
        number: ≥ 0.
        noun: of one of them; its plural ends in s.

    Examples:
        >>> counted(1, "round"), counted(0, "round")
        ('1 round', '0 rounds')
    """
    return f"{number} {noun}{'s' * (number != 1)}"
