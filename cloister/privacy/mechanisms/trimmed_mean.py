"""Robust rules with a proved sensitivity: the coordinate-wise median and trimmed mean of bounded updates, noised.

**Sensitivity.** n clients are asked, and one that does not reply counts with a zero update. So n is public, and joining
or leaving exchanges one update u, ‖u‖₂ ≤ C, for zero. Look at one coordinate, the n - 1 values of the others fixed, as
the value x of this client grows. While x is among the t smallest or the t largest it is cut off, and the mean of the
n - 2t values that are kept does not change. While it is kept, so are the same others, and the mean grows by 1/(n - 2t)
as fast as x. In between nothing jumps: x takes the place of a value that it equals. So

    |f(x) - f(x')| ≤ |x - x'| / (n - 2t)  in every coordinate, and  ‖f(u) - f(u')‖₂ ≤ ‖u - u'‖₂ / (n - 2t)  over all.

Joining or leaving moves the release by at most C/(n - 2t), replacing one client by 2C/(n - 2t). Both are reached: when
half of the others lie at u and half at 0, one client decides. The median keeps one value where n is odd, two where it
is even. It does not profit from a larger n, but it does not lose either.

Without the zero updates n itself would change with a client, and with it which values are in the middle.

| edge case | what happens |
|---|---|
| zero update | it counts like any other, as an update that did not arrive does |
| NaN or infinite update | screening has rejected it: it counts as zero |
| empty cohort | the model that was sent, and the noise |
| one client asked | its bounded update is the median, with sensitivity C; nothing can be cut off |
| more replies than clients asked | refused |
| an unbounded cohort, or t that leaves no value | refused |
"""

import math

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.cohort import Cohort, updates
from cloister.core.errors import PrivacyError, UnboundedSensitivity
from cloister.core.threads import Span, for_each_span, spans
from cloister.privacy.mechanisms.noise import GaussianNoise, Maker
from cloister.privacy.mechanisms.release import Release

COLUMNS = 1 << 10
"""Parameters whose values are sorted together."""


def noisy_trimmed_mean(cohort: Cohort, multiplier: float, asked: int, trimmed: int, noise: GaussianNoise) -> Release:
    """sent + mean of the updates without the largest and the smallest, coordinate by coordinate, + N(0, (z·C/(n-2t))²).

    Args:
        cohort: bounded: C is its `l2_bound`.
        multiplier: z ≥ 0.
        asked: n, how many clients were asked. It has to be public: not the size of a Poisson cohort.
        trimmed: t, how many values are cut off at each end; ⌈n/2⌉ - 1 is the median.
        noise: where the normal numbers come from.

    Guarantee: one client's joining or leaving moves the release without noise by at most C/(n - 2t) in L2, so that a
        round is a Gaussian mechanism of noise multiplier z (add-or-remove), and of z/2 for replacing one.

    Raises:
        UnboundedSensitivity: no stage has bounded the cohort.
        PrivacyError: more clients replied than were asked.
        ConfigError: z or t is negative, or t leaves no value.

    Source: Yin et al. (2018), arXiv:1803.01498, Definitions 1 and 2; the sensitivity is ours, proved above.
    """
    if math.isinf(cohort.l2_bound):
        raise UnboundedSensitivity("noise was asked for before anything bounded a contribution; clip first")
    if len(cohort) > asked:
        raise PrivacyError(f"{len(cohort)} clients replied and {asked} were asked: that number is not public")
    check.positive(values_kept=asked - 2 * trimmed)
    check.non_negative(noise_multiplier=multiplier, trimmed=trimmed)
    sensitivity = cohort.l2_bound / (asked - 2 * trimmed)
    model = tuple(np.zeros(piece.size, cohort.layout.dtype) for piece in cohort.sent)
    places = noise.places(spans(cohort.layout.sizes, COLUMNS))

    def write(span: Span, workspace: tuple[Maker, NDArray]) -> None:
        maker, scratch = workspace
        columns = _columns(cohort, span, asked, scratch)
        columns.sort(axis=0)
        # In float32 the sum of thousands would round by more than its noise is calibrated for.
        mean = columns[trimmed : asked - trimmed].mean(axis=0, dtype=np.float64)
        maker.add_on_grid(mean, multiplier * sensitivity, places[span])
        np.add(mean, span.of(cohort.sent), out=span.of(model), casting="same_kind")

    scratch = (asked * COLUMNS, cohort.layout.dtype)
    for_each_span(list(places), write, lambda: (noise.maker(), np.empty(*scratch)), cost=asked)
    return Release(model, multiplier * sensitivity, sensitivity)


def _columns(cohort: Cohort, span: Span, asked: int, scratch: NDArray) -> NDArray:
    """The bounded updates over the columns in `span`, and zeros for those who did not reply: shape (asked, span)."""
    columns = scratch[: asked * len(span)].reshape(asked, len(span))
    replied = updates(cohort.rows, cohort.sent, span, scratch)
    replied *= cohort.factors.astype(scratch.dtype)[:, None]
    columns[len(cohort) :] = 0
    return columns
