"""What nodes stated in a run that their clients applied, and which of it is what the run asks for."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from flwr.app import ConfigRecord, Message

from cloister.core.state import State
from cloister.core.wire import ATTESTATION, LEDGER_HEAD
from cloister.flower.messages import ErrorCode
from cloister.privacy.claims.attestation import MAX_BYTES

HEAD = re.compile(r"[0-9a-f]{64}")
DECLINED = (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
"""Errors by which a node says that its client sent nothing. Those of the SuperLink and of the grid have other codes."""


class Attested:
    """Counts requests to train by what the replies state; which node stated it is not kept.

    A request without a reply that the server could read in time counts as one without a statement: its client may have
    trained all the same, and what it made may have left the node. A request that the node declined does not count.

    Beside that it keeps the last ledger head of each node. The draw of clients being secret, it keeps none: they would
    tell which nodes were drawn.

    Args:
        secret: whether the draw of clients is secret. Then each statement counts once, as their number would tell.
    """

    def __init__(self, secret: bool = False) -> None:
        self.secret = secret
        self._replies: Counter[str] = Counter()
        self._heads: dict[str, str] = {}

    def counted(self, asked: Sequence[Message], replies: Iterable[Message]) -> Iterator[Message]:
        """Yield replies as they come, each once it is counted; in the end count the requests without one.

        Args:
            asked: requests to train.
            replies: to them, at most one to each.
        """
        missing = len(asked)
        try:
            for reply in replies:
                missing -= self._is_counted(reply)
                yield reply
        finally:
            self._add("", missing)

    def _is_counted(self, reply: Message) -> bool:
        """Count a reply; return whether it settles its request."""
        if reply.has_error():
            return reply.error.code in DECLINED
        record = reply.content.config_records.get(ATTESTATION, ConfigRecord())
        stated, head = record.get(ATTESTATION), record.get(LEDGER_HEAD)
        if not isinstance(stated, bytes) or len(stated) > MAX_BYTES:
            self._add("", 1)
            return True
        self._add(stated.hex(), 1)
        if not self.secret and isinstance(head, str) and HEAD.fullmatch(head):
            self._heads[str(reply.metadata.src_node_id)] = head
        return True

    def _add(self, name: str, count: int) -> None:
        if count > 0:
            self._replies[name] = 1 if self.secret else self._replies[name] + count

    def by_statement(self) -> dict[bytes, int]:
        """Return the number of requests by the attestation in their reply; empty: those without one."""
        return {bytes.fromhex(name): count for name, count in self._replies.items()}

    def facts(self) -> dict[str, object]:
        """Return what `privacy.json` holds of the nodes' ledgers: of each the last head, without the node."""
        return {"node-ledger-heads": sorted(self._heads.values())} if self._heads else {}

    def state_dict(self) -> State:
        """Return the counts and the heads, for a run that is resumed."""
        kept = (("replies", self._replies), ("heads", self._heads))
        return {name: np.frombuffer(json.dumps(value).encode(), np.uint8) for name, value in kept}

    def load_state_dict(self, state: State) -> None:
        """Set the counts to those of `state_dict`; an older state counts as one reply without an attestation."""
        self._replies = Counter(json.loads(state["replies"].tobytes()) if state else {"": 1})
        self._heads = json.loads(state["heads"].tobytes()) if "heads" in state else {}
