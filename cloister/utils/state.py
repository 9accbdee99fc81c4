"""State of a model: arrays that training changes without a gradient, such as the statistics of batch normalisation.

The name of an array says that it is state (`STATE`). The end of a name says that no number is below 0 (`VARIANCES`).
State travels with the trained weights, and its mean is taken beside the strategy, which does not see it.

Noise and bounds of a mechanism are in units of the weights. So under a mechanism state has `Coordinates`. One client's
state is scaled before the mechanism, from public numbers and this client's own update. The mechanism then bounds the
whole update as that of any model, so that its guarantee needs no argument about state.

| edge case | result |
|---|---|
| no state | every function returns its input |
| NaN or infinite state or weights | it stays so, for the check of the whole update |
| a variance of 0 or below | it counts as `FLOOR` |
| a sum beyond the dtype | the largest number of the dtype |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.utils.arrays import Layout, Row
from cloister.utils.cohort import Cohort

STATE = "state//"
"""Mark in the name of an array of state. No path of a Keras weight, nor name of PyTorch, has two slashes in a row."""
VARIANCES = ("variance", "running_var")
"""Ends of the names of state whose numbers are variances, in Keras and in PyTorch."""
SHARE = 0.1
"""Largest share of C² that state takes in a bounded update."""
FLOOR = 1e-3
"""Number added to each variance, as in Keras' batch normalisation, so that it has a logarithm."""


def is_state(name: str) -> bool:
    """Return whether an array of this name is state, of one model or of a hypothesis."""
    return STATE in name


