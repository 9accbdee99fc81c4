"""Guesses about the columns of a table, written as code of a task.

A package is public, and the file may not be. So no cell is copied, but for the texts of the classes. Words are hashed,
and need no list. Ranges are rounded outwards. Both the ranges and the classes still tell about the rows: `Guess.told`
says so, and the user replaces them by public knowledge. A file with a few made-up rows serves as well.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from cloister.tasks.columns import LONGEST, MARKS, MISSING, day_of, is_absent, plain
from cloister.tasks.csv_files import (
    header_of,
    is_header,
    lines_of,
    number_of,
    pointed,
    read_cells,
    split_line,
    tables_in,
)
from cloister.utils.errors import ConfigError, DataError
from cloister.utils.files import expanded
from cloister.utils.text import first_of

FORMS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%d.%m.%y")
"""Forms of dates. The first that fits all cells counts."""
MOST_CLASSES = 20
NUMBERED = 10
"""Largest number of different whole numbers of a target that are taken for classes."""
FEW = 20
"""Number of rows from which a column with another text in almost every row is taken for names or numbers of rows."""
NUMERIC = ("Number", "Date")
"""Kinds of columns for which `MARKS` are missing values."""
LARGELY = 0.9
"""Share of the cells that must be numbers for the others to be taken for notes such as `pending`."""
COMPARED = 100
"""Number of lines that the first line of a file is compared with."""
QUOTED, LONGEST_QUOTE = 3, 40
"""Largest number of different cells that a message quotes, and of characters of one."""
NAMED = 20
"""Largest number of names of columns that a message lists."""


@dataclass(frozen=True)
class Asked:
    """A table, and the roles of its columns that the user named.

    Attributes:
        data: a file, or a folder with a file for each site.
        target: name of the column to predict; empty: the last.
        site, patient: names of the columns of sites and of groups; empty: there are none.
        names: of all columns of files without a header; empty: files have one.
    """

    data: Path
    target: str = ""
    site: str = ""
    patient: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Guess:
    """Facts about tables that the code of a task states.

    Attributes:
        columns: name of a column -> the code of its kind; empty code: it is left out.
        notes: name of a column -> the reason for its kind, or for leaving it out.
        missing: name of an input or of the target -> texts taken for missing values -> number of such cells.
        target, site, patient, names: as in `Asked`, with the target named.
        classes: name of a class -> what its cells hold; empty for a regression.
        span: range of the target of a regression.
        sites: number of sites in the data; 0: it has none.
    """

    columns: Mapping[str, str]
    notes: Mapping[str, str]
    missing: Mapping[str, Mapping[str, int]]
    target: str
    site: str
    patient: str
    names: tuple[str, ...]
    classes: Mapping[str, tuple[str, ...]]
    span: tuple[float, float] | None
    sites: int

    def told(self, source: Path) -> Iterator[str]:
        """Yield lines for the user: the guess, the cells taken for missing values, and what became public.

        Args:
            source: the data, as the user named it.
        """
        used = [name for name, code in self.columns.items() if code]
        kind = f"classification in {len(self.classes)} classes" if self.classes else "regression"
        yield f"target {self.target!r}: {kind}; {len(used)} of {len(self.columns)} other columns are inputs"
        for note in dict.fromkeys(self.notes.values()):
            yield f"{', '.join(repr(name) for name in self.notes if self.notes[name] == note)}: {note}"
        if self.missing:
            absent = ", ".join(
                f"{name!r} has {count} {repr(text) if text else 'empty'}"
                for name, found in self.missing.items()
                for text, count in found.items()
            )
            rows = f"; rows without {self.target!r} are left out" if self.target in self.missing else ""
            yield f"cells taken for missing values: {absent}{rows}"
        dates = ", forms of dates" * any(code.startswith("Date") for code in self.columns.values())
        texts, sites = ", texts of classes" * bool(self.classes), ", the number of sites" * bool(self.sites)
        own = [name for name in (*self.columns, self.target, self.site, self.patient) if name]
        names = f"the names of columns {first_of(list(map(repr, own)), NAMED)}"
        yield (
            f"from {source} the package holds {names}, rounded ranges{dates}{texts}{sites}, and no other cell. "
            "A package is public: put public knowledge in their place in task.py before you hand it on"
        )


def guess(asked: Asked) -> Guess:
    """Guess what the columns of a table hold.

    Raises:
        ConfigError: the file cannot be read, has no header, lacks a column, or has a name twice.
    """
    place = expanded(asked.data)
    paths = tables_in(place)
    try:
        if not place.exists() or not paths:
            raise DataError(f"there is no table at {place}")
        lines = lines_of(paths[0])
        names, separator = header_of(lines[0])
        if asked.names:
            names = list(asked.names)
        elif not is_header(names) or _is_row(lines, separator):
            raise DataError(
                f"{paths[0]} has no header: its first line holds {len(names)} values; name the columns in their order, "
                "as in --columns 'age,sex,...', or write that line into the file"
            )
        wanted = [name for name in names if name]
        if twice := [name for name in dict.fromkeys(wanted) if wanted.count(name) > 1]:
            raise DataError(f"the column {twice[0]!r} is there {wanted.count(twice[0])} times; rename or remove one")
        target = asked.target or wanted[-1]
        for option, name in (("target", target), ("site", asked.site), ("patient", asked.patient)):
            if name and name not in wanted:
                raise DataError(f"--{option} {name!r} is no column of {paths[0]}, which has {', '.join(wanted)}")
        files = [read_cells(path, wanted, asked.names) for path in paths]
    except DataError as error:
        raise ConfigError(str(error.of("--data"))) from None
    if not any(any(file.whole) for file in files):
        odd = "no row has as many cells as there are columns" if files[0].whole else "no rows below the header"
        raise ConfigError(f"--data: {asked.data}: {odd}; a few made-up rows will do")
    cells = {name: [cell for file in files for cell in file.columns[name]] for name in wanted}
    columns: dict[str, str] = {}
    notes: dict[str, str] = {}
    for name in wanted:
        if name not in (target, asked.site, asked.patient):
            columns[name], note = _kind(cells[name])
            notes |= {name: note} if note else {}
    if not any(columns.values()):
        why = "; ".join(f"{name!r} is {note}" for name, note in notes.items())
        raise ConfigError(f"--data: {asked.data}: no column beside {target!r} can be an input; {why}")
    classes, span, note = _target(target, cells[target])
    notes |= {target: note} if note else {}
    listed = {plain(text) for texts in classes.values() for text in texts}
    missing = {
        name: Counter(
            cell
            for cell in cells[name]
            if plain(cell) in MISSING or (code.startswith(NUMERIC) and is_absent(cell, MISSING))
        )
        for name, code in columns.items()
        if code
    }
    missing[target] = Counter(
        cell for cell in cells[target] if (plain(cell) not in listed if classes else is_absent(cell, MISSING))
    )
    missing = {name: found for name, found in missing.items() if found}
    sites = len(set(map(plain, cells[asked.site])) - {""}) if asked.site else len(paths) if place.is_dir() else 0
    return Guess(columns, notes, missing, target, asked.site, asked.patient, asked.names, classes, span, sites)


def _kind(cells: Sequence[str]) -> tuple[str, str]:
    """Return the code of a column's kind, and what the user should know of it."""
    known = [cell for cell in cells if cell and cell.lower() not in MISSING]
    texts, counted = {plain(cell) for cell in known}, [cell for cell in known if cell.lower() not in MARKS]
    if not known:
        return "", "left out: no row has a value"
    if counted and all(text.isdecimal() and len(text) == 1 for text in map(plain, counted)):
        return "Category(DIGITS)", "single digits, taken for codes of categories; Number(0, 9) if they count something"
    numbers = [number for cell in counted if math.isfinite(number := number_of(cell))]
    if numbers and len(numbers) >= LARGELY * len(counted):
        if len(texts) == len(known) > FEW and all(text.isdecimal() for text in texts):
            return "", "left out: another whole number in every row, such as the number of a patient"
        words = _words(counted)
        notes = [_told(words)] if words else []
        counts = Counter(numbers)
        ordered = sorted(counts)
        # An end of the column may be a code: it recurs, far from the others by half their range.
        for end, *others in (ordered, ordered[::-1]):
            if others and counts[end] > 2 and 2 * abs(end - others[0]) > abs(others[-1] - others[0]) > 0:
                notes.append(f"{end:g} recurs far from all other numbers")
        if notes:
            notes.append("if that means a missing value, state it in task.py: missing=('...',)")
        low, high = rounded(min(numbers), max(numbers))
        return f"Number({low:.12g}, {high:.12g})", "; ".join(notes)
    for form in FORMS:
        days = [day_of(cell, form) for cell in counted]
        if days and all(days):
            years = [date.fromordinal(day).year for day in days]
            twofold = form == "%d/%m/%Y" and all(day_of(cell, "%m/%d/%Y") for cell in counted)
            note = "taken for dates of day/month/year; month/day/year would fit as well" if twofold else ""
            return f'Date("{form}", {min(years) // 10 * 10}, {max(years) // 10 * 10 + 9})', note
    if len(texts) > max(FEW, len(known) / 2) or max(map(len, known)) > LONGEST:
        return "", "left out: another text in most rows, such as names or remarks"
    return "Hashed(64)", "words, by a hash; Category((...)) with the public list of words avoids collisions"


