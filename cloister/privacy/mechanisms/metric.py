"""Metric-aware noise: distances between the models of a round, and the scale of the noise that follows them.

The distance of a cohort is the largest distance of any pair of clients, or the root mean square over all pairs.
Distances are plugins: `Distance` objects. The built-in ones use Gram matrices, G = U·Uᵀ per array, in float64,
computed block by block: one pass over memory for any number of pairs.

| edge case | the distance |
|---|---|
| empty cohort, one client | 0: there is no pair |
| clients that agree | 0, also where rounding would make it negative |
| zero update | as for any other; `cosine` gives 1, and 0 between two zero updates, which have no direction |
| NaN or infinite update | screening has rejected it |
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event, Gaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.mechanism import NOTHING_SEEN, Contributions, Diagnostics, Parameter
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort, updates
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.registry import Registry
from cloister.utils.threads import spans

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Distance:
    """Distance between the updates of clients.

    Attributes:
        pairwise: the n x n matrix of distances of a cohort.
        largest: upper bound of the distance of two clients whose updates are clipped to C, for a model of L arrays.
            The distance of a cohort is between 0 and this bound. So the bound is its sensitivity to one client, for
            adding, removing and replacing. Infinite if there is no such bound.
        averaged: whether the distance of a cohort is the root mean square of all pairs, not the largest pair.
    """

    pairwise: Callable[[Cohort], Matrix]
    largest: Callable[[float, int], float]
    averaged: bool = False

    def of(self, cohort: Cohort) -> float:
        """Return the distance of a cohort; 0 for fewer than two clients.

        Args:
            cohort: of n updates.
        """
        if not self.averaged:
            return largest_distance(cohort, self.pairwise)
        count = len(cohort)
        return math.sqrt(float(np.sum(self.pairwise(cohort) ** 2)) / (count * (count - 1))) if count > 1 else 0.0


DISTANCES = Registry(
    "distance",
    "cloister.distances",
    {
        "mean-layer-frobenius": "cloister.privacy.mechanisms.metric:MEAN_LAYER_FROBENIUS",
        "l2": "cloister.privacy.mechanisms.metric:L2",
        "cosine": "cloister.privacy.mechanisms.metric:COSINE",
        "rms": "cloister.privacy.mechanisms.metric:RMS",
    },
    "privacy.distance",
)

GRAM_BYTES = 32 << 20
"""Largest scratch for one block of the Gram matrices, in bytes; wider blocks mean fewer matrices to sum."""
WIDEST = 1 << 14
"""Largest number of columns of a block: more give no speed-up."""


def largest_distance(cohort: Cohort, pairwise: Callable[[Cohort], Matrix]) -> float:
    """Return the largest distance between two clients; 0 for fewer than two.

    A Gram matrix loses digits if clients nearly agree, but suffices to find the pair. The distance of that pair is then
    computed again from its two updates alone: centred at one of them, it has no cancellation.

    Args:
        cohort: of n updates.
        pairwise: returns the n x n matrix of their distances.
    """
    if len(cohort) < 2:
        return 0.0
    matrix = pairwise(cohort)
    if len(cohort) == 2:
        return float(matrix[0, 1])
    upper = np.triu_indices(len(cohort), k=1)
    winner = int(np.argmax(matrix[upper]))
    return largest_distance(cohort.take(np.array([upper[0][winner], upper[1][winner]])), pairwise)


def mean_layer_frobenius(cohort: Cohort) -> Matrix:
    """Compute (1/L) Σ_ℓ ‖w_i(ℓ) - w_j(ℓ)‖_F over the model's L arrays.

    Weights and biases both count. With updates clipped to C it is at most 2C/√L: by Cauchy and Schwarz the sum of L
    norms is at most √L times the norm of the whole difference, and that is at most 2C. Two opposed clients whose
    updates are spread evenly over all arrays reach it, and it is 0 if all clients agree. So one client can move it
    over its whole range.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1.
    """
    return _total(cohort, map(np.sqrt, _squared_distances(cohort))) / len(cohort.layout.names)


def l2(cohort: Cohort) -> Matrix:
    """Compute ‖w_i - w_j‖₂ over all parameters; at most 2C in a ball of radius C."""
    return np.sqrt(_total(cohort, _squared_distances(cohort)))


def cosine(cohort: Cohort) -> Matrix:
    """Compute 1 - cos(U[i], U[j]): 0 for equal directions, 2 for opposite ones.

    An update of norm 0 has no direction; its distance to any other is 1, and to another such update 0. Clipping does
    not change a direction; the bound is 2 for every C.
    """
    gram = total_gram(cohort)
    norms = np.sqrt(np.diag(gram))
    still = norms == 0
    unit = np.where(still, 1.0, norms)
    distances = 1 - gram / np.outer(unit, unit)
    distances[np.ix_(still, still)] = 0.0
    return np.clip(distances, 0.0, 2.0)


MEAN_LAYER_FROBENIUS = Distance(mean_layer_frobenius, lambda bound, arrays: 2 * bound / math.sqrt(arrays))
L2 = Distance(l2, lambda bound, arrays: 2 * bound)
RMS = Distance(l2, lambda bound, arrays: 2 * bound, averaged=True)
COSINE = Distance(cosine, lambda bound, arrays: 2.0)


def total_gram(cohort: Cohort) -> Matrix:
    """Return the Gram matrix of the bounded updates, not centred, in float64."""
    return _total(cohort, layer_grams(cohort, centred=False))


def layer_grams(cohort: Cohort, centred: bool = True) -> Iterator[Matrix]:
    """Yield the Gram matrix of the bounded updates, array by array, in float64.

    Args:
        cohort: of n updates; each is multiplied by its factor.
        centred: whether the first update is subtracted from all. Differences stay the same and lose fewer digits.

    Yields:
        n x n matrices.
    """
    count = len(cohort)
    width = min(WIDEST, max(256, GRAM_BYTES // (8 * max(1, count))))
    block, product = np.empty(width * count), np.empty((count, count))
    for _, stretches in groupby(spans(cohort.layout.sizes, width), key=lambda span: span.layer):
        gram = np.zeros((count, count))
        for span in stretches:
            columns = updates(cohort.rows, cohort.sent, span, block)
            if (cohort.factors != 1).any():
                columns *= cohort.factors[:, None]
            if centred:
                # A copy: the subtraction overwrites the first row with zeros.
                columns -= columns[:1].copy()
            gram += np.matmul(columns, columns.T, out=product)
        yield gram


def _squared_distances(cohort: Cohort) -> Iterator[Matrix]:
    """Yield ‖u_i - u_j‖² = G_ii + G_jj - 2 G_ij, array by array, never below 0."""
    for gram in layer_grams(cohort):
        norms = np.diag(gram)
        yield np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)


def _total(cohort: Cohort, matrices: Iterable[Matrix]) -> Matrix:
    """Return the sum of matrices of a cohort's pairs; zeros if there are none."""
    return sum(matrices, np.zeros((len(cohort), len(cohort))))


