"""Bound on the effect of roundings on a clipped sum, and the reduced clipping norm that covers it.

The release is the result of float32 kernels for Σ fᵢ·gᵢ, not the exact sum. Contributions are therefore clipped to
S/(1 + η), where η·S/(1 + η) is proved to be at least the distance that roundings add between two sums of which one has
an additional example. Let u = 2⁻²⁴, with at most m examples in a call of a kernel and at most M examples in a batch,
the number of places (`batches.places_of`):

1. Norms are overstated (`forms.squares`, `forms.gram_squares`), so that in exact arithmetic fᵢ·‖gᵢ‖ ≤ S/(1 + η), and
   if positions can cancel also fᵢ·Σ_t‖a_t‖‖d_t‖ ≤ `MASS_PER_NORM`·S/(1 + η).
2. A sum over m examples has at most m + 2 roundings for each term, in any order of additions, so it is within
   γ·Σᵢ fᵢ‖gᵢ‖ of the exact one, γ = (m + `EXTRA`)u/(1 - (m + `EXTRA`)u) (Higham, 2002, §3.1 and §4.2).
   If positions can cancel, sums are in double precision, where the factor `MASS_PER_NORM` costs less than that.
3. Both neighbours' sums have this error: 2·γ·M·S/(1 + η) together.
4. Results of calls are summed in double precision. That, and underflow, is within `SLACK` for batches up to 2¹⁷.

An example's own gradient is computed with roundings too. They may have any size, since the bound applies to the result,
if this depends on no other example: `clipped_sums` ensures that.

Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, 2nd ed.
"""

import math

from cloister.core import check
from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.batches import places_of

UNIT = 2.0**-24
"""Unit roundoff of float32."""
UNDERFLOW = 2.0**-125
"""Largest underflow error of a float32 square below the smallest normal number, and of its addition."""
EXTRA = 4
"""Further roundings of a term besides the additions: of its factor, of the products, and one in reserve."""
MASS_PER_NORM = 2.0**10
"""Ratio of the norms of an example's positions to the norm of their sum above which the former set the clip factor."""
MAX_POSITIONS = 2**14
"""Most positions for which 2 and the bound on a Gram norm hold."""
SLACK = 2.0**-16
MINIMUM_CLIPPING_NORM = 1e-12
"""Least S: far above the underflow error of a float32, and far below the norm of any useful gradient."""
MAXIMUM_CLIPPING_NORM = 1e30
"""Largest S: a float32 can hold the sum of 10⁸ contributions of this norm, which noise covers only if it is finite."""
SMALLEST_FACTOR = 2.0**-126
"""Least clip factor: a smaller one would lose bits as a float32, and counts as 0."""
MAXIMUM_OVERSTATEMENT = 1 / 10
"""Largest part of S for roundings: larger batches take several calls."""


def check_clipping_norm(clipping_norm: float) -> None:
    """Refuse a bound S that underflow or overflow would affect.

    Raises:
        ConfigError: S is not a number from `MINIMUM_CLIPPING_NORM` to `MAXIMUM_CLIPPING_NORM`.
    """
    check.positive(clipping_norm=clipping_norm)
    if clipping_norm > MAXIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be <= {MAXIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")
    if clipping_norm < MINIMUM_CLIPPING_NORM:
        raise ConfigError(f"clipping_norm must be >= {MINIMUM_CLIPPING_NORM:g}, got {clipping_norm:g}")


def overstatement(batch_size: int, at_once: int) -> float:
    """Return η, the relative margin of the bound for roundings.

    With contributions bounded by S/(1 + η), one unit moves the computed sum by at most S.

    Args:
        batch_size: B.
        at_once: units in a call.
    """
    roundings = (at_once + EXTRA) * UNIT
    return 2 * places_of(batch_size) * roundings / (1 - roundings) + SLACK


def most_at_once(batch_size: int) -> int:
    """Return the most units in a call with η up to `MAXIMUM_OVERSTATEMENT`.

    Args:
        batch_size: B, at most 2¹⁶, for which such a number exists.
    """
    share = (MAXIMUM_OVERSTATEMENT - SLACK) / (2 * places_of(batch_size))
    return math.floor(share / (1 + share) / UNIT) - EXTRA
