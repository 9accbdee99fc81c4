"""Text for people: cleaning, counts, and bounds rounded to a few digits."""

import difflib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

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


def suggestion(name: str, valid: Iterable[str], most: int = 1, otherwise: str = "") -> str:
    """Return `; did you mean ...?` with the most similar valid names.

    Args:
        name: that is invalid.
        valid: names.
        most: largest number of names.
        otherwise: if none is similar, this with the nearest ones in place of `{}`.

    Examples:
        >>> suggestion("num_round", ["num-rounds", "seed"]), suggestion("x", ["seed"])
        ("; did you mean 'num-rounds'?", '')
    """
    name, valid = name.replace("_", "-"), sorted(valid)
    close = [*map(repr, difflib.get_close_matches(name, valid, most))]
    if not close:
        return otherwise.format(", ".join(map(repr, difflib.get_close_matches(name, valid, most, cutoff=0.0))))
    return f"; did you mean {close[0]}?" + f" (or {' or '.join(close[1:])})" * bool(close[1:])


def spanned(low: object, high: object) -> str:
    """Return `low to high`, or one of them if they are equal."""
    return str(low) if low == high else f"{low} to {high}"


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


def first_of(names: Sequence[str], most: int) -> str:
    """List names, and count those beyond a number.

    Args:
        names: in their order.
        most: largest number of listed names, above 0.

    Examples:
        >>> first_of(["a", "b", "c"], 2), first_of(["a"], 2)
        ('a, b and 1 more', 'a')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def at_most(value: float | None, digits: int = 4) -> str:
    """Format an upper bound (ε, δ, leakage, spent budget), rounded up.

    Args:
        value: the bound; None: there is none.
        digits: significant digits, from 1 to 9.

    Examples:
        >>> at_most(1.23401), at_most(8.0), at_most(9.99991), at_most(1e-5)
        ('1.235', '8', '10', '1e-05')
    """
    return _rounded(math.inf if value is None else value, digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """Format a lower bound (a noise multiplier, a remaining budget), rounded down.

    Args:
        value: the bound.
        digits: significant digits, from 1 to 9.

    Examples:
        >>> at_least(0.89449), at_least(1.0)
        ('0.8944', '1')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def rounded_up(value: float, digits: int = 4) -> float:
    """Round a positive number up, such as a calibrated noise multiplier.

    Args:
        value: positive.
        digits: significant digits.

    Examples:
        >>> rounded_up(0.123401), rounded_up(0.1)
        (0.1235, 0.1)
    """
    return float(Context(digits, ROUND_CEILING).create_decimal(repr(float(value))))


def percent_at_least(share: float) -> str:
    """Format a lower bound on a share (a confidence) in percent, rounded down.

    Args:
        share: from 0 to 1.

    Examples:
        >>> percent_at_least(0.95), percent_at_least(0.99961)
        ('95 %', '99.9 %')
    """
    return f"{at_least(100 * share, 3)} %"


def _rounded(value: float, digits: int, rounding: str) -> str:
    """Round by the first nine digits.

    Later digits come from the rounding of floats and grids. So 0.1 prints as 0.1.
    """
    if not math.isfinite(value):
        return f"{value:g}"
    shown = f"{value:.9g}"
    return f"{float(Context(digits, rounding).create_decimal(shown)):.{digits}g}"
