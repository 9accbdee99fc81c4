"""The roster as a node tells it to the server, which has none of its own and needs it to know who has signed what."""

from typing import cast

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import read, text
from cloister.secure_aggregation.roster import Entry, Roster

LABEL = "roster told"
MAX_TOLD = 4 * 2**20
"""Bytes of a roster: enough for 10,000 members."""


def told(roster: Roster) -> bytes:
    """Return names, keys and who made them as bytes, in the one form that there is."""
    return text(LABEL, roster.entries)


def read_told(content: bytes) -> Roster:
    """The roster that `told` wrote down. Nobody vouches for it: members go by their own.

    Raises:
        ProtocolError: the bytes are no roster.
    """
    if len(content) > MAX_TOLD:
        raise ProtocolError("the bytes are no roster")
    try:
        (entries,) = read(LABEL, content)
        return Roster.of(cast(tuple[Entry, ...], entries))
    except (ValueError, TypeError) as error:
        raise ProtocolError("the bytes are no roster") from error
