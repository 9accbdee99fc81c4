"""Clipping of one client's contribution, by a fixed bound or by one that follows a quantile of the norms.

| edge case | result |
|---|---|
| zero update | it keeps factor 1, and counts as within the bound |
| NaN or infinite update | screening has rejected it: norms are finite here |
| empty cohort | an empty cohort with clipped fraction 0; an adaptive bound moves by its noise alone |
| one client | same as for any other number: updates are clipped independently |
| bound 0, below `MIN_BOUND`, NaN or infinite | refused |
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils import check
from cloister.utils.arrays import State
from cloister.utils.cohort import NORM_ERROR, Cohort
from cloister.utils.errors import ConfigError

MIN_BOUND = 1e-12
"""Smallest bound. Float32 loses the squares of numbers below 1e-19; together they have a norm below this bound."""
MAX_BOUND = 1e30
"""Largest adaptive bound: noise of this size still fits into float32."""
MAX_RATE = 10.0
"""Largest rate η of an adaptive bound. A round moves the bound by at most e^η, here 22,000."""


def clip(cohort: Cohort, bound: float) -> Cohort:
    """Set the factors that scale every update into the L2 ball of radius `bound`; sums multiply by them.

    The factor is min(1, bound/‖U[i]‖), with the norm over all arrays together. An update of norm 0 is legal and keeps
    factor 1. The function first adds the rounding error to each norm. So the bound holds for the true norm.

    Args:
        cohort: of n unbounded updates.
        bound: C > 0, in units of the weights.

    Returns:
        The same updates with ‖factors[i]·U[i]‖₂ ≤ `bound` for every i, and `l2_bound = bound`.

    Raises:
        ConfigError: `bound` is not a finite number of at least `MIN_BOUND`.

    Source: McMahan et al. (2018), arXiv:1710.06963, §3.

    Examples:
        >>> from cloister.utils.arrays import Layout
        >>> sent, short, long = {"w": np.zeros(2)}, {"w": np.array([0.3, 0.4])}, {"w": np.array([3.0, 4.0])}
        >>> layout = Layout.of(sent)
        >>> cohort = Cohort.of(layout, layout.rows(sent), (layout.rows(short), layout.rows(long)))
        >>> cohort.norms.round(3).tolist()
        [0.5, 5.0]
        >>> clipped = clip(cohort, 1.0)
        >>> clipped.factors.round(3).tolist(), clipped.l2_bound
        ([1.0, 0.2], 1.0)
    """
    check.positive(clipping_norm=bound)
    if bound < MIN_BOUND:
        raise ConfigError(f"clipping_norm must be at least {MIN_BOUND:g}, got {bound}")
    return replace(cohort, factors=bound / np.maximum(cohort.norms * (1 + NORM_ERROR), bound), l2_bound=bound)


def clipped_fraction(cohort: Cohort) -> float:
    """Return the share of updates that the clip shortened. It has no noise: do not release it."""
    return float(np.mean(cohort.factors < 1)) if len(cohort) else 0.0


def capped_weights(cohort: Cohort, examples: tuple[float, ...], cap: float) -> Cohort:
    """Weight each bounded update by w = min(n/cap, 1) of its example count n.

    Since no weight is above 1, the bound of the cohort holds for any reported count.

    Args:
        cohort: of n bounded updates.
        examples: the n reported example counts, each above 0.
        cap: ŵ > 0, in examples.

    Returns:
        The same updates with ‖factors[i]·U[i]‖₂ ≤ w[i]·`l2_bound`.

    Source: McMahan et al. (2018), arXiv:1710.06963, §3 (weights capped at ŵ).

    Raises:
        ConfigError: the cap is not above 0.
    """
    check.positive(examples_cap=cap)
    weights = np.minimum(np.array(examples) / cap, 1.0)
    return replace(cohort, factors=cohort.factors * weights)


def heaviest(quantile: float) -> float:
    """Return max(γ, 1 - γ), one client's largest part in an adaptive clip's sum."""
    return max(quantile, 1 - quantile)


def quantized_indicators(grid: Grid, quantile: float) -> tuple[int, int]:
    """Return what a client adds to an adaptive clip's sum, in steps.

    The first is for an update within the bound, the second for one outside.

    Args:
        grid: of the sum; its bound is `heaviest(quantile)`.
        quantile: γ.

    Returns:
        1 - γ and -γ in whole steps, truncated toward zero. Neither exceeds the bound's number of steps.
    """
    return grid.whole((1 - quantile) / grid.bound), grid.whole(-quantile / grid.bound)


@dataclass(frozen=True)
class FixedClip:
    """Clipping norm that is the same in every round.

    Attributes:
        bound: C > 0, in units of the weights.
    """

    bound: float

    def __post_init__(self) -> None:
        check.positive(clipping_norm=self.bound)

    def parameters(self) -> dict[str, float | str | bool]:
        """Return the clip's parameters, by configuration key."""
        return {"privacy.clipping": "fixed", "privacy.clipping-norm": self.bound}

    def refuse_canaries(self) -> None:
        """Accept canaries: they do not move a fixed bound."""

    def joint_multiplier(self, noise_multiplier: float) -> float:
        """Return z of all releases of a round together: here of the noised sum alone."""
        return noise_multiplier

    def followed(self, cohort: Cohort, size: float, noise: GaussianNoise) -> "FixedClip":
        """Return the clip of the next round: this one.

        Args:
            cohort, size, noise: as in `AdaptiveClip.followed`.
        """
        return self

    def state_dict(self) -> State:
        """Return an empty state: a fixed clip has none."""
        return {}

    def restored(self, state: State) -> "FixedClip":
        """Return this clip with a saved state."""
        return self


