"""Waiting for nodes and their replies: states of nodes, quorum, deadlines, and the largest reply."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from logging import WARNING
from typing import Any, Literal

from flwr.app import ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from httpx import HTTPStatusError

from cloister.config.run import RunConfig
from cloister.flower.messages import SUPERLINK_NODE_ID, Run
from cloister.privacy.claims.premises import CARRIED, Contributor
from cloister.strategies.averaging import are_connected, connected_nodes
from cloister.utils.wire import SECURE

Standing = Literal["waiting", "training", "scoring", "sent", "rejected"]
"""State of a client: before its request; asked to train or to score; replied; replied with an error or too late."""
Watch = Callable[[int, Standing], None]
"""Function that receives the id of a node and its new state."""
FACTOR, SLACK = 2, 8 * 2**20
"""The bytes of a reply are at most this factor of the sent model's, plus this slack, and plus `MAX_NAMES`."""
MAX_NAMES = 4 * 2**20
"""Bytes for names and descriptions of arrays."""
MAX_METRICS = 2**18
"""Bytes of metrics and settings; parsed, they take thirty times as much."""
POLL_SECONDS = 0.1
"""Flower's own grid looks every three seconds."""
POLL_SECONDS_EACH = 0.01
"""For each reply that is waited for: the SuperLink takes some milliseconds to look whether it is there."""
AT_ONCE = 32
"""Replies that are pulled together."""
GRACE_SECONDS = 5.0
"""The shortest time that a node which missed its last deadline has, however quick the others are."""
ANNOUNCING = "/push-messages"
"""End of the address of the request that announces messages to a SuperLink, before their parts."""
RENEWALS = 10
"""Maximum number of times that messages are sent anew after they expired on their way to the SuperLink."""
AHEAD = 5.0
"""Seconds that the clock of the SuperLink may be ahead: messages have expired for it, and not yet here."""
logger = logging.getLogger("cloister.server")


class WatchedGrid(Grid):
    """Grid that reports messages and replies; its interface to strategies is Flower's.

    Attributes:
        watch: receives every message and every reply. These may reveal a secret draw, so that it is `noop` unless the
            run may show them.
    """

    watch: Watch


def noop(_: int, __: Standing) -> None:
    """Do nothing."""


def asked_to(message: Message) -> Standing:
    """Return the state of a client after a message."""
    return "training" if message.metadata.message_type in (MessageType.TRAIN, SECURE) else "scoring"


def answered(reply: Message) -> Standing:
    """Return `rejected` for an error reply, otherwise `sent`."""
    return "rejected" if reply.has_error() else "sent"


@dataclass
class MaximumSize:
    """Maximum size of a reply.

    Attributes:
        arrays: bytes of its arrays.
    """

    arrays: int = SLACK

    @property
    def total(self) -> int:
        """Return the maximum bytes of all objects of a reply together."""
        return self.arrays + MAX_NAMES

    def follow(self, sent: ArrayRecord) -> None:
        """Set the maximum from the size of the sent model, `FACTOR` and `SLACK`.

        Args:
            sent: the model that nodes receive.
        """
        self.arrays = FACTOR * sum(len(array.data) for array in sent.values()) + SLACK


MAXIMUM = MaximumSize()
"""Maximum for the replies to the run of this process."""


@dataclass(frozen=True)
class Quorum:
    """Numbers of nodes that must be connected.

    Attributes:
        first: before round 1.
        later: before every later round.
        timeout: seconds to wait for them.
        population: number of registered nodes, all of which must be connected in every round; 0: none are registered.
    """

    first: int = 1
    later: int = 1
    timeout: float = 0.0
    population: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> "Quorum":
        """Return the quorum of a configuration."""
        return cls(
            config.strategy.min_nodes, later_quorum(config), config.node_timeout, config.privacy.server.population
        )

    def wait(self, grid: Grid, number: int, told: Callable[[str], None]) -> None:
        """Wait until enough nodes are connected for a round.

        Args:
            grid: with the nodes.
            number: of the round.
            told: receives a message when the run pauses, when the number of nodes changes, and when the run continues.

        Raises:
            TooFewNodes: the timeout has passed.
        """
        wanted = self.first if number == 1 else self.later
        key = "strategy.min-nodes" if number == 1 else "strategy.quorum"
        if self.population > wanted:
            wanted, key = self.population, "privacy.population"
        paused = False

        def pause(connected: int) -> None:
            nonlocal paused
            paused = True
            told(f"paused before round {number}: {are_connected(connected)}, {key} = {wanted}")

        connected_nodes(grid, wanted, self.timeout, key, pause)
        if paused:
            told(f"enough nodes are connected: round {number} begins")


