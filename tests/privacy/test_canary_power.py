"""The share of ε that canaries show at full size, and how seldom they show too much.

`pytest -m long tests/privacy/test_canary_power.py` measures what `docs/privacy.md` reports.
"""

import numpy as np
import pytest
from scipy import stats
from support import all_nodes

from cloister.audits.canaries import OneRun
from cloister.audits.testing import Rehearsal
from cloister.privacy.accounting.account import Account
from cloister.privacy.mechanisms.gaussian import global_dp
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.canaries import Canaries
from cloister.server.private_strategy import PrivateStrategy
from cloister.utils.arrays import Layout

DELTA = 1e-5
CLIENTS = 3
ROWS = pytest.param(8, 400, marks=pytest.mark.slow), pytest.param(200, 1600, marks=pytest.mark.long)
"""Repetitions, and rows of the model: 1,600 are 0.8 million parameters, 400 a quarter of them."""


def bounds(sent, repetition):
    """ε under the Gaussian shape, and without a distribution, of one round with 1,000 canaries."""
    strategy = PrivateStrategy(
        all_nodes(),
        global_dp(noise_multiplier=0.69, clipping_norm=2.0),
        noise=GaussianNoise(repetition),
        canaries=Canaries.drawn(1000, repetition),
    )
    rng = np.random.default_rng(repetition)
    clients = [{name: rng.standard_normal(array.shape, np.float32) for name, array in sent.items()}] * CLIENTS
    Rehearsal(sent, clients, [1.0] * CLIENTS).run(strategy)
    seen = strategy.canaries
    run = OneRun(seen.coins, seen.scores, seen.guesses)
    return run.gaussian(DELTA), run.distribution_free(DELTA)


@pytest.mark.parametrize(("repetitions", "rows"), ROWS)
def test_most_of_the_claim_is_seen_and_seldom_more(repetitions, rows):
    sent = {"kernel": np.zeros((rows, 499), np.float32), "bias": np.zeros(rows, np.float32)}
    mechanism = global_dp(noise_multiplier=0.69, clipping_norm=2.0)
    claim = Account(mechanism.events(Layout.of(sent))).epsilon(DELTA, "pld")
    shaped, free = np.array([bounds(sent, repetition) for repetition in range(repetitions)]).T
    above = int((shaped > claim).sum())
    print(
        f"claimed {claim:.3f}; Gaussian shape: median {np.median(shaped):.3f} ({np.median(shaped) / claim:.1%}), "
        f"{above} of {repetitions} above; distribution-free: median {np.median(free):.3f}, largest {free.max():.3f}"
    )
    assert claim >= 3 and np.median(shaped) >= 0.8 * claim
    # At 95 % confidence; of 200 at most 18.
    assert above <= stats.binom.ppf(0.99, repetitions, 0.05)
    assert free.max() <= claim and np.median(free) > 2
