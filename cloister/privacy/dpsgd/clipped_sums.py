"""Clipped sum of a batch of any size.

A model whose graph is proved to keep units apart is computed in rows (`in_rows`): calls of fixed shape, in which each
unit has a place by a secret lot. Any other model is computed in turn (`in_turn`): one unit after another.

In rows, kernels may compute a unit differently at another place. So a unit's place must not depend on the other units.
The batch has M places or a few more, by its expected size alone (`batches.places_of`). The lot gives each of n < M
units one of them, every choice being equally likely. An additional unit gets one of the empty places, each with the
same probability, and all other units keep their places.

**Assumption.** The result held of unit x at place s is g(s, x, ω): a function of the place, the unit, and random
numbers ω of the calls that depend on no unit. `isolation` proves this of the graph; that kernels keep rows apart is a
premise. A unit that raises an exception contributes zero, and whether it does must depend on this unit alone.

**Claim.** A step is dominated by a Poisson-sampled Gaussian mechanism of sensitivity S, except in an event of
probability at most β = `OVERFLOW`. So T steps that would be (ε, δ)-DP are (ε, δ + T·β)-DP.

**Shares.** A unit may be clipped to c·S in place of S, for a share c in (0, 1]. If c is a function of the unit alone,
so is its contribution, and its norm is at most c·S ≤ S. So assumption, claim and proof hold for any shares. Numbers
outside of (0, 1] count as its nearest end, NaN as 1.

**Proof.** Take any other units, those B' that were drawn, n = |B'| < M, their places π, and ω. If x is drawn too, the
lot is uniform over injective choices for B' and x. Restricted to B' it is uniform, and the place of x is uniform over
the empty ones. So there is a coupling in which all units of B' keep places and random numbers. Let a be their clipped
sum, N(a) the release of a sum a, and q the sampling rate. Without x the release is N(a). With x it is
(1 - q)·N(a) + q·N(a + g), where ‖g‖ ≤ S, roundings of a sum of at most M units included. That is the pair of a
Poisson-sampled Gaussian mechanism of sensitivity S. B', π and ω have the same law in both worlds. The hockey-stick
divergence is jointly convex, so a mixture over them is no worse, in either direction. Domination holds at every ε, so
it carries over to Rényi divergences and to composition. In the event n ≥ M nothing is claimed. Its probability is at
most β, the same in both worlds, and depends on no earlier release.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.dpsgd.batches import Draws, Members, places_of
from cloister.privacy.dpsgd.nested import Examples, Probe, as_probed, take
from cloister.privacy.dpsgd.noise import check_clipping_norm
from cloister.utils.arrays import Tensor
from cloister.utils.crash import note_failure
from cloister.utils.errors import ConfigError
from cloister.utils.threads import in_threads

EMPTY = -1
"""Number of the unit at an empty place."""
SMALLEST_SHARE = 1e-200
"""Least share of S that a unit is clipped to: a bound of 0 would divide a gradient of 0 by 0."""


@dataclass(frozen=True)
class ClippedSum:
    """Clipped sum without noise: not for release.

    Attributes:
        sums: a float array for each trainable variable, in the model's order.
        examples: number of units in the batch: examples, or groups of them.
        clipped: number of units that were scaled down to the bound.
        non_finite: number of units without a finite gradient, which contributed zero.
    """

    sums: tuple[NDArray, ...]
    examples: int
    clipped: int
    non_finite: int


class Sums(NamedTuple):
    """Clipped sum of some units without noise, and counts.

    Attributes:
        arrays: for each trainable variable.
        clipped, non_finite: as in `ClippedSum`.
    """

    arrays: list[NDArray]
    clipped: int
    non_finite: int

    @classmethod
    def of(cls, arrays: Sequence[Tensor], clipped: Tensor, non_finite: Tensor) -> "Sums":
        """Return the result of a call as NumPy arrays and integers."""
        return cls([np.asarray(array) for array in arrays], int(clipped), int(non_finite))


class Call(NamedTuple):
    """Units of one call of an engine.

    Attributes:
        x, y: cap examples for each unit, adjacent.
        mask: shape (units, cap), False for padding; a unit without any has an empty place, and not all have.
        bound: above 0, for each unit or for all.
        seeds: from `Engine.seeds`; if there are no fixed places, those of the units.
        taken: fixed places of all units of the call, in order, those that now are left out included. Rounds, rows and
            random numbers follow from it. None: of the units in the mask.
    """

    x: Examples
    y: Examples
    mask: NDArray
    bound: NDArray | float
    seeds: NDArray[np.int64]
    taken: NDArray[np.intp] | None = None

    @property
    def shares(self) -> NDArray[np.float64]:
        """Return each example's share in the loss of its unit, in the shape of the mask."""
        return self.mask / np.maximum(self.mask.sum(axis=1, keepdims=True), 1)


class Engine(Protocol):
    """Computation of some units of one model, in its framework.

    Attributes:
        method: `rows` or `in turn`.
        in_fixed_places: whether each call has a row for each of `places` places, empty ones included.
        places: largest number of units in a call.
        threads: number of concurrent calls.
        overstatement: η, the margin of the bound for roundings of a sum.
        kernels: form of the gradients of each variable in rows, by its path.
    """

    method: str
    in_fixed_places: bool
    places: int
    threads: int
    overstatement: float
    kernels: dict[str, str]

    def seeds(self, draws: Draws) -> NDArray[np.int64]:
        """Return the seeds of a call; if it has no fixed places, separate ones for each unit."""

    def __call__(self, call: Call) -> Sums:
        """Return Σ gradient·min(1, bound/‖gradient‖) over the units of a call."""


