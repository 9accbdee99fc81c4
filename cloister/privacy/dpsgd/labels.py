"""Labels of the tensors of a graph, by the units on whose data they depend, and the algebra of their axes.

`isolation_rules` and `torch_isolation_rules` have a rule for each operation of their frameworks: it gives the labels of
the outputs from those of the inputs. Whether an axis of units is kept, moved or lost is decided here, for both.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from cloister.utils.errors import PrivacyError


class NotIsolated(PrivacyError):
    """Error for an operation of a graph whose outputs are not proved to keep units apart.

    Attributes:
        reason: words that follow the operation.
        kind, operation: type and name of the operation; empty until `at` sets them.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason, self.kind, self.operation = reason, "", ""

    def at(self, kind: str, operation: str) -> Self:
        """Return the error with the type and the name of its operation, unless it has them."""
        if not self.kind:
            self.kind, self.operation = kind, operation
            self.args = (f"{kind} ({operation}) {self.reason}",)
        return self


class Mixes(NotIsolated):
    """Error for an operation that combines several units."""


class Unproved(NotIsolated):
    """Error for a use of an operation that no rule covers."""


@dataclass(frozen=True)
class Rows:
    """Label of a tensor: entry j of an axis depends on unit `(j // inner) % units` alone."""

    axis: int
    inner: int = 1

    def outside(self, axes: Collection[int], reason: str, error: type[NotIsolated] = Mixes) -> Self:
        """Return the label if its axis is none of some, which an operation combines; else raise the error."""
        if self.axis in axes:
            raise error(reason)
        return self

    def shifted(self, by: int) -> Self:
        """Return the label with so many more axes before its own."""
        return replace(self, axis=self.axis + by)

    def without(self, axes: Collection[int]) -> Self:
        """Return the label after some other axes are gone."""
        return self.shifted(-sum(axis < self.axis for axis in set(axes)))

    def beside(self, axis: int) -> Self:
        """Return the label after an axis is inserted, which becomes number `axis`."""
        return self.shifted(axis <= self.axis)

    def permuted(self, order: Sequence[int]) -> Self:
        """Return the label after axis `order[i]` has become axis i."""
        return replace(self, axis=list(order).index(self.axis))

    def reshaped(self, old: Sequence[int], new: Sequence[int], units: int) -> "Rows":
        """Return the label along the axis of a new shape on which the unit changes at the same interval.

        Raises:
            Unproved: there is none.
        """
        run = self.inner * math.prod(old[self.axis + 1 :])  # number of adjacent entries of one unit
        for axis, length in enumerate(new):
            behind = math.prod(new[axis + 1 :])
            if run and behind and run % behind == 0 and length and length % (units * (run // behind)) == 0:
                return Rows(axis, run // behind)
        raise Unproved(f"turns {tuple(old)} into {tuple(new)}, which has no axis of units")


@dataclass(frozen=True)
class Refused:
    """Label of a tensor that is not proved to keep units apart; allowed if no target depends on it."""

    error: NotIsolated


Label: TypeAlias = Rows | Refused | None
"""None: the tensor is independent of all units' data."""


def agreed(labels: Iterable[Label], others: Iterable[Label] = ()) -> Rows:
    """Return the common label of all labelled inputs; other inputs must have none."""
    if any(label is not None for label in others):
        raise Unproved("has sizes, axes, weights or other arguments that depend on units")
    found = {label for label in labels if label is not None}
    if len(found) > 1:
        raise Mixes("takes units along different axes together")
    label = found.pop() if found else None
    if not isinstance(label, Rows):
        raise Unproved("depends on units by an argument alone")
    return label


def broadcast(labels: Iterable[Label], ranks: Sequence[int]) -> Rows:
    """Return the common label of inputs of some ranks, aligned at their last axes.

    An axis of units is longer than 1, so it is never repeated.
    """
    pairs = zip(labels, ranks, strict=True)
    return agreed(label.shifted(max(ranks) - rank) if isinstance(label, Rows) else label for label, rank in pairs)


def product(labels: Iterable[Label], ranks: Sequence[int], turned: Sequence[bool] = (False, False)) -> Rows:
    """Return the label of products of two matrices, or of two batches of them.

    Args:
        labels, ranks: of both factors.
        turned: whether each is transposed first.

    Raises:
        Mixes: the product adds up over units, or multiplies them with each other.
    """
    found = list[Label]()
    for place, label in enumerate(labels):
        if not isinstance(label, Rows):
            found.append(label)
            continue
        behind = ranks[place] - 1 - label.axis
        if behind > 1:  # an axis of the batch of matrices
            found.append(label.shifted(max(ranks) - ranks[place]))
        elif behind == (place if turned[place] else 1 - place):
            found.append(Rows(max(ranks) - 2 + place, label.inner))
        else:
            raise Mixes("adds up over units")
    return agreed(found)


def misfit(label: Label, shape: Sequence[int | None] | None, units: int) -> str:
    """Return the reason why a tensor of a shape, None if unknown, cannot have a label; empty if it can."""
    if not isinstance(label, Rows):
        return ""
    length = shape[label.axis] if shape is not None and 0 <= label.axis < len(shape) else None
    if length is None:
        return f"has an axis of units whose length is not known: {shape}"
    if length % (units * label.inner):
        return f"has {length} entries along the axis of {units} units"
    return ""


def adding(rules: dict[str, Callable], kinds: str) -> Callable[[Callable], Callable]:
    """Return a decorator that adds a rule for some types of operations, separated by spaces."""

    def added(rule: Callable) -> Callable:
        rules.update(dict.fromkeys(kinds.split(), rule))
        return rule

    return added
