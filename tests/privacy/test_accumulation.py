"""The roundings of a sum of thousands: one client must not move others' contributions by way of them.

In float32 the partial sum of many small terms rounds each of them by what came before. Here the others bring it to
just below a power of two, the canary lifts it over, and from then on every term of minus half a unit in the last place
of the lower side is either added exactly or lost.
"""

import numpy as np
import pytest

from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.privacy.mechanisms.release import noisy_mean, noisy_trimmed_mean
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort

CLIP = 1.0
PEAK = 4096
SMALL = -np.spacing(np.float32(PEAK)) / 2
TERMS = [0.999, *[0.75] * int((PEAK - 0.25) // 0.75), *[SMALL] * (4 * PEAK)]
"""The canary first, then those who build the sum up, then those who are added exactly or not at all."""


def cohort(terms):
    layout, sent = Layout.of({"w": np.zeros(1, np.float32)}), (np.zeros(1, np.float32),)
    return clip(Cohort.of(layout, sent, tuple((np.array([term], np.float32),) for term in terms)), CLIP)


def sum_of(terms):
    # Divided by 1: what is looked at is the sum itself.
    return float(noisy_mean(cohort(terms), 0.0, 1.0, GaussianNoise(0)).model[0][0])


def in_single_precision(terms):
    total = np.float32(0)
    for term in np.array(terms, np.float32):
        total += term
    return float(total)


def test_one_client_moves_a_sum_of_thousands_by_no_more_than_its_bound():
    moved = abs(sum_of(TERMS) - sum_of(TERMS[1:]))
    assert moved <= CLIP + np.spacing(np.float32(PEAK))  # the sum is handed on in float32: post-processing


def test_the_control_would_be_moved_by_more():
    assert abs(in_single_precision(TERMS) - in_single_precision(TERMS[1:])) > 1.5 * CLIP


@pytest.mark.parametrize("trimmed", [0, 100])
def test_nor_does_it_move_a_trimmed_mean(trimmed):
    asked = len(TERMS)
    released = [
        float(noisy_trimmed_mean(cohort(terms), 0.0, asked, trimmed, GaussianNoise(0)).model[0][0])
        for terms in (TERMS, TERMS[1:])
    ]
    assert abs(released[0] - released[1]) <= CLIP / (asked - 2 * trimmed) * (1 + 1e-4)
