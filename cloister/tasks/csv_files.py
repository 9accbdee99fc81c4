"""CSV files as hospitals' systems write them, read line by line.

Under DP-SGD one person's row must not change how another row is read. So the header alone decides about a file: its
separator and its columns. Everything else is decided for one line: its encoding, quotation marks and number of cells.
Adding, removing or damaging a line changes no cell of another line.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cloister.utils.errors import DataError
from cloister.utils.text import first_of

SEPARATORS = (",", ";", "\t", "|")
SUFFIXES = (".csv", ".tsv", ".txt", ".data")
"""Suffixes of tables, each also with `.gz`."""
UTF_8_MARK = b"\xef\xbb\xbf"
UTF_16, GZIP, BINARY = (b"\xff\xfe", b"\xfe\xff"), (b"\x1f\x8b",), (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
"""First bytes of other kinds of files."""
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+")
NAMED = 5
"""Largest number of missing columns that a message names."""


@dataclass(frozen=True)
class Rows:
    """Cells of all columns of a file.

    Attributes:
        names: of the columns.
        rows: text of every row, without blanks around it, in the order of `names`. A row is empty if its line has
            another number of cells.
        separator: of the header; empty for a file without a header, where each line has its own.
    """

    names: list[str]
    rows: list[list[str]]
    separator: str


@dataclass(frozen=True)
class Cells:
    """Cells of some columns of a file.

    Attributes:
        columns: text of every row, without blanks around it, by the name of the column.
        whole: for each row, whether the line has as many cells as the header. Otherwise all its cells are empty.
        separator: of the header; empty for a file without a header, where each line has its own.
    """

    columns: dict[str, list[str]]
    whole: list[bool]
    separator: str


def lines_of(path: Path, has_header: bool = True) -> list[bytes]:
    """Return the lines of a table that are not empty, without a byte-order mark; unpacked if its name ends in `.gz`.

    Args:
        path: of the file.
        has_header: whether the first line is a header, which shows other kinds of files. A row shows nothing.

    Raises:
        DataError: the file cannot be read, is empty, or is not a text file.
    """
    try:
        content = path.read_bytes()
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is a damaged gzip file"
        raise DataError(f"data-path: {path}: {reason}") from None
    lines = [line for line in content.removeprefix(UTF_8_MARK).splitlines() if line.strip()]
    if has_header:
        first = lines[0] if lines else b""
        kinds = {
            UTF_16: "in UTF-16",
            GZIP: "packed by gzip, without .gz in its name",
            BINARY: "a spreadsheet or binary",
        }
        kind = next((kind for marks, kind in kinds.items() if content.startswith(marks)), "")
        if kind or b"\x00" in first or not lines:
            told = f"; it is {kind or kinds[BINARY]}: save it as CSV in UTF-8" if lines else "; it is empty"
            raise DataError(f"data-path: {path} must be a .csv file with a header{told}")
    return lines


def text_of(line: bytes) -> str:
    """Decode one line: UTF-8, or else Windows-1252, in which systems of hospitals often write."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return line.decode("cp1252", "replace")


def cells_of(line: bytes, separators: Sequence[str], width: int) -> list[str]:
    """Split one line by the first separator that gives `width` cells; empty: there is none.

    Empty cells beyond the last column do not count. A quotation mark that is not closed ends with its line.
    """
    for separator in separators:
        cells = split_line(line, separator)
        while len(cells) > width and not cells[-1]:
            cells.pop()
        if len(cells) == width:
            return pointed(cells, separator)
    return []


def split_line(line: bytes, separator: str) -> list[str]:
    """Return the cells of one line, without blanks around them; none if it cannot be split."""
    try:
        return [cell.strip() for cell in next(csv.reader([text_of(line)], delimiter=separator), [])]
    except csv.Error:
        return []


def pointed(cells: Sequence[str], separator: str) -> list[str]:
    """Return cells with points in place of decimal commas, which numbers have in a file with `;` or tabs."""
    if separator not in ";\t":
        return list(cells)
    return [cell.replace(",", ".") if "," in cell and DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]