def later_quorum(config: RunConfig) -> int:
    """Return the number of nodes that must be connected after round 1."""
    return config.strategy.min_nodes if config.strategy.quorum == "auto" else config.strategy.quorum


@dataclass(frozen=True)
class Transport(Contributor):
    """Separation of nodes by the transport of a run.

    Attributes:
        packed: every message and every reply was one salted value. No node can compute the name of another node's part.
        gated: the SuperLink is `cloister superlink`: it keeps no totals, and sends a node only its own messages.
        signed: every reply that counted was signed with the key that the SuperLink lists for the asked node.
    """

    packed: bool
    gated: bool
    signed: bool = False

    premises = CARRIED


class PollingGrid(WatchedGrid):
    """Wrapper of a grid with a quicker `send_and_receive`.

    A node that misses a deadline is late. A late node receives further requests, with less time for each. If it replies
    within that time, it is no longer late. So a client that hangs costs a run one deadline, and not one in every round.

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
        """Yield the replies that arrive before the deadline, in the order of their arrival."""
        messages = list(messages)
        for message in messages:
            self.watch(message.metadata.dst_node_id, asked_to(message))
        ids = self._pushed(messages)
        # A message that could not be pushed has no id; its node is one that did not reply.
        asked = {found: message.metadata.dst_node_id for found, message in zip(ids, messages, strict=False) if found}
        heard, started, deadline, waited = False, time.monotonic(), timeout, 0.0
        while asked:
            ids = list(asked)
            # A few at a time: a thousand large ones would fill the memory.
            parts = (self._inner.pull_messages(ids[at : at + AT_ONCE]) for at in range(0, len(ids), AT_ONCE))
            for reply in chain.from_iterable(parts):
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
                grace = self._late_timeout
                if grace is None and heard:
                    grace = max(2 * waited, GRACE_SECONDS)
                deadline = min((end for end in (timeout, grace) if end is not None), default=None)
            if not asked or (deadline is not None and waited >= deadline):
                break
            # No look is missed just before a time from which replies count no more.
            ends = [end - waited for end in (deadline, self._late_timeout) if end is not None and end > waited]
            time.sleep(max(POLL_SECONDS, min([POLL_SECONDS_EACH * len(asked), *ends])))
        self.late.update(asked.values())

    def _pushed(self, messages: list[Message]) -> list[str]:
        """Send messages, and again if they expire before a SuperLink answers; return their ids.

        Raises:
            HTTPStatusError: the SuperLink refuses messages that have not expired, or parts of messages, or has refused
                too many renewals.
        """
        for _ in range(RENEWALS):
            try:
                return list(self._inner.push_messages(messages))
            except HTTPStatusError as error:
                # All errors of the SuperLink have the same text, so only the messages show whether they have expired by
                # its clock. Once their parts are on the way a node may have a whole one: it would train, and release,
                # twice.
                now = datetime.now(UTC).timestamp()
                expired = any(one.metadata.created_at + one.metadata.ttl < now + AHEAD for one in messages)
                if not error.request.url.path.endswith(ANNOUNCING) or not expired:
                    raise
                for message in messages:
                    message.metadata.created_at = now
                logger.log(WARNING, "messages expired while no SuperLink answered; they are sent anew")
        return list(self._inner.push_messages(messages))

    @property
    def inner(self) -> Grid:
        """Return the inner grid."""
        return self._inner

    def set_run(self, run: Run) -> None:
        """Set the run of the inner grid."""
        self._inner.set_run(run)

    @property
    def run(self) -> Run:
        """Return the run of the inner grid."""
        return self._inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message by the inner grid."""
        return self._inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._inner.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes."""
        return self._inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages through the inner grid."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies to messages."""
        return self._inner.pull_messages(message_ids)


def transport_of(grid: Grid) -> Transport | None:
    """Return the observed transport of a run; None if no SuperLink relays messages.

    Args:
        grid: of the run.
    """
    found: Transport | None = getattr(getattr(grid, "inner", grid), "transport", None)
    return found
