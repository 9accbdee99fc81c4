"""Cross-references between ledgers of data at one place under several names.

A budget is kept in one ledger, which the name of the data selects (`data-identity`). Under another name the same data
has another ledger, without any spending. The place may contain other data by then, so that a new name is accepted.
But it is recorded: a ledger contains the place of its data, and ledgers of one place contain each other's names.
"""

import json
import logging
from contextlib import suppress
from logging import WARNING

from cloister.core.errors import LedgerError
from cloister.privacy.accounting.ledger import Ledger

logger = logging.getLogger("cloister.ledger")


def other_names(ledger: Ledger, place: str) -> tuple[str, ...]:
    """Return other names of data at a place; record them in both ledgers.

    Args:
        ledger: of the current name.
        place: identifier of the data's location, and its default name.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    name = ledger.path.stem
    found = []
    for path in sorted(ledger.path.parent.glob("*.jsonl")):
        is_there = path.stem == place
        with suppress(OSError):  # an unverified ledger
            is_there = is_there or f'"place": {json.dumps(place)}'.encode() in path.read_bytes()
        if path.stem != name and is_there:
            found.append(path)
    others = [path.stem for path in found if path.stem not in ledger.others]
    for path in found:
        if path.stem not in others:
            continue
        try:
            other = Ledger(path)
            if name not in other.others:
                other.note_place(place, [name])
        except LedgerError as error:  # the other ledger is broken
            logger.log(WARNING, "%s does not note that data at its place is called %s too: %s", path.name, name, error)
    # A ledger without a configured name is named after its place.
    if others or (name != place and place not in ledger.places):
        ledger.note_place(place, others)
    return ledger.others


def warning(name: str, others: tuple[str, ...], key: str) -> str:
    """Return the warning for an operator that the data has ledgers under further names.

    Args:
        name: current name of the data.
        others: further names of data at the same place.
        key: configuration key of the name.
    """
    return (
        f"the data at this place has ledgers under other names too: {', '.join(others)}. The ledger of {name!r} counts "
        f"nothing of them, and neither does its budget; set {key} to the earlier name unless it is other data"
    )
