"""Screening: which replies of a round may count, and why the others may not.

A malformed reply is rejected by itself, counted and named with a reason; the round goes on with the others. Reasons
name arrays and shapes, never values.
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
from numpy.typing import NDArray

from cloister.core.arrays import Layout, Row, view
from cloister.core.cohort import Cohort
from cloister.core.errors import BudgetExhausted, PolicyError
from cloister.core.wire import ARRAYS, EXAMPLES, number
from cloister.flower.messages import SUPERLINK_NODE_ID, ErrorCode
from cloister.privacy.mechanisms.total import Intake

MAX_EXAMPLES = 10**9
"""A count above this is taken for an error or an attack: it would silence every other client."""
NUMBERS_AT_ONCE = 2_500_000
"""Replies are added up at once that have so many numbers together, or one: more take memory, and fewer time, since the
sum and the model that was sent are gone over for each few."""
TOGETHER = 4
"""So many clients' replies are added up at once: a round of few is released in the pass that adds them."""
NOT_FINITE = "the update holds NaN or Inf, or is too large to measure: try a lower client.learning-rate"
MAX_METRIC = 1e100
"""Largest number that a client may score: a mean, weighted by counts, stays finite."""
REASON_LENGTH = 300
METRIC_NAME = re.compile(r"[A-Za-z0-9][\w .()-]{0,39}")
"""What a metric may be called: names come from clients and end up on screens."""
UNREACHABLE = {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
"""Error codes of replies that Flower itself writes for a node that did not answer."""


T = TypeVar("T")
R = TypeVar("R", ArrayRecord, MetricRecord)


@dataclass(frozen=True)
class Rejection:
    """A reply that does not count.

    Attributes:
        node_id: of the node that sent it.
        code: a short word for what was wrong.
        detail: what was wrong, for a person.
        site: the name of the node, where it is known.
    """

    node_id: int
    code: str
    detail: str
    site: str = ""

    @property
    def who(self) -> str:
        """The name of the node, or its number."""
        return self.site or f"node {self.node_id}"

    @property
    def abstained(self) -> bool:
        """Whether the node answered that it does nothing, for want of a budget or by its policy."""
        reasons = (BudgetExhausted, PolicyError)
        return self.code == "error" and any(f": {reason.__name__}: " in self.detail for reason in reasons)


@dataclass(frozen=True)
class Screening:
    """The replies of one round that count, and those that do not.

    Attributes:
        cohort: of those that count.
        accepted: these replies, in an order that does not depend on the runtime; none where they were not kept.
        examples: the example count of each.
        rejected: the others.
        intake: has added up those that count, where they were not kept.
    """

    cohort: Cohort
    accepted: tuple[Message, ...]
    examples: tuple[float, ...]
    rejected: tuple[Rejection, ...]
    intake: Intake | None = None


class Unfit(Exception):
    """Why one reply cannot count.

    Args:
        code: a short word for it.
        detail: what was wrong, for a person.
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
    replies: Iterable[Message], asked: Sequence[Message], layout: Layout, sent: Row, intake: Intake | None = None
) -> Screening:
    """Sort the replies of a training round into those that count and those that do not.

    Args:
        replies: what came back, error replies included.
        asked: the messages of this round; a node that does not answer its one is rejected as `missing`.
        layout: of the model that was sent.
        sent: that model.
        intake: takes the replies that count as they come, a few at a time. They are not kept then: the cohort has no
            rows, and no reply is among those accepted. None: all are kept, in an order that follows from their content.
    """
    rejected: list[Rejection] = []
    fit = fitting(replies, asked, lambda message: _Reply(message, _row(message, layout), _count(message)), rejected)
    if intake is None:
        kept = _finite(sorted(fit, key=_content_key), rejected, layout, sent)
        return replace(kept, rejected=_by_node(rejected))
    # What is in memory already takes no more of it, and all together are added and released in one pass.
    together = isinstance(replies, Sequence) or len(asked) <= TOGETHER
    at_once = max(1, len(asked) if together else NUMBERS_AT_ONCE // max(1, layout.size))
    norms, examples = array("d"), array("d")
    while found := _taken(fit, at_once, lambda few: _finite(few, rejected, layout, sent), intake):
        norms.extend(found[0])
        examples.extend(found[1])
    cohort = replace(Cohort.of(layout, sent, ()), norms=np.array(norms), factors=np.ones(len(norms)))
    return Screening(cohort, (), tuple(examples), _by_node(rejected), intake)


def _taken(
    fit: Iterator[_Reply], at_once: int, finite: Callable[[list[_Reply]], Screening], intake: Intake
) -> tuple[NDArray[np.float64], tuple[float, ...]] | None:
    """Add up the next few replies; nothing of them is kept but norms and example counts. None: there are no more."""
    few = list(islice(fit, at_once))
    if not few:
        return None
    part = finite(few)
    intake.take(part.cohort, part.examples)
    return part.cohort.norms, part.examples


def _by_node(rejected: list[Rejection]) -> tuple[Rejection, ...]:
    return tuple(sorted(rejected, key=lambda rejection: rejection.node_id))


def fitting(
    replies: Iterable[Message], asked: Sequence[Message], read: Callable[[Message], T], rejected: list[Rejection]
) -> Iterator[T]:
    """What could be read, one reply a node, as replies come.

    Args:
        replies: what came back, error replies included.
        asked: the messages that they may answer, each once.
        read: makes something of a reply; raises `Unfit` to reject it.
        rejected: takes why the others do not count; of those that did not come, too.
    """
    expected = {message.metadata.dst_node_id for message in asked}
    addressee: dict[str, int] = {}
    heard = set()
    for message in replies:
        # A grid may send messages, and number them, when it is asked for the first reply.
        addressee = addressee or _addressees(asked)
        node = message.metadata.src_node_id
        try:
            if message.has_error() and node == SUPERLINK_NODE_ID:
                # Flower answers in its own name for a node that cannot: what was answered tells for whom.
                node = addressee.get(message.metadata.reply_to_message_id, node)
            if node not in expected:
                raise Unfit("unsolicited", "this node was not asked in this round")
            if addressee and addressee.get(message.metadata.reply_to_message_id) != node:
                # Flower shows a reply as its sender wrote it, name and all; what others were sent he does not know.
                raise Unfit("sender", "the reply is to no message that this node was sent")
            if node in heard:
                raise Unfit("duplicate", "this node has already replied in this round")
            heard.add(node)
            _refuse_error(message)
            found = read(message)
        except Unfit as unfit:
            rejected.append(Rejection(node, unfit.code, printable(unfit.detail)))
        else:
            yield found
            del message, found  # what was handed on is not kept while the next reply is made
    missing = [node for node in expected if node not in heard]
    rejected += [Rejection(node, "missing", "no reply came before the deadline") for node in missing]


def _addressees(asked: Sequence[Message]) -> dict[str, int]:
    """Which node was sent which message; nothing of messages that nobody has numbered."""
    return {
        message.metadata.message_id: message.metadata.dst_node_id for message in asked if message.metadata.message_id
    }


def _refuse_error(message: Message) -> None:
    if not message.has_error():
        return
    if message.error.code in UNREACHABLE:
        raise Unfit("unavailable", "the node is not connected, or its message expired")
    raise Unfit("error", f"code {message.error.code}: {printable(str(message.error.reason))}")


def printable(text: str) -> str:
    """Text from elsewhere, fit for a screen: one line, no control characters, not too long."""
    line = " ".join(text[: 4 * REASON_LENGTH].split())
    return "".join(char if char.isprintable() else "?" for char in line)[:REASON_LENGTH]


def _finite(replies: list[_Reply], rejected: list[Rejection], layout: Layout, sent: Row) -> Screening:
    """Measure every update and drop those that are not finite; the measuring is what finds them."""
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


def _content_key(reply: _Reply) -> bytes:
    """Orders replies by what they say: node ids differ between runtimes, and float addition is not associative."""
    return b"".join(piece[:16].tobytes() + piece[-16:].tobytes() for piece in reply.row)


def _records(message: Message, kind: type[R]) -> dict[str, R]:
    """The records of a kind. Flower's own views of them would keep the reply until garbage is collected."""
    return {name: record for name, record in message.content.items() if isinstance(record, kind)}


def _row(message: Message, layout: Layout) -> Row:
    """The trained model of a reply, flat, if it has exactly the arrays that were sent out."""
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
    """The example count of a reply; 1 where the reply carries none, as private clients' replies do not."""
    records = [record for record in _records(message, MetricRecord).values() if EXAMPLES in record]
    if not records:
        return 1.0
    if len(records) > 1 or not is_count(records[0][EXAMPLES]):
        raise Unfit("weight", f"{EXAMPLES} must be one number above 0 and at most {MAX_EXAMPLES:.0e}")
    return number(records[0], EXAMPLES)


def is_count(value: object) -> bool:
    """Whether a value can be how many examples a client has."""
    return isinstance(value, int | float) and 0 < value <= MAX_EXAMPLES


def average_metrics(
    replies: Iterable[Message], asked: Sequence[Message]
) -> tuple[dict[str, float], tuple[Rejection, ...]]:
    """The metrics of an evaluation round, each averaged over the clients that sent it, weighted by example counts.

    A client may lack a metric that others have (an AUC needs two classes). A metric that most clients lack is left
    out: it is nobody's in particular, or one client's invention.

    Args:
        replies: in any order, errors among them.
        asked: what was sent; a reply to anything else does not count.

    Returns:
        The means by name, and the replies that did not count.
    """
    rejected: list[Rejection] = []
    scores = list(fitting(replies, asked, _scores, rejected))
    names = Counter(name for _, metrics in scores for name in metrics)
    usual = sorted(name for name, count in names.items() if 2 * count > len(scores))
    means = {}
    for name in usual:
        weighed = [(count, metrics[name]) for count, metrics in scores if name in metrics]
        means[name] = sum(count * value for count, value in weighed) / sum(count for count, _ in weighed)
    return means, tuple(sorted(rejected, key=lambda rejection: rejection.node_id))


def _scores(message: Message) -> tuple[float, dict[str, float]]:
    """The example count and the metrics of an evaluation reply."""
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