@dataclass(frozen=True)
class AdaptiveClip(FixedClip):
    """Clipping norm that follows a quantile γ of the norms of the updates.

    Each round clips and noises updates with C. It also releases a noised share of the updates of norm at most C. Then
    C ← C·exp(-η·(share - γ)). To the sum, an update within the bound adds 1 - γ, one outside adds -γ, and a client
    without a reply adds 0. So C converges to the quantile of the clients that reply. One client's joining or leaving
    moves the sum by at most max(γ, 1 - γ), which is ½ for the median.

    Attributes:
        bound: C in force.
        quantile: γ, between 0 and 1.
        rate: η > 0, at most `MAX_RATE`.
        bits_multiplier: z_b > 0; the noise on the sum has standard deviation z_b·max(γ, 1 - γ).
        initial: C of the first round, or 0 during it.

    Guarantee: the two sums of a round, of updates and of bits, are together one Gaussian release of multiplier
        (z⁻² + z_b⁻²)^(-½). Both are sums of whole numbers with exact noise (`cloister.privacy.mechanisms.grid`).

    Source: Andrew et al. (2021), arXiv:1905.03871, Algorithm 1 and Theorem 1. They centre bits at ½
        for every γ, this class at γ.
    """

    quantile: float = 0.5
    rate: float = 0.2
    bits_multiplier: float = 10.0
    initial: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive(clipping_rate=self.rate, clipping_count_noise_multiplier=self.bits_multiplier)
        if self.rate > MAX_RATE:
            raise ConfigError(f"clipping_rate must be <= {MAX_RATE:g}, got {self.rate:g}")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"clipping_quantile must be above 0 and below 1, got {self.quantile}")

    def parameters(self) -> dict[str, float | str | bool]:
        """Return the clip's parameters, by configuration key."""
        return {
            "privacy.clipping": "adaptive",
            "privacy.clipping-norm": self.initial or self.bound,
            "privacy.clipping-quantile": self.quantile,
            "privacy.clipping-rate": self.rate,
            "privacy.clipping-count-noise-multiplier": self.bits_multiplier,
        }

    def refuse_canaries(self) -> None:
        """Raise ConfigError: canaries would drive an adaptive bound."""
        raise ConfigError(
            "privacy.canaries contradicts privacy.clipping = 'adaptive': canaries are longer than the clip, and would "
            "drive the quantile that it follows; use 'fixed', or 0 canaries"
        )

    def joint_multiplier(self, noise_multiplier: float) -> float:
        """Return z of both noised sums together."""
        if noise_multiplier == 0:
            return 0.0
        return 1 / math.hypot(1 / noise_multiplier, 1 / self.bits_multiplier)  # no square of a tiny number overflows

    def followed(self, cohort: Cohort, size: float, noise: GaussianNoise) -> "AdaptiveClip":
        """Release the share of norms within the bound, and return the moved clip.

        Args:
            cohort: of this round, with its norms before clipping.
            size: the public number of clients the share is taken over.
            noise: for the share.
        """
        grid = Grid.of(heaviest(self.quantile), self.bits_multiplier, len(cohort))
        within = int(np.sum(cohort.norms <= self.bound))
        # Each client adds one of two public whole numbers, so their sum is exact.
        inside, outside = quantized_indicators(grid, self.quantile)
        noisy = grid.noised(within * inside + (len(cohort) - within) * outside, noise)
        return self.moved(noisy / size)

    def moved(self, share: float) -> "AdaptiveClip":
        """Return this clip, moved towards its quantile.

        Args:
            share: noised share of the clients within the bound, minus γ.
        """
        # An exact share lies within this range. A noised one is cut to it: noise moves the bound no further.
        step = min(1 - self.quantile, max(-self.quantile, share))
        moved = self.bound * math.exp(-self.rate * step)
        return replace(self, bound=max(MIN_BOUND, min(MAX_BOUND, moved)), initial=self.initial or self.bound)

    def state_dict(self) -> State:
        """Return the bound in force and that of the first round."""
        return {"bound": np.array(self.bound), "initial": np.array(self.initial)}

    def restored(self, state: State) -> "AdaptiveClip":
        """Return this clip with a saved state."""
        return replace(self, bound=float(state["bound"]), initial=float(state["initial"]))