@dataclass(frozen=True)
class Scaling:
    """Scale of the noise in one round.

    Attributes:
        factor: of the multiplier.
        released: the released distance; None: no release.
        diagnostics: the un-noised distance, and a hint for the bound.
    """

    factor: float = 1.0
    released: float | None = None
    diagnostics: Diagnostics = NOTHING_SEEN


@dataclass(frozen=True)
class Constant:
    """Scale of fixed-clip global differential privacy: the same multiplier in every round."""

    mechanism = "global-dp"

    @property
    def skips_empty_rounds(self) -> bool:
        """Return False: a guarantee needs a release with any number of replies."""
        return False

    @property
    def amplified(self) -> bool:
        """Return True: a draw amplifies the one release of a round."""
        return True

    @property
    def compares_clients(self) -> bool:
        """Return whether it needs the updates of a round together."""
        return False

    def refuse_with(self, clip: FixedClip) -> None:
        """Accept any clip: the noise is fixed beforehand."""

    def refuse_canaries(self) -> None:
        """Accept canaries: the noise does not depend on any client."""

    def events(self) -> tuple[Event, ...]:
        """Return the releases beside the sum: none."""
        return ()

    def minimum(self, clip: FixedClip, layout: Layout) -> float:
        """Return the smallest factor of any round.

        Args:
            clip: of the mechanism.
            layout: of the model.
        """
        return 1.0

    def factors(self, bound: float, layout: Layout) -> tuple[float, float]:
        """Return the smallest and the largest factor of a round; 0 or ∞: no limit.

        Args:
            bound: C in force.
            layout: of the model.
        """
        return 1.0, 1.0

    def limits(self, bound: float, layout: Layout) -> tuple[float, float]:
        """Return the limits of the distance.

        Args:
            bound, layout: as in `factors`.
        """
        return 1.0, 1.0

    def at(self, distance: float, bound: float, layout: Layout) -> float:
        """Return the factor of a round with a distance.

        Args:
            distance: d, computed or received.
            bound, layout: as in `factors`.
        """
        return 1.0

    def widest(self, bound: float, layout: Layout) -> float:
        """Return the largest factor of a round, if the factor is private; 0: it is public.

        Args:
            bound, layout: as in `factors`.
        """
        return 0.0

    def of(self, contributions: Contributions, bounded: Cohort) -> Scaling:
        """Return the scaling of a round.

        Args:
            contributions: of the round, before clipping.
            bounded: their clipped cohort.
        """
        return Scaling()

    def caveats(self) -> tuple[str, ...]:
        """Return no caveats."""
        return ()

    def parameters(self) -> dict[str, Parameter]:
        """Return no parameters."""
        return {}