def header_of(line: bytes, needs: Sequence[str] = ()) -> tuple[list[str], str]:
    """Return the names in a header, and its separator.

    Args:
        line: the first of a file.
        needs: names that are expected. The separator gives most of them, and then most names.
    """
    found: dict[str, list[str]] = {}
    for separator in SEPARATORS:
        names = split_line(line, separator)
        while names and not names[-1]:
            names.pop()  # a separator behind the last column
        found[separator] = names

    def fit(separator: str) -> tuple[int, int]:
        return len(set(needs) & set(found[separator])), len(found[separator])

    best = max(SEPARATORS, key=fit)
    return found[best], best


def is_header(names: Sequence[str]) -> bool:
    """Return whether the first line of a file names columns: at least half of its cells are words."""
    return 2 * sum(bool(name) and number_of(name) != number_of(name) and name != "?" for name in names) >= len(names)


def number_of(cell: str) -> float:
    """Return the number in a cell; NaN: it holds none."""
    # Python would read `1_000` as a number.
    with suppress(ValueError):
        return float("nan") if "_" in cell else float(cell)
    return float("nan")


def read_rows(path: Path, needs: Sequence[str] = (), order: Sequence[str] = ()) -> Rows:
    """Read all columns of a file.

    In a file with `;` or tabs, a number such as `1,5` has a decimal comma.

    Args:
        path: of the file.
        needs: names that the header is expected to have. They decide about its separator.
        order: names of all columns of a file without a header; empty: the file has a header.

    Raises:
        DataError: the file is absent or is no table. No message has a cell.
    """
    if not path.is_file():
        raise DataError(f"data-path: no file at {path}; expected a .csv file with the columns of the task")
    lines = lines_of(path, has_header=not order)
    separators: Sequence[str] = SEPARATORS
    names, separator = list(order), ""
    if not order:
        names, separator = header_of(lines.pop(0), needs)
        separators = (separator,)
    return Rows(names, [cells_of(line, separators, len(names)) for line in lines], separator)


def read_cells(path: Path, needs: Sequence[str], order: Sequence[str] = ()) -> Cells:
    """Read some columns of a file, as `read_rows` does.

    Args:
        path: of the file.
        needs: names of the columns.
        order: names of all columns of a file without a header; empty: the file has a header.

    Raises:
        DataError: the file is absent or is no table, lacks a column, or has one of them twice. No message has a cell.
    """
    found = read_rows(path, needs, order)
    refuse_names(path, found.names, needs)
    places = {name: found.names.index(name) for name in needs}
    columns = {name: [row[place] if row else "" for row in found.rows] for name, place in places.items()}
    return Cells(columns, [bool(row) for row in found.rows], found.separator)


def refuse_names(path: Path, names: Sequence[str], needs: Sequence[str]) -> None:
    """Refuse a header that lacks a column, or has it twice.

    Raises:
        DataError: naming the columns.
    """
    if missing := [name for name in needs if name not in names]:
        raise DataError(
            f"data-path: {path} lacks the columns {first_of(missing, NAMED)}; its header must name them",
            f"it names {', '.join(names)}",
        )
    if twice := [name for name in dict.fromkeys(needs) if names.count(name) > 1]:
        raise DataError(
            f"data-path: {path} has the column {twice[0]} {names.count(twice[0])} times; rename or remove one"
        )


def tables_in(place: Path) -> list[Path]:
    """Return the tables that a path names: a file itself, or the files of a folder with one of `SUFFIXES`, by name."""
    if not place.is_dir():
        return [place]
    return sorted(path for path in place.iterdir() if is_table(path) and path.is_file())


def is_table(path: Path) -> bool:
    """Return whether a file has the name of a table."""
    name = path.name.lower().removesuffix(".gz")
    return name.endswith(SUFFIXES) and not name.startswith(".")
