"""The names that data at one place had, each with a ledger of its own.

A budget is kept in one ledger, which the name of the data chooses (`data-identity`). Under another name the same data
has another ledger, in which nothing is spent. At the same place may lie other data by now, so that a new name is not
refused. It is written down: a ledger says at which place its data lies, and ledgers of one place name each other.
"""

import json
import logging
from contextlib import suppress
from logging import WARNING
from pathlib import Path

from cloister.core.errors import LedgerError
from cloister.privacy.accounting.ledger import Ledger

logger = logging.getLogger("cloister.ledger")


def other_names(ledger: Ledger, place: str) -> tuple[str, ...]:
    """Return the other names that data at a place had, and note them in the ledgers of both names.

    Args:
        ledger: of the name that the data has now.
        place: names where the data lies; it is the name of data that was given none.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    name = ledger.path.stem
    found = [path for path in sorted(ledger.path.parent.glob("*.jsonl")) if path.stem != name and _is_at(path, place)]
    others = [path.stem for path in found if path.stem not in ledger.others]
    for path in found:
        if path.stem in others:
            _note_in_the_other(path, place, name)
    # A ledger without a given name is called after its place.
    if others or (name != place and place not in ledger.places):
        ledger.note_place(place, others)
    return ledger.others


def warning(name: str, others: tuple[str, ...], key: str) -> str:
    """Return what an operator reads of a name that is not the only one.

    Args:
        name: of the data now.
        others: that data at the same place had.
        key: that gives the name.
    """
    return (
        f"the data at this place has ledgers under other names too: {', '.join(others)}. The ledger of {name!r} counts "
        f"nothing of them, and neither does its budget; set {key} to the earlier name unless it is other data"
    )


def _is_at(path: Path, place: str) -> bool:
    """Return whether a ledger is about data at a place, by its name or by one of its lines, which are not checked."""
    if path.stem == place:
        return True
    with suppress(OSError):
        return f'"place": {json.dumps(place)}'.encode() in path.read_bytes()
    return False


def _note_in_the_other(path: Path, place: str, name: str) -> None:
    """Write into the ledger of an earlier name that data at its place has another one; a broken one stays as it is."""
    try:
        other = Ledger(path)
        if name not in other.others:
            other.note_place(place, [name])
    except LedgerError as error:
        logger.log(WARNING, "%s does not note that data at its place is called %s too: %s", path.name, name, error)