def _target(name: str, cells: Sequence[str]) -> tuple[Mapping[str, tuple[str, ...]], tuple[float, float] | None, str]:
    """Return the classes of a target, or the range of a regression, and what the user should know of it.

    Raises:
        ConfigError: it is neither.
    """
    known = [cell for cell in cells if cell and cell.lower() not in MISSING]
    counted = [cell for cell in known if cell.lower() not in MARKS]
    numbers = [number for cell in counted if math.isfinite(number := number_of(cell))]
    words, texts = _words(counted), {plain(cell): cell for cell in known}
    are_numbers = len(numbers) >= LARGELY * len(counted) > 0
    if are_numbers and (len(set(numbers)) > NUMBERED or any(number % 1 for number in numbers)):
        note = f"{_told(words)}; correct them if they are numbers" if words else ""
        return {}, rounded(min(numbers), max(numbers)), note
    if are_numbers and not words:
        texts = {text: text for text in map(plain, counted)}
        ordered = sorted(texts, key=float)
    else:
        ordered = sorted(texts)
    if not 2 <= len(ordered) <= MOST_CLASSES:
        some = f" ({len(numbers)} cells hold numbers, others {_listed(words)})" if numbers and words else ""
        raise ConfigError(
            f"--target {name!r} holds {len(ordered)} different texts: neither numbers, nor 2 to {MOST_CLASSES} "
            f"classes{some}; name another column{', or correct those cells' if some else ''}"
        )
    note = f"{_listed(words)} are classes beside numbers; take them out of CLASSES if they are none"
    return {texts[text]: (texts[text],) for text in ordered}, None, note if words and numbers else ""


