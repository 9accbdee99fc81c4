"""How far roundings can take a clipped sum past its bound, and the bound that makes up for it.

What is released is what float32 kernels make of Σ fᵢ·gᵢ, not the sum itself. Contributions are therefore clipped to
S/(1 + η), where η·S/(1 + η) is proved to be at least what roundings add to the distance of two sums of which one has an
example more. With u = 2⁻²⁴, at most m examples in a call of a kernel and at most n_max examples in a batch:

1. Norms are overstated (`parts.squares`, `dense.gram_squares`), so that in exact arithmetic fᵢ·‖gᵢ‖ ≤ S/(1 + η), and
   where positions can cancel also fᵢ·Σ_t‖a_t‖‖d_t‖ ≤ `MASS_PER_NORM`·S/(1 + η).
2. A sum over m examples takes at most m + 2 roundings on the way of each term, in whatever order it is added up, so it
   is within γ·Σᵢ fᵢ‖gᵢ‖ of the exact one, γ = (m + `EXTRA`)u/(1 - (m + `EXTRA`)u) (Higham, 2002, §3.1 and §4.2).
   Where positions can cancel sums are in double precision, where the factor `MASS_PER_NORM` costs less than that.
3. Both neighbours' sums are off by so much: 2·γ·n_max·S/(1 + η) together. A batch above n_max is computed with fewer
   examples in a call (`examples_at_once`): the product of the two stays the same. With one example in a call, a
   contribution is what the kernel makes of that example alone, and only the additions below are left.
4. Sums of calls are added up by a `running_sum`. That, and underflow, is within `SLACK` for batches up to 2²⁵.

An example's own gradient is computed with roundings too. It does not matter how large they are, since what is bounded
is what came out, as long as it comes out the same whoever else is in the batch: `clipped_sums` sees to that.

Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, 2nd ed.
"""

import math
from dataclasses import dataclass

from cloister.core import check
from cloister.core.errors import ConfigError

UNIT = 2.0**-24
"""Unit roundoff of float32."""
UNDERFLOW = 2.0**-125
"""What a float32 square can lose below the smallest normal number, with that of its addition."""
EXTRA = 4
"""Roundings on the way of a term besides those of the additions: of its factor, of the products, and one to spare."""
MASS_PER_NORM = 2.0**10
"""How many times an example's positions may outweigh their sum before they, and not the sum, decide its clip factor."""
MAX_POSITIONS = 2**14
"""Positions for which 2 and the bound on a Gram norm hold."""
SLACK = 2.0**-16
MINIMUM_CLIPPING_NORM = 1e-12
"""Far above what underflow can do to a float32, and far below any gradient that is worth training on."""
MAXIMUM_CLIPPING_NORM = 1e30
"""10⁸ contributions of this length fit into a float32 together: no noise would cover a sum that is infinite."""
SMALLEST_FACTOR = 2.0**-126
"""A smaller clip factor would lose bits as a float32; it counts as 0."""
MAXIMUM_OVERSTATEMENT = 1 / 8
"""No more than this part of S may go to roundings."""
DEFAULT_OVERSTATEMENT = 1 / 16
"""What a microbatch of default size may cost."""


@dataclass(frozen=True)
class Batching:
    """How large a batch is expected to be, and how it is cut into computations.

    Args:
        batch_size: B > 0, public: what a noised sum is divided by, and the expected number of units in a batch. How
            many a step really has changes nothing but the time that it takes.
        microbatch_size: units computed at a time, where a batch would take too much memory, or roundings of its sum too
            much of S. By default `batch_size`, or what costs at most `DEFAULT_OVERSTATEMENT` of S.
        group_cap: the most examples of a unit, > 0. At 1 a unit is an example. Above, it is a group of examples: its
            gradient is the mean of theirs, and is clipped to S as one.

    Raises:
        ConfigError: a number is out of range.
    """

    batch_size: int
    microbatch_size: int | None = None
    group_cap: int = 1

    def __post_init__(self) -> None:
        check.positive(batch_size=self.batch_size, group_cap=self.group_cap)
        check.positive(microbatch_size=self.at_once)
        check_microbatch_size(self.batch_size, self.at_once)

    @property
    def at_once(self) -> int:
        """Units computed at a time."""
        if self.microbatch_size is not None:
            return self.microbatch_size
        return max(1, min(self.batch_size, largest_microbatch(self.batch_size, DEFAULT_OVERSTATEMENT)))

    @property
    def overstatement(self) -> float:
        """η: contributions are clipped to S/(1 + η)."""
        return overstatement(self.batch_size, self.at_once)


def check_clipping_norm(clipping_norm: float) -> None:
    """Refuse a bound S on which underflow or overflow would have a say.

    Raises:
        ConfigError: S is not a number from `MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`.
    """
    check.positive(clipping_norm=clipping_norm)
    if clipping_norm > MAXIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be <= {MAXIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")
    if clipping_norm < MINIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be >= {MINIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")


def largest_batch(batch_size: int) -> int:
    """n_max: four deviations above the expected size of a Poisson batch. Larger ones take longer, no more."""
    return batch_size + math.ceil(4 * math.sqrt(batch_size)) + 4


def overstatement(batch_size: int, microbatch_size: int) -> float:
    """η, with which the bound S/(1 + η) on contributions bounds by S how far the computed sum moves.

    Args:
        batch_size: B.
        microbatch_size: units computed at a time.
    """
    roundings = (microbatch_size + EXTRA) * UNIT
    return 2 * largest_batch(batch_size) * roundings / (1 - roundings) + SLACK


def largest_microbatch(batch_size: int, limit: float = MAXIMUM_OVERSTATEMENT) -> int:
    """The most examples in a call with which η stays within `limit`; below 1 if there is no such number.

    Args:
        batch_size: B.
        limit: for η, > 0.
    """
    share = (limit - SLACK) / (2 * largest_batch(batch_size))
    return math.floor(share / (1 + share) / UNIT) - EXTRA


def check_microbatch_size(batch_size: int, microbatch_size: int) -> None:
    """Refuse sizes with which roundings could take up too much of S.

    Args:
        batch_size: B.
        microbatch_size: units computed at a time.

    Raises:
        ConfigError: η is above `MAXIMUM_OVERSTATEMENT`, with the largest size that is not.
    """
    largest = largest_microbatch(batch_size)
    if largest < 1:
        raise ConfigError(f"batch_size = {batch_size} is too large for sums in single precision to be bounded")
    if microbatch_size > largest:
        raise ConfigError(
            f"microbatch_size must be <= {largest} for batch_size = {batch_size}, got {microbatch_size}: "
            "roundings of a sum over more examples could move it by more than the clipping norm allows for"
        )


def examples_at_once(count: int, batch_size: int, microbatch_size: int) -> int:
    """How many of a batch's examples go into a call, so that roundings stay within η however large the batch is.

    Args:
        count: units in this batch.
        batch_size: B.
        microbatch_size: units computed at a time, in a batch of the expected size.
    """
    allowed = largest_batch(batch_size) * (microbatch_size + EXTRA) // max(count, 1) - EXTRA
    return max(1, min(microbatch_size, allowed))
