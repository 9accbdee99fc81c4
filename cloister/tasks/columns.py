"""Kinds of columns of a table, and the inputs of a model that each becomes.

No kind computes anything from the rows of a file: no mean, no range, no vocabulary. All that it needs is stated in the
task. Statistics of a site's own rows would give a number another meaning at each site. Under DP-SGD they would also
break the guarantee: one person's row would change the inputs of all other rows.
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.csv_files import number_of

MISSING = ("", "?", "na", "n/a", "nan", "null", ".")
"""Texts of missing values, in small letters."""
MARKS = ("none", "-")
"""Further texts of missing numbers and dates. Among words they are words: `none` may be a grade, or a class."""
LONGEST = 200
"""Largest number of characters of a cell."""
WHOLE = re.compile(r"([-+]?)0*(\d{1,15})(?:\.0*)?")
NO_NUMBER = "must hold numbers only"
NOT_FINITE = "has empty or infinite cells"

Features = tuple[NDArray[np.floating], list[str]]
"""Inputs of shape (n, width), and for each row the reason why its cell is unusable; empty: it is usable."""


class Column(Protocol):
    """A kind of columns. Each cell is judged by itself."""

    @property
    def width(self) -> int:
        """Return the number of inputs of one cell."""
        ...

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return the inputs for cells.

        Args:
            cells: n of them, without blanks around them.
            missing: texts of missing values in all columns, as `plain` spells them.
        """
        ...


def is_absent(cell: str, missing: Collection[str]) -> bool:
    """Return whether the cell of a number or a date holds a missing value.

    Args:
        cell: without blanks around it.
        missing: texts of missing values as `plain` spells them, beside `MARKS`.
    """
    text = plain(cell) if len(cell) <= LONGEST else cell
    return text in missing or text in MARKS


def spelt(name: str) -> str:
    """Return the one spelling of a name: composed characters and single blanks.

    A name beyond `LONGEST` counts as empty: it could take an hour to normalise.
    """
    return " ".join(unicodedata.normalize("NFC", name).split()) if len(name) <= LONGEST else ""


def plain(cell: str) -> str:
    """Return the one spelling of a category: that of a name in small letters, and `1` for `1.0`."""
    if len(cell) <= LONGEST and (whole := WHOLE.fullmatch(cell)):
        return whole[1].removeprefix("+") + whole[2]
    return spelt(cell).casefold()


def _of(column: "Number | Category | Hashed | Date", missing: Collection[str]) -> frozenset[str]:
    """Return the texts of missing values in a column: those of all columns, and its own."""
    return frozenset(missing).union(map(plain, column.missing))


