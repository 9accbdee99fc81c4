"""Types of an aggregation strategy's inputs and outputs, and its declared capabilities."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord

Messages = Iterable[Message]
"""Messages to nodes or from them, in any order."""
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]
"""Result of a strategy's aggregation of a training round: a model and metrics, or None for either."""


@dataclass(frozen=True)
class Capabilities:
    """Declared properties of a strategy's aggregation.

    A strategy declares them as an attribute or property `capabilities`, in the class that defines `aggregate_train` or
    in a subclass of it.

    Attributes:
        needs_every_reply: True if it is meaningless on one reply, as a median or a selection is.
        is_uniform_mean: True if it returns exactly the plain mean of its replies.
        cuts: number of n values that a coordinate-wise trimmed mean or median cuts off at each end; None for any other
            aggregation.
    """

    needs_every_reply: bool = False
    is_uniform_mean: bool = False
    cuts: Callable[[int], int] | None = None


MEAN = Capabilities(is_uniform_mean=True)
"""The plain mean."""
OPTIMIZER = Capabilities()
"""A mean, followed by a step of a server optimizer."""
SELECTION = Capabilities(needs_every_reply=True)
"""A choice among replies, or a statistic other than a median or a trimmed mean."""


MEDIAN = Capabilities(needs_every_reply=True, cuts=lambda count: (count - 1) // 2)
"""A coordinate-wise median: only the one or two values in the middle are kept."""


def trimmed_mean(share: float) -> Capabilities:
    """Return the capabilities of a mean that trims this share of values at each end."""
    return Capabilities(needs_every_reply=True, cuts=lambda count: int(share * count))
