"""Encoding of a node's roster for the server, which has no roster of its own to verify signatures."""

from typing import cast

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation.canonical import read, text
from cloister.secure_aggregation.roster import Entry, Roster

SENT_LABEL = "roster told"
MAX_ENCODED_ROSTER = 4 * 2**20
"""Largest encoded roster in bytes: enough for 10,000 members."""


def encode_roster(roster: Roster) -> bytes:
    """Encode names, keys and their makers in the canonical form."""
    return text(SENT_LABEL, roster.entries)


def decode_roster(content: bytes) -> Roster:
    """Decode the roster that `encode_roster` encoded.

    It is unauthenticated: members use their own roster.

    Raises:
        ProtocolError: the bytes are no roster.
    """
    if len(content) > MAX_ENCODED_ROSTER:
        raise ProtocolError("the bytes are no roster")
    try:
        (entries,) = read(SENT_LABEL, content)
        return Roster.of(cast(tuple[Entry, ...], entries))
    except (ValueError, TypeError) as error:
        raise ProtocolError("the bytes are no roster") from error