def _words(cells: Sequence[str]) -> Counter[str]:
    """Count the cells that hold no finite number."""
    return Counter(cell for cell in cells if not math.isfinite(number_of(cell)))


def _told(words: Counter[str]) -> str:
    return f"{words.total()} cells hold no number: {_listed(words)}. Rows with them are left out"


def _listed(words: Counter[str]) -> str:
    """Quote the most frequent cells, with their numbers."""
    return first_of([f"{text[:LONGEST_QUOTE]!r} ({count})" for text, count in words.most_common()], QUOTED)


def _is_row(lines: Sequence[bytes], separator: str) -> bool:
    """Return whether the first line of a file is a row like those below it, and names no columns.

    In a column of numbers or dates the first cell is of the same kind, or speaks for a header. In a column of recurring
    words it is one of them, or speaks for a header. The majority of the columns decides.
    """
    first, *below = (pointed(split_line(line, separator), separator) for line in lines[: COMPARED + 1])
    votes = 0
    for cell, *others in zip(first, *(cells for cells in below if len(cells) == len(first) and cells != first)):
        known = [other for other in others if not is_absent(other, MISSING)]
        if not known or is_absent(cell, MISSING):
            continue
        (kind, count), *_ = Counter(map(_kind_of, known)).most_common()
        if kind and count >= LARGELY * len(known):
            votes += 1 if _kind_of(cell) == kind else -1
        elif plain(cell) in (words := set(map(plain, known))):
            votes += 1
        elif 2 * len(words) <= len(known):
            votes -= 1
    return votes > 0


def _kind_of(cell: str) -> str:
    """Return `number`, or the form of a date; empty for a word."""
    if math.isfinite(number_of(cell)):
        return "number"
    return next((form for form in FORMS if day_of(cell, form)), "")


def rounded(low: float, high: float) -> tuple[float, float]:
    """Return a range around numbers, rounded outwards.

    The ends are multiples of the spread, after it is rounded up to 1, 2 or 5 times a power of ten.

    Args:
        low, high: the smallest and the largest number.

    Examples:
        >>> rounded(29, 77), rounded(-2.6, 6.2)
        ((0, 100), (-10, 10))
    """
    spread = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(spread))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= spread * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    # The quotients are whole: products of them with a power below 1 would not be short numbers.
    ends = [place * step if step >= 1 else place / round(1 / step) for place in (first, max(last, first + 1))]
    return (ends[0], ends[1])
