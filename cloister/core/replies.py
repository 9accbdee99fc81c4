"""Screening: which replies of a round may count, and why the others may not.

A malformed reply is rejected by itself, counted and named with a reason; the round goes on with the others. Reasons
name arrays and shapes, never values.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, MetricRecord

from cloister.core.arrays import Layout, Row, view
from cloister.core.cohort import Cohort

ARRAYS = "arrays"
METRICS = "metrics"
CONFIG = "config"
EXAMPLES = "num-examples"
MOST_EXAMPLES = 10**9
"""A count above this is taken for an error or an attack: it would silence every other client."""
REASON_LENGTH = 300


@dataclass(frozen=True)
class Rejection:
    """A reply that does not count: which node sent it, a short code, and what was wrong."""

    node_id: int
    code: str
    detail: str


@dataclass(frozen=True)
class Screening:
    """The replies of one round that count, in an order that does not depend on the runtime, and those that do not."""

    cohort: Cohort
    accepted: tuple[Message, ...]
    examples: tuple[float, ...]
    rejected: tuple[Rejection, ...]


class _Unfit(Exception):
    """Why one reply cannot count."""

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class _Reply:
    message: Message
    row: Row
    examples: float


def screen(replies: Iterable[Message], asked: Collection[int], layout: Layout, sent: Row) -> Screening:
    """Sort the replies of a training round into those that count and those that do not.

    Args:
        replies: what came back, error replies included.
        asked: ids of the nodes that were sent this round's model; one that does not answer is rejected as `missing`.
        layout: of the model that was sent.
        sent: that model.
    """
    fit: dict[int, _Reply] = {}
    rejected: list[Rejection] = []
    heard = set()
    for message in replies:
        node = message.metadata.src_node_id
        try:
            if node not in asked:
                raise _Unfit("unsolicited", "this node was not asked in this round")
            if node in heard:
                raise _Unfit("duplicate", "this node has already replied in this round")
            heard.add(node)
            fit[node] = _read(message, layout)
        except _Unfit as unfit:
            rejected.append(Rejection(node, unfit.code, unfit.detail))
    rejected += [Rejection(node, "missing", "no reply came before the deadline") for node in asked if node not in heard]
    return _finite(sorted(fit.values(), key=_content_key), rejected, layout, sent)


def _finite(replies: list[_Reply], rejected: list[Rejection], layout: Layout, sent: Row) -> Screening:
    """Measure every update and drop those that are not finite; the measuring is what finds them."""
    cohort = Cohort.of(layout, sent, tuple(reply.row for reply in replies))
    finite = np.isfinite(cohort.norms)
    for reply in (reply for reply, good in zip(replies, finite, strict=True) if not good):
        rejected.append(Rejection(reply.message.metadata.src_node_id, "non-finite", "the update holds NaN or Inf"))
    kept = [reply for reply, good in zip(replies, finite, strict=True) if good]
    return Screening(
        cohort if finite.all() else cohort.take(np.flatnonzero(finite)),
        tuple(reply.message for reply in kept),
        tuple(reply.examples for reply in kept),
        tuple(sorted(rejected, key=lambda rejection: rejection.node_id)),
    )


def _content_key(reply: _Reply) -> bytes:
    """Orders replies by what they say: node ids differ between runtimes, and float addition is not associative."""
    return b"".join(piece[:16].tobytes() + piece[-16:].tobytes() for piece in reply.row)


def _read(message: Message, layout: Layout) -> _Reply:
    if message.has_error():
        reason = " ".join(str(message.error.reason).split())[:REASON_LENGTH]
        raise _Unfit("error", f"code {message.error.code}: {reason}")
    return _Reply(message, _row(message, layout), _examples(message))


def _row(message: Message, layout: Layout) -> Row:
    """The trained model of a reply, flat, if it has exactly the arrays that were sent out."""
    records = message.content.array_records
    if list(records) != [ARRAYS]:
        raise _Unfit("record", f"expected one array record named {ARRAYS!r}, found {len(records)}")
    record = records[ARRAYS]
    if missing := [name for name in layout.names if name not in record]:
        raise _Unfit("missing-array", f"array {missing[0]!r} is missing")
    if len(record) != len(layout.names):
        raise _Unfit("extra-array", f"expected {len(layout.names)} arrays, found {len(record)}")
    row = []
    for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True):
        array = record[name]
        if array.dtype != dtype:
            raise _Unfit("dtype", f"array {name!r} must be {dtype}, found {array.dtype[:20]!r}")
        if tuple(array.shape) != shape:
            raise _Unfit("shape", f"array {name!r} must have shape {shape}, found {tuple(array.shape)[:8]}")
        try:
            row.append(np.ravel(view(array)))
        except ValueError:
            raise _Unfit("bytes", f"array {name!r} is not what it is labelled as") from None
    return tuple(row)


def _examples(message: Message) -> float:
    """The example count of a reply; 1 where the reply carries none, as private clients' replies do not."""
    counts = [record[EXAMPLES] for record in message.content.metric_records.values() if EXAMPLES in record]
    if not counts:
        return 1.0
    if len(counts) > 1 or isinstance(counts[0], list) or not is_count(counts[0]):
        raise _Unfit("weight", f"{EXAMPLES} must be one number above 0 and at most {MOST_EXAMPLES:.0e}")
    return float(counts[0])


def is_count(value: float) -> bool:
    """Whether a number can be how many examples a client has."""
    return math.isfinite(value) and 0 < value <= MOST_EXAMPLES


def screen_metrics(replies: Iterable[Message]) -> list[Message]:
    """The evaluation replies that can be averaged: one record of finite numbers, with the keys most of them have."""
    sound = [message for message in replies if not message.has_error() and _metric_keys(message)]
    if not sound:
        return []
    usual, _ = Counter(_metric_keys(message) for message in sound).most_common(1)[0]
    return [message for message in sound if _metric_keys(message) == usual]


def _metric_keys(message: Message) -> frozenset[str]:
    """The keys of a reply's one metric record, or none if the reply cannot be averaged."""
    records = list(message.content.metric_records.values())
    if len(records) != 1 or EXAMPLES not in records[0]:
        return frozenset()
    record: MetricRecord = records[0]
    if any(isinstance(value, list) or not math.isfinite(value) for value in record.values()):
        return frozenset()
    return frozenset(record) if is_count(float(record[EXAMPLES])) else frozenset()  # type: ignore[arg-type]
