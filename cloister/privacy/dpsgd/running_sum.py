"""The sum of what calls give, so exact that its roundings do not grow with a batch.

The size of a batch is drawn, and how many units there are to draw from is private: a site may hold far more than the
size that it states. So no bound on roundings may count on a batch being small. Let ‖xᵢ‖ ≤ S for each of n units, and
u = 2⁻⁵³. A plain sum is off by u·Σᵢ i·S, which is below 2⁻²⁰·S for the first `PLAIN` = 2¹⁷ of them and grows with n².
What later additions lose is therefore computed too, and added up beside:

1. Of s = fl(a + b) the rounding a + b - s is a double, and is found exactly (Knuth's TwoSum), unless s overflows.
2. Each is at most u·n·S. Their own sum is off by u·n·(n·u·n·S): below 2⁻³¹·S for n ≤ 2²⁵.
3. Both together are rounded once, by u·n·S ≤ 2⁻²⁸·S.

So a sum is within 2⁻¹⁹·S of the exact one for batches of up to 2²⁵ units. With its neighbour's that is a quarter of
`rounding.SLACK`.

Source: Knuth (1998), The Art of Computer Programming, vol. 2, §4.2.2, Theorem B; Ogita, Rump, Oishi (2005), Sum2.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PLAIN = 1 << 17
"""Units that are added without looking at roundings."""


class RunningSum:
    """Arrays that are added up in double precision.

    Args:
        start: arrays to begin with; empty: the first that are added.
    """

    def __init__(self, start: Sequence[NDArray] = ()) -> None:
        self._total = tuple(start)
        self._lost: tuple[NDArray, ...] = ()

    def add(self, parts: Sequence[NDArray], before: int) -> None:
        """Add arrays of the same shapes.

        Args:
            parts: finite numbers.
            before: units that were added before these.
        """
        if not self._total:
            self._total = tuple(parts)
            return
        sums = tuple(np.add(a, b, dtype=np.float64) for a, b in zip(self._total, parts, strict=True))
        if before >= PLAIN:
            lost = tuple(_lost(a, b, s) for a, b, s in zip(self._total, parts, sums, strict=True))
            self._lost = tuple(map(np.add, self._lost, lost)) if self._lost else lost
        self._total = sums

    def value(self) -> tuple[NDArray, ...]:
        """The sum; empty if nothing was added and there was nothing to begin with."""
        return tuple(map(np.add, self._total, self._lost)) if self._lost else self._total


def _lost(a: NDArray, b: NDArray, total: NDArray) -> NDArray:
    """a + b - total, exactly."""
    b_taken = total - a
    return (a - (total - b_taken)) + (b - b_taken)
