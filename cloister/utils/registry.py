"""Plugins by name, and what a strategy declares of itself and of a draw.

A registry has a table of built-ins in the code, and the entry points of installed packages. The built-ins are listed
in the code because a node that receives the app over the network has no entry points of Cloister.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from flwr.app import ArrayRecord, Message, MetricRecord

from cloister.utils.crash import explained, missing_extra, place
from cloister.utils.errors import PluginError
from cloister.utils.files import quiet_libraries
from cloister.utils.text import suggestion


class Registry:
    """The plugins of one kind, loaded on first use.

    Args:
        kind: noun for a plugin of this registry, in the singular (for messages).
        group: the entry-point group of other packages.
        builtin: name -> "module:attribute".
        key: of the configuration that names one of them, for messages; empty: there is none.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str], key: str = "") -> None:
        self.kind = kind
        self.key = key
        self.group = group
        self._builtin = dict(builtin)

    @cached_property
    def _table(self) -> dict[str, str]:
        """Return every known name with its object's location.

        Raises:
            PluginError: two different objects claim one name.
        """
        table = dict(self._builtin)
        for point in entry_points(group=self.group):
            if table.setdefault(point.name, point.value) != point.value:
                raise PluginError(f"{self.kind} {point.name!r} is claimed twice: {table[point.name]} and {point.value}")
        return table

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted(self._table)

    def load(self, name: str) -> Any:
        """Load the object of a name.

        Raises:
            PluginError: the name is unknown, or its module does not import; the text names the type of error and its
                place.
        """
        table = self._table
        if name not in table:
            raise self.unknown(name, table)
        try:
            point = EntryPoint(name, table[name], self.group)
            # A plugin's module may import TensorFlow.
            with nullcontext() if point.module in sys.modules else quiet_libraries():
                return point.load()
        except PluginError as error:  # of a base class of Cloister's, which names the class and the remedy
            raise PluginError(f"{self.kind} {name!r} ({table[name]}) does not load: {error}") from None
        except Exception as error:  # a plugin's module may raise anything, and its text may hold anything
            reason = missing_extra(error) or explained(error)
            if "importlib" in place(error):
                reason = reason.rpartition(" at ")[0].removesuffix(",")
            raise PluginError(f"{self.kind} {name!r} ({table[name]}) does not load: {reason}") from error

    def unknown(self, name: str, known: Iterable[str]) -> PluginError:
        """Return the error for a name that no plugin has: it names the key and the most similar name.

        Args:
            name: that was found.
            known: all valid names.
        """
        found = f"{self.key} = {name!r}" if self.key else repr(name)
        valid = sorted(known)
        meant = suggestion(name, valid)
        own = "" if meant else f". A {self.kind} of your own needs its package: pip install -e FOLDER"
        return PluginError(f"unknown {self.kind} {found}{meant}; known: {', '.join(valid)}{own}")


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


@dataclass(frozen=True)
class Draw:
    """The nodes of a round.

    Attributes:
        nodes: their ids.
        expected: expected size of the cohort. It is public; the actual size of a `poisson` draw is not.
        kind: `fixed`: a cohort of one size, without replacement; `poisson`: each node independently.
        fraction: of the nodes; the probability of `poisson`.
        population: number of nodes, if they are registered and may not change; otherwise 0.
        secret: True if the draw is unpredictable; False if a seed determined it.
    """

    nodes: list[int]
    expected: float
    kind: Literal["fixed", "poisson"]
    fraction: float
    population: int
    secret: bool