@dataclass(frozen=True)
class Number:
    """Numbers. They become a share of a public range, and whether the value is missing.

    A number outside the range makes its row useless, unless `missing` has it: it is a mistake, or a code such as 999.

    Attributes:
        low, high: smallest and largest value that is possible.
        usual: stands in for a missing value; None: the middle of the range.
        needed: whether every row must have the number. Then there is no input for a missing value.
        tolerance: share of the range by which a value may exceed it, as published ranges are rounded.
        missing: further texts of missing values, of this column alone, such as `("-9",)`; in any case.
    """

    low: float
    high: float
    usual: float | None = None
    needed: bool = False
    tolerance: float = 0.0
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"Number({self.low}, {self.high}): the first must be below the second")

    @property
    def width(self) -> int:
        """Return 1 for a needed number, else 2."""
        return 1 if self.needed else 2

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return shares of the range, and indicators of missing values."""
        numbers = np.array([number_of(cell) for cell in cells], np.float64)
        missing = _of(self, missing)
        absent = np.array([is_absent(cell, missing) for cell in cells], bool)
        slack, outside = (
            self.tolerance * (self.high - self.low),
            f"must hold numbers from {self.low:g} to {self.high:g}",
        )
        with np.errstate(invalid="ignore"):
            beyond = (numbers < self.low - slack) | (numbers > self.high + slack)
        reasons = [""] * len(cells)
        for row in np.flatnonzero(~np.isfinite(numbers) | beyond | absent).tolist():
            if absent[row]:
                reasons[row] = "" if not self.needed else NO_NUMBER if cells[row] else NOT_FINITE
            elif np.isnan(numbers[row]):
                reasons[row] = NO_NUMBER
            else:
                reasons[row] = outside if np.isfinite(numbers[row]) else NOT_FINITE
        filled = np.where(absent, self.middle, numbers)
        with np.errstate(over="ignore", invalid="ignore"):
            shares = (filled - self.low) / (self.high - self.low)
        return (shares[:, None] if self.needed else np.stack([shares, absent], axis=1)), reasons

    @property
    def middle(self) -> float:
        """Return what stands in for a missing value."""
        return (self.low + self.high) / 2 if self.usual is None else self.usual


@dataclass(frozen=True)
class Category:
    """Words or codes of a public list. Each has an input; so have all others together, and a missing value.

    Attributes:
        texts: the list, such as `("female", "male")`. Case and blanks do not count, and `1.0` is `1`.
        missing: further texts of missing values, of this column alone, such as `("-9",)`; in any case.
    """

    texts: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return the length of the list, and two."""
        return len(self.texts) + 2

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return one 1 for each cell: at its place in the list, for another text, or for a missing value."""
        known = {plain(text): place for place, text in enumerate(self.texts)}
        other, absent = len(self.texts), len(self.texts) + 1
        missing = _of(self, missing)
        # A listed text counts, even if it looks like a missing value.
        hot = [known.get(text, absent if text in missing else other) for text in map(plain, cells)]
        return np.eye(self.width, dtype=np.float32)[np.array(hot, np.intp)], [""] * len(cells)


@dataclass(frozen=True)
class Hashed:
    """Words or codes without a list: a fixed hash of the text, the same at every site, chooses the input.

    The task says nothing about the words of any site, and no word is unknown. Two words may share an input.

    Attributes:
        buckets: number of inputs; there is one more for a missing value.
        missing: further texts of missing values, of this column alone, such as `("-9",)`; in any case.
    """

    buckets: int = 64
    missing: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return the number of buckets, and one."""
        return self.buckets + 1

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return one 1 for each cell: in the bucket of its text, or for a missing value."""
        texts, missing = list(map(plain, cells)), _of(self, missing)
        place = {text: self.buckets if text in missing else self._bucket(text) for text in set(texts)}
        return np.eye(self.width, dtype=np.float32)[np.array([place[text] for text in texts], np.intp)], [""] * len(
            cells
        )

    def _bucket(self, text: str) -> int:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) % self.buckets


@dataclass(frozen=True)
class Date:
    """Dates. They become a share of a public range of years, and whether the value is missing.

    Attributes:
        form: as in `datetime.strptime`, such as `%d.%m.%Y`. A time of day behind a blank or a `T` is ignored.
        first, last: years; the range is from the beginning of one to the end of the other.
        missing: further texts of missing values, of this column alone, such as `("-9",)`; in any case.
    """

    form: str
    first: int
    last: int
    missing: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Return 2."""
        return 2

    def features(self, cells: Sequence[str], missing: Collection[str]) -> Features:
        """Return shares of the range, and indicators of missing values; the middle stands in for one."""
        start, end = date(self.first, 1, 1).toordinal(), date(self.last, 12, 31).toordinal()
        missing = _of(self, missing)
        absent = [is_absent(cell, missing) for cell in cells]
        days = [day_of(cell, self.form) for cell in cells]
        example = date(self.last, 12, 31).strftime(self.form)
        between, such = f"must hold dates from {self.first} to {self.last}", f"must hold dates such as {example}"
        reasons = [
            "" if gone or start <= day <= end else between if day else such
            for gone, day in zip(absent, days, strict=True)
        ]
        shares = [0.5 if gone else (day - start) / (end - start) for gone, day in zip(absent, days, strict=True)]
        return np.stack([np.array(shares, np.float64), np.array(absent, np.float64)], axis=1), reasons


def day_of(cell: str, form: str) -> int:
    """Return the number of the day in a cell, from 1; 0: it holds no date of this form.

    Args:
        cell: a date, with or without a time of day.
        form: as in `datetime.strptime`.
    """
    words = (cell if " " in form else cell.replace("T", " ")).split()
    with suppress(ValueError):
        return datetime.strptime(" ".join(words[: len(form.split())]), form).toordinal()
    return 0
