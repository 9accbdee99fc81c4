"""How far roundings can take a clipped sum past its bound, and the bound that makes up for it.

What is released is what float32 kernels make of Σ fᵢ·gᵢ, not the sum itself. Contributions are therefore clipped to
S/(1 + η), where η·S/(1 + η) is proved to be at least what roundings add to the distance of two sums of which one has an
example more. With u = 2⁻²⁴, at most m examples in a call of a kernel and at most M examples in a batch, as many as have
places (`batches.places_of`):

1. Norms are overstated (`forms.squares`, `forms.gram_squares`), so that in exact arithmetic fᵢ·‖gᵢ‖ ≤ S/(1 + η), and
   where positions can cancel also fᵢ·Σ_t‖a_t‖‖d_t‖ ≤ `MASS_PER_NORM`·S/(1 + η).
2. A sum over m examples takes at most m + 2 roundings on the way of each term, in whatever order it is added up, so it
   is within γ·Σᵢ fᵢ‖gᵢ‖ of the exact one, γ = (m + `EXTRA`)u/(1 - (m + `EXTRA`)u) (Higham, 2002, §3.1 and §4.2).
   Where positions can cancel sums are in double precision, where the factor `MASS_PER_NORM` costs less than that.
3. Both neighbours' sums are off by so much: 2·γ·M·S/(1 + η) together.
4. Sums of calls are added up in double precision. That, and underflow, is within `SLACK` for batches up to 2¹⁷.

An example's own gradient is computed with roundings too. It does not matter how large they are, since what is bounded
is what came out, as long as it depends on no other example: `clipped_sums` sees to that.

Source: Higham (2002), Accuracy and Stability of Numerical Algorithms, 2nd ed.
"""

import math

from cloister.core import check
from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd.batches import places_of

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
MAXIMUM_OVERSTATEMENT = 1 / 10
"""No more than this part of S goes to roundings: larger batches take several calls."""


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


def overstatement(batch_size: int, at_once: int) -> float:
    """Return η, with which the bound S/(1 + η) on contributions bounds by S how far the computed sum moves.

    Args:
        batch_size: B.
        at_once: units in a call.
    """
    roundings = (at_once + EXTRA) * UNIT
    return 2 * places_of(batch_size) * roundings / (1 - roundings) + SLACK


def most_at_once(batch_size: int) -> int:
    """Return the most units in a call with which η is at most `MAXIMUM_OVERSTATEMENT`.

    Args:
        batch_size: B, at most 2¹⁶: there is such a number.
    """
    share = (MAXIMUM_OVERSTATEMENT - SLACK) / (2 * places_of(batch_size))
    return math.floor(share / (1 + share) / UNIT) - EXTRA
