"""Waiting for replies: often enough that rounds are short, and never twice for a node that keeps everybody waiting."""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from logging import WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPStatusError

from cloister.flower.messages import SUPERLINK_NODE_ID, Run
from cloister.privacy.claims.premises import CARRIED, Contributor
from cloister.server.watching import WatchedGrid, answered, asked_to, noop

POLL_SECONDS = 0.1
"""Flower's own grid looks every three seconds."""
POLL_SECONDS_EACH = 0.01
"""For each reply that is waited for: the SuperLink takes some milliseconds to look whether it is there."""
AT_ONCE = 32
"""Replies that are pulled together."""
GRACE_SECONDS = 5.0
"""The shortest time that a node which missed its last deadline has, however quick the others are."""
ANNOUNCING = "/push-messages"
"""How the address of the request ends in which a SuperLink hears of messages, before their parts."""
RENEWALS = 10
"""Maximum number of times that messages are sent anew after they expired on their way to the SuperLink."""
AHEAD = 5.0
"""Seconds that the clock of the SuperLink may be ahead: messages have expired for it, and not yet here."""

logger = logging.getLogger("cloister.server")


@dataclass(frozen=True)
class Transport(Contributor):
    """What the transport of a run keeps nodes from learning about each other.

    Attributes:
        packed: every message and every reply was one salted value: no node can compute the name of another one's part.
        gated: the SuperLink is `cloister superlink`. It hides totals, and gives a node parts of its own messages alone.
        signed: every reply that counted was signed with the key that the SuperLink lists for the node that was asked.
    """

    packed: bool
    gated: bool
    signed: bool = False

    premises = CARRIED


class PatientGrid(WatchedGrid):
    """Another grid, with a quicker `send_and_receive`.

    A node that lets a deadline pass is late. From then on it is asked as before, but has less time; when it replies
    within it, it is late no more. So a client that hangs costs a run one deadline, and not one in every round.

    Under a guarantee that time is a constant. If it followed from how long the others took, a client that replied, or
    was slow, would decide whether late ones count: it would move the release by all of their contributions, where its
    own is accounted for. A late reply after that time does not count even while the round waits for others.

    Args:
        inner: does everything else.
        late_timeout: seconds that a late node has; None: once all others have replied, as long again as they took.
    """

    def __init__(self, inner: Grid, late_timeout: float | None = None) -> None:
        self.watch = noop
        self._inner = inner
        self._late_timeout = late_timeout
        self.late: set[int] = set()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The replies that came before the deadline, in the order of their arrival, each as soon as it is there."""
        messages = list(messages)
        for message in messages:
            self.watch(message.metadata.dst_node_id, asked_to(message))
        ids = self._pushed(messages)
        # A message that could not be pushed has no id; its node is one that did not reply.
        asked = {found: message.metadata.dst_node_id for found, message in zip(ids, messages, strict=False) if found}
        heard, started, deadline, waited = False, time.monotonic(), timeout, 0.0
        while asked:
            for reply in self._pulled(list(asked)):
                node = asked.pop(reply.metadata.reply_to_message_id, 0)
                # By when it was looked for, and not by how long the replies before it took to pull.
                if self._late_timeout is not None and node in self.late and waited > self._late_timeout:
                    self.watch(node, "rejected")
                    continue
                self.watch(node, answered(reply))
                # A node that replies is in time; one that Flower replies for has let a time pass.
                by_flower = reply.has_error() and reply.metadata.src_node_id == SUPERLINK_NODE_ID
                (self.late.add if by_flower else self.late.discard)(node)
                heard = True
                yield reply
            waited = time.monotonic() - started
            if deadline == timeout and self.late.issuperset(asked.values()):
                deadline = self._deadline(heard, waited, timeout)
            if not asked or (deadline is not None and waited >= deadline):
                break
            # No look is missed just before a time from which replies count no more.
            ends = [end - waited for end in (deadline, self._late_timeout) if end is not None and end > waited]
            time.sleep(max(POLL_SECONDS, min([POLL_SECONDS_EACH * len(asked), *ends])))
        self.late.update(asked.values())

    def _pushed(self, messages: list[Message]) -> list[str]:
        """Send messages; those that expired while no SuperLink answered are sent anew. Return their ids.

        Raises:
            HTTPStatusError: the SuperLink refuses messages that have not expired, or parts of messages, or has refused
                too many renewals.
        """
        for _ in range(RENEWALS):
            try:
                return list(self._inner.push_messages(messages))
            except HTTPStatusError as error:
                # Its text is that of any error of the SuperLink, so only the messages can tell. Once their parts are on
                # the way a node may have a whole one: it would train, and release, twice.
                if not error.request.url.path.endswith(ANNOUNCING) or not _renewed(messages):
                    raise
                logger.log(WARNING, "messages expired while no SuperLink answered; they are sent anew")
        return list(self._inner.push_messages(messages))

    def _pulled(self, ids: list[str]) -> Iterator[Message]:
        """The replies that are there, a few at a time: a thousand large ones would fill the memory."""
        for start in range(0, len(ids), AT_ONCE):
            yield from self._inner.pull_messages(ids[start : start + AT_ONCE])

    def _deadline(self, answered: bool, waited: float, timeout: float | None) -> float | None:
        """Return when to give up nodes that are all late."""
        if self._late_timeout is not None:
            grace = self._late_timeout
        elif answered:
            grace = max(2 * waited, GRACE_SECONDS)
        else:
            return timeout
        return grace if timeout is None else min(timeout, grace)

    @property
    def inner(self) -> Grid:
        """The other grid."""
        return self._inner

    def set_run(self, run: Run) -> None:
        """As the other grid."""
        self._inner.set_run(run)

    @property
    def run(self) -> Run:
        """As the other grid's."""
        return self._inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As the other grid."""
        return self._inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """As the other grid."""
        return self._inner.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """As the other grid."""
        return self._inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the other grid."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the other grid."""
        return self._inner.pull_messages(message_ids)


def transport_of(grid: Grid) -> Transport | None:
    """Return what is known of the transport of a run; None where no SuperLink hands messages on.

    Args:
        grid: of the run.
    """
    found: Transport | None = getattr(getattr(grid, "inner", grid), "transport", None)
    return found


def _renewed(messages: list[Message]) -> bool:
    """Make all messages new if one of them has expired, by the clock of the SuperLink; whether one had."""
    now = datetime.now(UTC).timestamp()
    expired = any(message.metadata.created_at + message.metadata.ttl < now + AHEAD for message in messages)
    for message in messages if expired else ():
        message.metadata.created_at = now
    return expired
