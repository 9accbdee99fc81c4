"""A federation in virtual time: nodes that are slow, silent, dead or say things twice, as a seed decides."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from cloister.flower.messages import LOCAL_RUN, assume_run
from cloister.utils.arrays import from_record, to_record

HARMLESS = ("quick", "slow", "twice")
"""Treatments of a message by a node that lose no reply."""
HARMFUL = ("unsent", "unheard", "late", "dies", "raises", "nan", "another's")


class ForEver(AssertionError):
    """Somebody waits for longer than anything can take."""


class Clock:
    """Takes the place of the module `time` where the server waits.

    Args:
        bound: virtual seconds in which everything must be over.
    """

    def __init__(self, bound: float) -> None:
        self.now, self.bound = 0.0, bound

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        if self.now > self.bound:
            raise ForEver(f"still waiting after {self.bound:g} virtual seconds")


def trained(sent: dict[str, np.ndarray], node: int) -> dict[str, np.ndarray]:
    """An honest update: halfway to a place of the node's own."""
    return {name: (0.5 * array + 0.25 * node).astype(array.dtype) for name, array in sent.items()}


@dataclass
class VirtualGrid(Grid):
    """Nodes from 1 on.

    Args:
        nodes: how many.
        clock: the server's.
        rng: decides what becomes of each message.
        faults: that may happen to one.
        seldom: the chance of one.
        timeout: of a round.
        effect: is called before messages leave, and before replies are handed over.
        leaving: is called with the round of each model that leaves, and the model.
    """

    nodes: int
    clock: Clock
    rng: random.Random
    faults: tuple[str, ...]
    seldom: float
    timeout: float
    effect: Callable[[str], None]
    leaving: Callable[[int, bytes], None]
    lost: bool = False
    _due: list[tuple[float, str, Message]] = field(default_factory=list)
    _down: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._run = Run.create_empty(LOCAL_RUN)
        assume_run()

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in range(1, self.nodes + 1) if self._down.get(node, 0.0) <= self.clock.now]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.effect("a message")
            sent = message.content.array_records["arrays"]
            self.leaving(int(message.metadata.group_id) - 1, model_bytes(from_record(sent)))
            message.metadata.__dict__["_message_id"] = str(UUID(int=self.rng.getrandbits(128)))
            self._post(message)
            ids.append(message.metadata.message_id)
        return ids

    def _post(self, message: Message) -> None:
        """Decide what becomes of a message."""
        node, after = message.metadata.dst_node_id, self.rng.uniform(0.01, 0.9 * self.timeout)
        fate = self.rng.choice(self.faults) if self.rng.random() < self.seldom else "quick"
        self.lost |= fate in HARMFUL
        if fate == "unsent" or fate == "unheard":
            return
        if fate == "dies":
            self._down[node] = self.clock.now + self.rng.uniform(0.1, 2 * self.timeout)
            error = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
            self._arrives(after, message, Message(error, reply_to=message), src=SUPERLINK_NODE_ID)
        elif fate == "raises":
            self._arrives(after, message, Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ""), reply_to=message))
        else:
            self._reply(fate, message, after)

    def _reply(self, fate: str, message: Message, after: float) -> None:
        after = {"quick": min(after, 0.05), "late": after + self.timeout}.get(fate, after)
        model = trained(from_record(message.content.array_records["arrays"]), message.metadata.dst_node_id)
        if fate == "nan":
            next(iter(model.values())).flat[0] = np.nan
        for _ in range(2 if fate == "twice" else 1):
            content = RecordDict({"arrays": to_record(model), "metrics": MetricRecord({"num-examples": 10})})
            source = message.metadata.dst_node_id % self.nodes + 1 if fate == "another's" else None
            self._arrives(after, message, Message(content, reply_to=message), source)

    def _arrives(self, after: float, message: Message, reply: Message, src: int | None = None) -> None:
        if src is not None:
            reply.metadata.__dict__["_src_node_id"] = src
        self._due.append((self.clock.now + after, message.metadata.message_id, reply))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = set(message_ids)
        ready = [item for item in self._due if item[0] <= self.clock.now and item[1] in asked]
        if ready:
            self.effect("replies")
        self._due = [item for item in self._due if item not in ready]
        self.rng.shuffle(ready)
        return [reply for _, _, reply in ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError("the server's own grid waits")


def model_bytes(model: dict[str, np.ndarray]) -> bytes:
    """Return bytes that two models have in common only if they are equal."""
    return b"".join(array.tobytes() for array in model.values())
