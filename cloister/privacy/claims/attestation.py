"""What a node states that its client applied to the update in a reply.

The server cannot see what a client did to its update. A claim about clients counts the replies that state it, and no
other. The server compares each statement with the releases that its run asks for.
"""

import json
from dataclasses import dataclass

from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Event, from_json, to_json

MAX_BYTES = 1 << 16
"""Longest attestation that is read; one of Cloister has 300 bytes."""


@dataclass(frozen=True)
class Attestation:
    """The releases in one reply, as its node states them.

    Attributes:
        mechanism: of the client, as in `privacy.client`.
        unit: whose protection the events are about.
        events: of this reply, about one unit.
        size: public number of units that the events were computed for; 0: they depend on none.
        group: the array that names the group of a row; empty: a row is a unit.
        checked: whether the site allows this app bundle by its digest, so that the code is known to it.
    """

    mechanism: str
    unit: str
    events: tuple[Event, ...]
    size: int = 0
    group: str = ""
    checked: bool = False

    def to_bytes(self) -> bytes:
        """Return the attestation as a message carries it."""
        return json.dumps(vars(self) | {"events": [to_json(event) for event in self.events]}).encode()

    @classmethod
    def from_bytes(cls, content: object) -> "Attestation | None":
        """Return the attestation that `to_bytes` wrote; None if the content is not one.

        Args:
            content: of a message; a client may write anything.
        """
        if not isinstance(content, bytes) or len(content) > MAX_BYTES:
            return None
        try:
            fields = json.loads(content)
            found = cls(**(fields | {"events": tuple(from_json(event) for event in fields["events"])}))
        except (ValueError, TypeError, KeyError, RecursionError, PrivacyError):
            return None
        types = {"mechanism": str, "unit": str, "size": int, "group": str, "checked": bool}
        sound = all(type(getattr(found, name)) is kind for name, kind in types.items())
        return found if sound and found.size >= 0 else None
