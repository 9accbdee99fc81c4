"""Screening of replies: validate each reply of a round, and reject malformed ones with a reason.

A malformed reply is rejected alone, counted and logged with a reason. The round continues without it. Reasons name
arrays and shapes, never values.
"""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord

from cloister.flower.messages import SUPERLINK_NODE_ID, ErrorCode
from cloister.privacy.mechanisms.release import StreamingAggregator
from cloister.utils.arrays import Layout, Row, view
from cloister.utils.cohort import Cohort
from cloister.utils.errors import BudgetExhausted, PolicyError
from cloister.utils.wire import ARRAYS, EXAMPLES, number

MAX_EXAMPLES = 10**9
"""Largest example count accepted. A larger one is an error or an attack: it would outweigh all other clients."""
NUMBERS_AT_ONCE = 2_500_000
"""Parameters per batch of replies that are summed at once; a batch has at least one reply. Larger batches need more
memory. Smaller ones need more time, since each batch reads the sum and the sent model again."""
TOGETHER = 4
"""Largest number of asked clients whose replies are always summed in one batch, so that one pass sums and releases."""
NOT_FINITE = "the update holds NaN or Inf, or is too large to measure: try a lower client.learning-rate"
MAX_METRIC = 1e100
"""Largest absolute value of a client's metric, so that a mean weighted by counts stays finite."""
REASON_LENGTH = 300
METRIC_NAME = re.compile(r"[A-Za-z0-9][\w .()-]{0,39}")
"""Permitted names of metrics: clients choose them, and reports display them."""
UNREACHABLE = {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
"""Error codes of replies that Flower writes for a node without an answer."""


T = TypeVar("T")
R = TypeVar("R", ArrayRecord, MetricRecord)


@dataclass(frozen=True)
class Rejection:
    """A rejected reply.

    Attributes:
        node_id: of the node that sent it.
        code: short code of the reason.
        detail: reason, for people.
        site: the name of the node, if known.
    """

    node_id: int
    code: str
    detail: str
    site: str = ""

    @property
    def who(self) -> str:
        """Return the name of the node, or its number."""
        return self.site or f"node {self.node_id}"

    @property
    def abstained(self) -> bool:
        """Return True if the node refused the round for lack of budget or by its policy."""
        return self.is_spent or self._is_by(PolicyError)

    @property
    def is_spent(self) -> bool:
        """Return True if the node refused the round for lack of budget."""
        return self._is_by(BudgetExhausted)

    def _is_by(self, reason: type[Exception]) -> bool:
        return self.code == "error" and f": {reason.__name__}: " in self.detail


@dataclass(frozen=True)
class Screening:
    """The accepted and the rejected replies of one round.

    Attributes:
        cohort: of the accepted replies.
        accepted: the accepted replies, in an order independent of the runtime; empty if they were summed.
        examples: the example count of each.
        rejected: the rejected replies.
        intake: sum of the accepted replies, if they were summed.
    """

    cohort: Cohort
    accepted: tuple[Message, ...]
    examples: tuple[float, ...]
    rejected: tuple[Rejection, ...]
    intake: StreamingAggregator | None = None


class Unfit(Exception):
    """Reason why one reply cannot count.

    Args:
        code: short code of the reason.
        detail: reason, for people.
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class _Reply:
    message: Message
    row: Row
    examples: float


def screen(
    replies: Iterable[Message],
    asked: Sequence[Message],
    layout: Layout,
    sent: Row,
    intake: StreamingAggregator | None = None,
    encoded: Callable[[Row], Row] = lambda row: row,
) -> Screening:
    """Sort the replies of a training round into accepted and rejected ones.

    Args:
        replies: replies and error replies.
        asked: the messages of this round; a node without a reply to its message is rejected as `missing`.
        layout: of the model sent.
        sent: that model, in the coordinates of the cohort.
        intake: sums the accepted replies in batches as they come. The cohort then has no rows, and `accepted` is empty.
            None: all replies are kept, in an order that follows from their content.
        encoded: returns a model in the coordinates of the cohort (`cloister.utils.state`), by itself alone.
    """
    rejected: list[Rejection] = []

    def read(message: Message) -> _Reply:
        return _Reply(message, encoded(_row(message, layout)), _count(message))

    fit = fitting(replies, asked, read, rejected)
    if intake is None:
        # Sorted by content: node ids differ between runtimes, and float addition is not associative.
        ordered = sorted(fit, key=lambda one: b"".join(part[:16].tobytes() + part[-16:].tobytes() for part in one.row))
        kept = _finite(ordered, rejected, layout, sent)
        return replace(kept, rejected=_by_node(rejected))
    # Replies already in memory need no more of it: one pass sums and releases all of them.
    together = isinstance(replies, Sequence) or len(asked) <= TOGETHER
    at_once = max(1, len(asked) if together else NUMBERS_AT_ONCE // max(1, layout.size))
    norms, examples = array("d"), array("d")
    while few := list(islice(fit, at_once)):
        part = _finite(few, rejected, layout, sent)
        del few  # frees the replies before the next ones are read
        intake.take(part.cohort, part.examples)
        norms.extend(part.cohort.norms)
        examples.extend(part.examples)
        del part
    cohort = replace(Cohort.of(layout, sent, ()), norms=np.array(norms), factors=np.ones(len(norms)))
    return Screening(cohort, (), tuple(examples), _by_node(rejected), intake)


def _by_node(rejected: list[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejected, key=lambda rejection: rejection.node_id))


def fitting(
    replies: Iterable[Message], asked: Sequence[Message], read: Callable[[Message], T], rejected: list[Rejection]
) -> Iterator[T]:
    """Yield the content of each valid reply, one per node, as replies come.

    Args:
        replies: replies and error replies.
        asked: the messages that they may answer, each once.
        read: reads a reply; raises `Unfit` to reject it.
        rejected: receives the reasons for rejected and missing replies.
    """
    expected = {message.metadata.dst_node_id for message in asked}
    addressee: dict[str, int] = {}
    heard = set()
    for message in replies:
        # A grid may send and number messages only on the first request for a reply.
        addressee = addressee or {
            one.metadata.message_id: one.metadata.dst_node_id for one in asked if one.metadata.message_id
        }
        node = message.metadata.src_node_id
        try:
            if message.has_error() and node == SUPERLINK_NODE_ID:
                # Flower answers with its own id for an unreachable node: the answered message identifies the node.
                node = addressee.get(message.metadata.reply_to_message_id, node)
            if node not in expected:
                raise Unfit("unsolicited", "this node was not asked in this round")
            if addressee and addressee.get(message.metadata.reply_to_message_id) != node:
                # Flower does not verify the sender in a reply. A client has no access to other nodes' message ids.
                raise Unfit("sender", "the reply is to no message that this node was sent")
            if node in heard:
                raise Unfit("duplicate", "this node has already replied in this round")
            heard.add(node)
            if message.has_error() and message.error.code in UNREACHABLE:
                raise Unfit("unavailable", "the node is not connected, or its message expired")
            if message.has_error():
                raise Unfit("error", f"code {message.error.code}: {printable(str(message.error.reason))}")
            found = read(message)
        except Unfit as unfit:
            rejected.append(Rejection(node, unfit.code, printable(unfit.detail)))
        else:
            yield found
            del message, found  # frees this reply while the next one is read
    missing = [node for node in expected if node not in heard]
    rejected += [Rejection(node, "missing", "no reply came before the deadline") for node in missing]


def printable(text: str) -> str:
    """Return foreign text as one printable line of limited length."""
    line = " ".join(text[: 4 * REASON_LENGTH].split())
    return "".join(char if char.isprintable() else "?" for char in line)[:REASON_LENGTH]


def _finite(replies: list[_Reply], rejected: list[Rejection], layout: Layout, sent: Row) -> Screening:
    """Compute the norm of every update, and reject updates with a norm that is not finite."""
    cohort = Cohort.of(layout, sent, tuple(reply.row for reply in replies))
    finite = np.isfinite(cohort.norms)
    for reply in (reply for reply, good in zip(replies, finite, strict=True) if not good):
        rejected.append(Rejection(reply.message.metadata.src_node_id, "non-finite", NOT_FINITE))
    kept = [reply for reply, good in zip(replies, finite, strict=True) if good]
    return Screening(
        cohort if finite.all() else cohort.take(np.flatnonzero(finite)),
        tuple(reply.message for reply in kept),
        tuple(reply.examples for reply in kept),
        (),
    )


def _records(message: Message, kind: type[R]) -> dict[str, R]:
    """Return the records of a kind.

    Flower's own views of them would keep the reply until garbage collection.
    """
    return {name: record for name, record in message.content.items() if isinstance(record, kind)}


def _row(message: Message, layout: Layout) -> Row:
    """Return the trained model of a reply, flat, if it has exactly the arrays sent."""
    records = _records(message, ArrayRecord)
    if list(records) != [ARRAYS]:
        raise Unfit("record", f"expected one array record named {ARRAYS!r}, found {len(records)}")
    record = records[ARRAYS]
    if missing := [name for name in layout.names if name not in record]:
        raise Unfit("missing-array", f"array {missing[0]!r} is missing")
    if len(record) != len(layout.names):
        raise Unfit("extra-array", f"expected {len(layout.names)} arrays, found {len(record)}")
    row = []
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        array = record[name]
        if array.dtype != dtype:
            raise Unfit("dtype", f"array {name!r} must be {dtype}, found {array.dtype[:20]!r}")
        if tuple(array.shape) != shape:
            raise Unfit("shape", f"array {name!r} must have shape {shape}, found {tuple(array.shape)[:8]}")
        try:
            row.append(np.ravel(view(array)))
        except ValueError:
            raise Unfit("bytes", f"array {name!r} is not what it is labelled as") from None
    return tuple(row)


def _count(message: Message) -> float:
    """Return the example count of a reply; 1 if the reply has none.

    Replies of private clients have none.
    """
    records = [record for record in _records(message, MetricRecord).values() if EXAMPLES in record]
    if not records:
        return 1.0
    if len(records) > 1 or not is_count(records[0][EXAMPLES]):
        raise Unfit("weight", f"{EXAMPLES} must be one number above 0 and at most {MAX_EXAMPLES:.0e}")
    return number(records[0], EXAMPLES)


def is_count(value: object) -> bool:
    """Return True if a value is a valid example count of a client."""
    return isinstance(value, int | float) and 0 < value <= MAX_EXAMPLES


def average_metrics(
    replies: Iterable[Message], asked: Sequence[Message]
) -> tuple[dict[str, float], tuple[Rejection, ...]]:
    """Average each metric of an evaluation round, weighted by example counts.

    The average of a metric is over the clients that sent it.

    A client may lack a metric that others have (an AUC needs two classes). A metric of at most half the clients is
    omitted: it may be one client's invention.

    Args:
        replies: in any order, with errors.
        asked: the messages sent; only a reply to one of them counts.

    Returns:
        The means by name, and the rejected replies.
    """
    rejected: list[Rejection] = []
    scores = list(fitting(replies, asked, _scores, rejected))
    names = Counter(name for _, metrics in scores for name in metrics)
    usual = sorted(name for name, count in names.items() if 2 * count > len(scores))
    means = {}
    for name in usual:
        weighed = [(count, metrics[name]) for count, metrics in scores if name in metrics]
        means[name] = sum(count * value for count, value in weighed) / sum(count for count, _ in weighed)
    return means, _by_node(rejected)


def _scores(message: Message) -> tuple[float, dict[str, float]]:
    """Return the example count and the metrics of an evaluation reply."""
    records = list(_records(message, MetricRecord).values())
    if len(records) != 1 or not is_count(records[0].get(EXAMPLES)):
        raise Unfit("weight", f"expected one metric record with {EXAMPLES} above 0 and at most {MAX_EXAMPLES:.0e}")
    metrics = {name: value for name, value in records[0].items() if name != EXAMPLES}
    for name, value in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise Unfit("metric", "a metric's name must be letters, digits, spaces and . _ - ( )")
        if not isinstance(value, int | float) or not abs(value) <= MAX_METRIC:
            raise Unfit("metric", f"metric {name!r} must be one finite number, of at most {MAX_METRIC:.0e}")
    return number(records[0], EXAMPLES), {name: number(metrics, name) for name in metrics}