class ClippedSums:
    """Clipped sums of batches of a model's examples.

    Args:
        engine: computation of the units.
        like: arrays of the shapes and dtypes of the trainable variables.
        probe, batch_size, group_cap: as in `step.DpSgd`.

    Attributes:
        engine: as given.
        draws: of places, and of random layers.

    Guarantee: one unit's joining or leaving a batch of fewer than M units moves the sum by at most S in L2. That holds
        for any weights and inputs, and for each fixed choice of the other units' places and random numbers. In rows,
        it needs the assumptions of the engine.
    """

    def __init__(self, engine: Engine, like: Sequence[NDArray], probe: Probe, batch_size: int, group_cap: int) -> None:
        self.engine, self._like, self._probe = engine, like, probe
        self._cap, self._room = group_cap, places_of(batch_size)
        self.draws = Draws()

    def of(
        self,
        x: Examples,
        y: Examples,
        clipping_norm: float,
        groups: NDArray | None = None,
        shares: NDArray | None = None,
    ) -> ClippedSum:
        """Return Σ gradient·min(1, c·S/‖gradient‖) over the units of a batch, with S/(1 + η) in the place of S.

        Args:
            x, y: n examples.
            clipping_norm: S.
            groups: shape (n,): examples with the same value are one unit. None: each example is one.
            shares: shape (n,), each a function of its own example. The share c of a unit is the mean of its examples'
                shares. None: every c is 1.

        Raises:
            ConfigError: S is out of range, lengths differ, or groups are missing.
        """
        check_clipping_norm(clipping_norm)
        x, y, count = as_probed(x, y, self._probe)
        if groups is None and self._cap > 1:
            raise ConfigError(f"groups must be given where group_cap is {self._cap}")
        for name, given in (("groups", groups), ("shares", shares)):
            if given is not None and len(given) != count:
                raise ConfigError(f"{name} must have the length of x and y, {count}; got {len(given)}")
        units = Members(np.arange(count) if groups is None else groups)
        own = np.ones(len(units)) if shares is None else np.fmax(np.fmin(units.means(shares), 1.0), SMALLEST_SHARE)
        bounds = clipping_norm / (1 + self.engine.overstatement) * own
        calls = [(numbers, self.engine.seeds(self.draws)) for numbers in self._calls(len(units))]

        def computed(call: tuple[NDArray[np.intp], NDArray[np.int64]]) -> list[Sums]:
            return list(self._computed(x, y, units, call[0], bounds, call[1], np.flatnonzero(call[0] != EMPTY)))

        total: list[NDArray] = []
        clipped, non_finite = 0, 0
        for found in itertools.chain.from_iterable(in_threads(computed, calls, self.engine.threads)):
            # In double precision; the first summand stays unchanged.
            pairs = zip(total, found.arrays, strict=True)
            total = [np.add(old, new, dtype=np.float64) for old, new in pairs] if total else found.arrays
            clipped, non_finite = clipped + found.clipped, non_finite + found.non_finite
        return ClippedSum(tuple(total or self._nothing()), len(units), clipped, non_finite)

    def _nothing(self) -> list[NDArray]:
        return [np.zeros(array.shape, array.dtype) for array in self._like]

    def _calls(self, count: int) -> Iterator[NDArray[np.intp]]:
        """Yield the unit at each place of each call with units; other calls would add zero.

        If there are more units than places, which is next to impossible for a Poisson batch, places are added.
        """
        if not self.engine.in_fixed_places:
            parts = max(-(-count // self.engine.places), min(count, self.engine.threads))
            yield from np.array_split(np.arange(count), parts) if count else ()
            return
        calls = -(-max(self._room, count) // self.engine.places)
        lot = np.full(calls * self.engine.places, EMPTY)
        lot[self.draws.places(count, len(lot))] = np.arange(count)
        yield from (call for call in lot.reshape(calls, -1) if (call != EMPTY).any())

    def _computed(
        self,
        x: Examples,
        y: Examples,
        units: Members,
        numbers: NDArray[np.intp],
        bounds: NDArray,
        seeds: NDArray[np.int64],
        taken: NDArray[np.intp],
    ) -> Iterator[Sums]:
        """Yield sums and counts, each unit clipped to its bound; a unit that raises contributes zero.

        The other units keep their places and random numbers, those that `taken` gives them. An empty place repeats a
        unit: an example of zeros could raise an exception that the units do not raise.
        """
        drawn = np.flatnonzero(numbers != EMPTY)
        placed, own = np.where(numbers == EMPTY, numbers[drawn[0]], numbers), seeds
        table, mask = units.table(placed, self._cap)
        mask[numbers == EMPTY] = False
        if not self.engine.in_fixed_places:
            placed, own, table, mask = placed[drawn], own[drawn], table[drawn], mask[drawn]
        try:
            given = take(x, table.ravel()), take(y, table.ravel())
            yield self.engine(Call(*given, mask, bounds[placed], own, taken))
        except Exception as error:  # of any kind: the sum of the other units must not depend on it
            if len(drawn) == 1:
                note_failure(error)
                yield Sums(self._nothing(), 0, 1)
                return
            for half in np.array_split(drawn, 2):
                kept = np.full_like(numbers, EMPTY)
                kept[half] = numbers[half]
                yield from self._computed(x, y, units, kept, bounds, seeds, taken)
