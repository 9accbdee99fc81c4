"""Attestation: the mechanism that a node states its client applied to the update in a reply.

The server cannot see what a client did to its update. A claim about clients covers the replies with an attestation of
what its run asks for, and no other. The server computes that attestation itself and compares bytes: of what a client
wrote it reads the size and the word about the bundle alone.
"""

import json
from dataclasses import dataclass

from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.events import to_json as event_to_json

MAX_BYTES = 1 << 16
"""Longest attestation that is read; one of Cloister has 300 bytes."""
MAX_SIZE = 10**9
"""Largest public size of a node."""


@dataclass(frozen=True)
class Attestation:
    """The releases in one reply, as its node states them.

    Attributes:
        mechanism: of the client, as in `privacy.client`.
        unit: whose protection the events are about.
        events: of this reply, about one unit.
        size: public number of units that the events were computed for; 0: they depend on none.
        group: the array that names the group of a row; empty: a row is a unit.
        checked: whether the policy names the app bundle by its digest. The bundle's own code says so.
    """

    mechanism: str
    unit: str
    events: tuple[Event, ...]
    size: int = 0
    group: str = ""
    checked: bool = False

    def to_bytes(self) -> bytes:
        """Return the attestation as a message carries it."""
        return json.dumps(vars(self) | {"events": [event_to_json(event) for event in self.events]}).encode()


def size_and_checked(content: bytes) -> tuple[int, bool] | None:
    """Return the two fields of an attestation that its node decides; None if the content has none.

    Args:
        content: of a message; a client may write anything.
    """
    try:
        fields = json.loads(content)
        size, checked = fields["size"], fields["checked"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    valid = type(size) is int and 0 <= size <= MAX_SIZE and type(checked) is bool
    return (size, checked) if valid else None