def without_state(arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return the trained weights among the arrays of a model."""
    return {name: array for name, array in arrays.items() if not is_state(name)}


def only_weights(layout: Layout, rows: Sequence[Row]) -> tuple[Layout, list[Row]]:
    """Return the layout and the rows of some models without their state."""
    places = [place for place, name in enumerate(layout.names) if not is_state(name)]
    weights = Layout.of({layout.names[place]: np.empty(layout.shapes[place], layout.dtypes[place]) for place in places})
    return weights, [tuple(row[place] for place in places) for row in rows]


def with_valid_variances(arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return the arrays of a model, with every variance among its state at 0 or above."""
    return {name: np.maximum(array, 0) if _is_variance(name) else array for name, array in arrays.items()}


def averaged_state(layout: Layout, rows: Sequence[Row], weights: Sequence[float], trimmed: int) -> dict[str, NDArray]:
    """Return the mean of each array of state over some models, in double precision, by name.

    Args:
        layout: of the models.
        rows: n ≥ 1 models.
        weights: of the models in the mean, > 0, shape (n,).
        trimmed: number of values to cut off at each end, by coordinate. Above 0, the rest have equal weight.
    """
    means = {}
    for place, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
        if is_state(name):
            values = np.stack([row[place] for row in rows]).astype(np.float64)
            if trimmed:
                mean = np.sort(values, axis=0)[trimmed : len(rows) - trimmed].mean(axis=0)
            else:
                mean = np.average(values, axis=0, weights=weights)
            means[name] = mean.astype(layout.dtypes[place]).reshape(shape)
    return means


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a model in which one bound fits weights and state; public, as they follow from the model sent.

    State is its change, relative to the model sent. A mean counts in standard deviations of the variance beside it, a
    variance by its logarithm, and other state in its own units. So noise moves a variance by a factor, and no client
    moves state by more than 1 in L2. Weights stay as they are.

    Attributes:
        layout: of the model.
        sent: the global model of the round.
        bound: C of the clip that follows; 0: it is not known, and state is not bounded here.
        spreads: the variance above 0 that belongs to each array of state, by its place.
    """

    layout: Layout
    sent: Row
    bound: float
    spreads: Mapping[int, NDArray[np.float64]]

    @classmethod
    def of(cls, layout: Layout, sent: Row, bound: float = 0.0) -> "Coordinates":
        """Return the coordinates for a round.

        Args:
            layout: of the model.
            sent: the global model of the round.
            bound: C.
        """
        places = [place for place, name in enumerate(layout.names) if is_state(name)]
        found = {
            (_folder(layout.names[place]), layout.shapes[place]): np.maximum(sent[place].astype(np.float64), 0) + FLOOR
            for place in places
            if _is_variance(layout.names[place])
        }
        spreads = {
            place: found.get((_folder(layout.names[place]), layout.shapes[place]), np.ones(sent[place].shape))
            for place in places
        }
        return cls(layout, sent, bound, spreads)

    @property
    def unit(self) -> float:
        """Return the length of a change of state by 1: √`SHARE`·C."""
        return SHARE**0.5 * self.bound or 1.0

    @property
    def origin(self) -> Row:
        """Return the model sent, in these coordinates: its state is 0."""
        return tuple(np.zeros_like(piece) if place in self.spreads else piece for place, piece in enumerate(self.sent))

    def encoded(self, row: Row, factor: float = 1.0) -> Row:
        """Return a model in these coordinates.

        Args:
            row: the model.
            factor: of its state.
        """
        if not self.spreads:
            return row
        moved = self._moved(row)
        with np.errstate(all="ignore"):
            return tuple(
                (moved[place] * (factor * self.unit)).astype(piece.dtype) if place in moved else piece
                for place, piece in enumerate(row)
            )

    def bounded(self, row: Row) -> Row:
        """Return one client's model in these coordinates, scaled for the clip of the whole update.

        State is clipped to 1. If the weights are longer than what remains of C, state is lengthened as they will be
        shortened. So if the whole is clipped to C next, state keeps its length, and the weights have at least
        √(1 - `SHARE`)·C.

        Args:
            row: the trained model.
        """
        if not self.spreads or not self.bound:
            return self.encoded(row)
        length = math.hypot(*map(np.linalg.norm, self._moved(row).values()))
        factor = 1 / max(length, 1)
        rest = math.sqrt(self.bound**2 - (factor * length * self.unit) ** 2)
        layout, (sent, trained) = only_weights(self.layout, (self.sent, row))
        weights = float(Cohort.of(layout, sent, (trained,)).norms[0])
        return self.encoded(row, factor * max(weights if math.isfinite(weights) else 0.0, rest) / rest)

    def decoded(self, row: Row) -> Row:
        """Return the model of a release in these coordinates.

        No client moves state by more than 1, and so does no mean of clients: noise beyond it is cut.

        Args:
            row: the released model, finite.
        """
        if not self.spreads:
            return row
        model, moved = list(row), {place: row[place].astype(np.float64) / self.unit for place in self.spreads}
        length = math.hypot(*map(np.linalg.norm, moved.values())) if self.bound else 0.0
        for place, spread in self.spreads.items():
            largest, change = float(np.finfo(row[place].dtype).max), moved[place] / max(length, 1)
            with np.errstate(over="ignore"):
                change = spread * np.expm1(change) if self._has_variances(place) else np.sqrt(spread) * change
                model[place] = np.clip(self.sent[place] + change, -largest, largest).astype(row[place].dtype)
        return tuple(model)

    def _moved(self, row: Row) -> dict[int, NDArray[np.float64]]:
        """Return how far training has moved each array of state, by its place."""
        moved = {}
        with np.errstate(all="ignore"):
            for place, spread in self.spreads.items():
                trained = row[place].astype(np.float64)
                if self._has_variances(place):
                    moved[place] = np.log((np.maximum(trained, 0) + FLOOR) / spread)
                else:
                    moved[place] = (trained - self.sent[place]) / np.sqrt(spread)
        return moved

    def _has_variances(self, place: int) -> bool:
        return _is_variance(self.layout.names[place])


def _is_variance(name: str) -> bool:
    return is_state(name) and name.endswith(VARIANCES)


def _folder(name: str) -> str:
    """Return the layer of an array: Keras separates names by `/`, PyTorch by `.`."""
    return name[: max(name.rfind("/"), name.rfind("."))]
