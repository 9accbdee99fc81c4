"""What nodes stated in a run that their clients applied, and which of it is what the run asks for."""

import json
from collections import Counter

import numpy as np
from flwr.app import Message

from cloister.core.state import State
from cloister.core.wire import ATTESTATION
from cloister.privacy.claims.attestation import MAX_BYTES


class Attested:
    """Counts training replies by what their nodes state; which node stated it is not kept.

    Args:
        secret: whether the draw of clients is secret. Then each statement counts once, as their number would tell.
    """

    def __init__(self, secret: bool = False) -> None:
        self.secret = secret
        self._replies: Counter[str] = Counter()

    def count(self, reply: Message) -> None:
        """Count a reply; an error reply holds no update and is not counted.

        Args:
            reply: to a request to train.
        """
        if reply.has_error():
            return
        record = reply.content.config_records.get(ATTESTATION)
        stated = record.get(ATTESTATION) if record else None
        name = stated.hex() if isinstance(stated, bytes) and len(stated) <= MAX_BYTES else ""
        self._replies[name] = 1 if self.secret else self._replies[name] + 1

    def by_statement(self) -> dict[bytes, int]:
        """Return the number of replies with each attestation, as its node wrote it; empty: of those without one."""
        return {bytes.fromhex(name): count for name, count in self._replies.items()}

    def state_dict(self) -> State:
        """Return the counts, for a run that is resumed."""
        return {"replies": np.frombuffer(json.dumps(self._replies).encode(), np.uint8)}

    def load_state_dict(self, state: State) -> None:
        """Set the counts to those of `state_dict`; an older state counts as one reply without an attestation."""
        self._replies = Counter(json.loads(state["replies"].tobytes()) if state else {"": 1})
