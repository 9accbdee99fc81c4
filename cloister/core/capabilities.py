"""What an aggregation strategy takes and gives, and what it declares about itself, so that nobody has to guess."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import ArrayRecord, Message, MetricRecord

Messages = Iterable[Message]
"""To nodes or from them, in any order."""
Aggregated = tuple[ArrayRecord | None, MetricRecord | None]
"""What a strategy makes of the replies of a training round: a model and metrics, if it makes any."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy does with the replies of a round.

    A strategy declares it as an attribute or property `capabilities`, in the class that defines `aggregate_train` or
    in a subclass of that.

    Attributes:
        needs_every_reply: whether it is meaningless on one reply, as a median or a selection is.
        is_uniform_mean: whether it returns the plain mean of the replies it is given, and nothing else.
        cuts: of n values, how many a coordinate-wise trimmed mean or median cuts off at each end; None: it is neither.
    """

    needs_every_reply: bool = False
    is_uniform_mean: bool = False
    cuts: Callable[[int], int] | None = None


MEAN = Capabilities(is_uniform_mean=True)
"""The plain mean."""
OPTIMIZER = Capabilities()
"""A mean, and a step of a server optimizer with it."""
SELECTION = Capabilities(needs_every_reply=True)
"""A choice among replies, or a statistic of them that is neither a median nor a trimmed mean."""


MEDIAN = Capabilities(needs_every_reply=True, cuts=lambda count: (count - 1) // 2)
"""A coordinate-wise median: all but the one or two values in the middle are cut off."""


def trimmed_mean(share: float) -> Capabilities:
    """The capabilities of a coordinate-wise trimmed mean that cuts off this share of the values at each end."""
    return Capabilities(needs_every_reply=True, cuts=lambda count: int(share * count))