CONSTANT = Constant()


@dataclass(frozen=True, kw_only=True)
class DistanceScaled(Constant):
    """Scale by the distance d of the clients, which divides or multiplies the multiplier: σ = (z/d)·C/n.

    Attributes:
        distance: a registered distance, the largest of two clients for most; `mean-layer-frobenius` in the paper.
        direction: `divide` the multiplier by the distance (the paper's formula and code) or `multiply` (its text).
        measure: the distance `after` clipping (bounded: one client cannot reduce the noise to zero) or `before`
            (the paper's Algorithm 1 and code).
        release: `exact` uses the un-noised distance; `private` releases it first, with noise of its own.
        distance_multiplier: z_d of the release of the distance.
        min_distance, max_distance: limits of d; `max_distance` 0 is the largest possible distance. `min_distance` may
            be 0 with `exact`, as published; a round whose distance is 0 then fails under `divide`.

    Guarantee: with `exact` none: the distance comes from private data, is not noised, and scales the noise. So z/d is a
        nominal figure, and no ε may be derived from it. With `private` and `after`: each round is two Gaussian
        releases, of the distance with z_d and of the sum with at least the multiplier at the limit of d. The charge is
        that of this limit, so that it does not depend on earlier releases; the real noise of a round is at least that.

    Raises:
        ConfigError: a parameter is out of range, or no noise covers the distance.

    Source: Sáinz-Pardo Díaz et al. (2026), Algorithm 1 and Appendix G; the private release is ours.
    """

    distance: str = "mean-layer-frobenius"
    direction: Literal["divide", "multiply"] = "divide"
    measure: Literal["after", "before"] = "after"
    release: Literal["exact", "private"] = "exact"
    distance_multiplier: float = 1.0
    min_distance: float = 0.1
    max_distance: float = 0.0

    mechanism = "metric"

    def __post_init__(self) -> None:
        check.one_of(("divide", "multiply"), distance_direction=self.direction)
        check.one_of(("after", "before"), distance_clip=self.measure)
        check.one_of(("exact", "private"), distance_release=self.release)
        check.positive(distance_noise_multiplier=self.distance_multiplier)
        check.non_negative(min_distance=self.min_distance, max_distance=self.max_distance)
        DISTANCES.load(self.distance)
        if self.release == "private" and not self.min_distance:
            raise ConfigError(
                "privacy.min-distance = 0 needs privacy.distance-release = 'exact', which claims no ε; with 'private' "
                "set a minimum above 0"
            )
        if self.release == "private" and self.measure == "before":
            raise ConfigError(
                "privacy.distance-release = 'private' needs privacy.distance-clip = 'after': before clipping no noise "
                "covers what one client can do to the distance"
            )

    @property
    def is_exact(self) -> bool:
        """Return whether the distance is used without noise."""
        return self.release == "exact"

    @property
    def skips_empty_rounds(self) -> bool:
        """Return whether the distance is exact, without a guarantee to keep."""
        return self.is_exact

    @property
    def compares_clients(self) -> bool:
        """Return True: the distance of two clients needs the updates of a round together."""
        return True

    @property
    def amplified(self) -> bool:
        """Return False: a draw amplifies neither of the two releases of a round.

        Both use the same draw, and the second release depends on the first.
        """
        return False

    def refuse_with(self, clip: FixedClip) -> None:
        """Raise ConfigError if the noise has no minimum that is known beforehand."""
        if self.release == "private" and isinstance(clip, AdaptiveClip) and not self.max_distance:
            raise ConfigError(
                "privacy.distance-release = 'private' with privacy.clipping = 'adaptive' needs privacy.max-distance "
                "above 0: the limit of the distance moves with the clip, so no minimum of the noise is known beforehand"
            )

    def refuse_canaries(self) -> None:
        """Raise ConfigError: canaries would determine the distance."""
        raise ConfigError(
            "privacy.canaries contradicts privacy.server = 'metric': canaries would decide the distance of clients, "
            "and with it the noise; use 'global-dp', or 0 canaries"
        )

    def events(self) -> tuple[Event, ...]:
        """Return the release of the distance, if any."""
        return () if self.is_exact else (Gaussian(self.distance_multiplier),)

    def minimum(self, clip: FixedClip, layout: Layout) -> float:
        """Return the factor at the limit of the distance in any round.

        An adaptive clip moves the geometric limit, so that only the configured one counts.

        Args:
            clip: of the mechanism.
            layout: of the model.
        """
        if self.is_exact:
            return 1.0
        adaptive = isinstance(clip, AdaptiveClip)
        maximum = max(self.min_distance, self.max_distance) if adaptive else self._maximum(clip.bound, layout)
        return 1 / maximum if self.direction == "divide" else self.min_distance

    def factors(self, bound: float, layout: Layout) -> tuple[float, float]:
        """Return the factors at the limits of the distance.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        low, high = self.limits(bound, layout)
        return (1 / high, 1 / low if low else math.inf) if self.direction == "divide" else (low, high)

    def limits(self, bound: float, layout: Layout) -> tuple[float, float]:
        """Return the limits of the distance.

        They are configured; for a private release the geometric one applies too.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        return self.min_distance, self._maximum(bound, layout)

    def at(self, distance: float, bound: float, layout: Layout) -> float:
        """Return 1/d or d, held between its limits, and so at least `minimum`.

        Args:
            distance, bound, layout: as in `Constant.at`.

        Raises:
            PrivacyError: d is 0 and divides.
        """
        low, high = self.limits(bound, layout)
        held = min(max(distance, low), high)
        if self.direction == "divide" and held < sys.float_info.min:
            raise PrivacyError(
                "privacy.min-distance = 0, and the distance of this round, which divides the noise, is 0; "
                "set a minimum above 0"
            )
        return 1 / held if self.direction == "divide" else held

    def widest(self, bound: float, layout: Layout) -> float:
        """Return the largest factor if the distance is exact, and so private; else 0.

        Args:
            bound, layout: as in `Constant.factors`.
        """
        return self.factors(bound, layout)[1] if self.is_exact else 0.0

    def of(self, contributions: Contributions, bounded: Cohort) -> Scaling:
        """Return the scaling of a round, 1/d or d, with d held between its limits.

        If the distance is private, it is released first.

        Args:
            contributions: of the round, before clipping.
            bounded: their clipped cohort.
        """
        raw, bound = contributions.cohort, bounded.l2_bound
        distance = self._distance.of(raw if self.measure == "before" else bounded)
        # The paper's c̄: the largest L2 distance of two models in the first round, before clipping.
        hint = largest_distance(raw, L2.pairwise) if self.is_exact and contributions.server_round == 1 else None
        released = None if self.is_exact else self.noised(distance, bounded, contributions.noise)
        used = distance if released is None else released
        factor = self.at(used, bound, bounded.layout)
        return Scaling(factor, released, Diagnostics(clip_calibration=hint, distance=distance))

    def noised(self, distance: float, bounded: Cohort, noise: GaussianNoise) -> float:
        """Return d, rounded up to a public grid, with noise of deviation z_d·Δ.

        Δ is the largest possible distance.

        Args:
            distance: d.
            bounded: its cohort.
            noise: source of the key of the noise.

        Guarantee: the noise is added to an integer from 0 to D, D steps being Δ, and its law is exact. For any
            rounding error of d, one client moves that integer by at most D.

        Raises:
            PrivacyError: the distance has no bound after clipping.
        """
        limit = self._limit(bounded.l2_bound, bounded.layout)
        grid = Grid.of(limit, self.distance_multiplier, 1)
        # The limit is the sensitivity: a plugin's distance above its own limit is held to it; NaN is 0.
        held = min(max(0.0, distance), limit)
        return grid.noised(min(math.ceil(held / limit * grid.steps), grid.whole(1)), noise)

    @property
    def _distance(self) -> Distance:
        return DISTANCES.load(self.distance)

    def _limit(self, bound: float, layout: Layout) -> float:
        """Return the largest distance of two clients clipped to `bound`, for this model."""
        limit = self._distance.largest(bound, len(layout.names))
        if not 0 < limit < math.inf:
            raise PrivacyError(
                f"privacy.distance = {self.distance!r} has no bound after clipping, so no noise covers its release"
            )
        return limit

    def _maximum(self, bound: float, layout: Layout) -> float:
        """Return the upper limit of d, configured or, if private, also geometric."""
        if self.is_exact:
            return self.max_distance or math.inf
        return max(self.min_distance, min(self.max_distance or math.inf, self._limit(bound, layout)))

    def caveats(self) -> tuple[str, ...]:
        """Return the caveat that an exact distance is not noised."""
        if not self.is_exact:
            return ()
        exact = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
        if self.measure == "before":
            exact += ", and before clipping one client can drive the noise to nothing"
        return (exact,)

    def parameters(self) -> dict[str, Parameter]:
        """Return the parameters of the distance, by configuration key."""
        return {
            "privacy.distance": self.distance,
            "privacy.distance-direction": self.direction,
            "privacy.distance-clip": self.measure,
            "privacy.distance-release": self.release,
            "privacy.distance-noise-multiplier": self.distance_multiplier,
            "privacy.min-distance": self.min_distance,
            "privacy.max-distance": self.max_distance,
        }
