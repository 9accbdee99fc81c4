"""Noise in shares through the protocol: the sum without its surplus is the survivors' updates and their noise.

The two libraries know nothing of each other. What joins them are int64 vectors, and seeds by the number of a component.
"""

import numpy as np
import pytest
from secure_rounds import Round, names_of, sum_of, terms_for
from support import random_models

from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.distributed.plan import Plan, add_share, quantize_update, without_surplus
from cloister.privacy.mechanisms.distributed.shares import Parties, Shares
from cloister.secure_aggregation.primitives import SeedChain, into_ring, out_of_ring, seeds
from cloister.utils.arrays import Layout
from cloister.utils.cohort import Cohort
from cloister.utils.errors import PrivacyError

PARTIES = Parties(members=6, threshold=4, colluding=1)
LOWEST = PARTIES.threshold + 1


def secret(name, what):
    return f"{name} {what}".encode().rjust(32)


def update_of(number):
    (model,) = random_models(1, 0.1, seed=number)
    layout = Layout.of(model)
    sent = layout.rows({name: np.zeros_like(array) for name, array in model.items()})
    return Cohort.of(layout, sent, (layout.rows(model),))


def a_round(multiplier, gone, bits):
    """Everybody's truncated update and chain of seeds, and what the server has at the end."""
    names = names_of(PARTIES.members)
    cohorts = {name: update_of(number) for number, name in enumerate(names)}
    plan = Plan.of(0.2, multiplier, PARTIES, cohorts[names[0]].layout.size, bits)
    chains = {name: SeedChain(secret(name, "top"), LOWEST, PARTIES.members) for name in names}
    whole = {name: quantize_update(cohort, plan) for name, cohort in cohorts.items()}
    inputs = {name: numbers.copy() for name, numbers in whole.items()}
    for name, numbers in inputs.items():
        add_share(numbers, plan.shares, secret(name, "base"), chains[name].seeds())
    terms = terms_for(PARTIES.members, PARTIES.threshold, PARTIES.colluding, plan.parameters, bits=bits)
    return plan, whole, chains, Round(names, terms, noise=plan.terms(), chains=chains).run(inputs, gone)


def without(plan, transcript):
    survivors = len(transcript.survivors.names)
    shown = [seeds(link, LOWEST, survivors) for link in transcript.total.revealed.values()]
    return without_surplus(sum_of(transcript), plan.shares, survivors, shown)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("gone", [{}, {"site-001": "mask"}, {"site-000": "share", "site-005": "mask"}])
def test_what_is_left_is_the_updates_and_the_noise_that_was_charged(gone, bits):
    """In integers, number by number: the base of each survivor, and the components above the number of survivors."""
    plan, whole, chains, transcript = a_round(1.0, gone, bits)
    left = [name for name in whole if name not in gone]
    expected = sum(whole[name] for name in left)
    for name in left:
        expected = expected + DiscreteGaussian(plan.shares.base, secret(name, "base")).integers(plan.parameters)
        for number, scale in plan.shares.scales().items():
            if number > len(left):
                expected = expected + DiscreteGaussian(scale, chains[name].seeds()[number]).integers(plan.parameters)
    np.testing.assert_array_equal(without(plan, transcript), expected)


def test_without_noise_the_sum_is_exact():
    plan, whole, _, transcript = a_round(0.0, {"site-002": "mask"}, 32)
    np.testing.assert_array_equal(without(plan, transcript), sum(whole[n] for n in whole if n != "site-002"))


def test_who_vanishes_before_showing_its_seeds_leaves_its_surplus_behind():
    plan, _, chains, transcript = a_round(1.0, {"site-003": "unmask"}, 32)
    assert "site-003" not in transcript.total.revealed
    missing = DiscreteGaussian(plan.shares.scales()[5], chains["site-003"].seeds()[5]).integers(plan.parameters)
    missing = missing + DiscreteGaussian(plan.shares.scales()[6], chains["site-003"].seeds()[6]).integers(
        plan.parameters
    )
    everybody = a_round(1.0, {}, 32)[3]
    np.testing.assert_array_equal(without(plan, transcript), without(plan, everybody) + missing)


def test_a_chain_that_shows_more_than_it_should_is_refused():
    plan, _, chains, transcript = a_round(1.0, {"site-001": "mask"}, 32)
    with pytest.raises(PrivacyError, match=r"components 5 to 5, found \[5, 6\]"):
        without_surplus(sum_of(transcript), plan.shares, 5, [chain.seeds() for chain in chains.values()][:5])


def test_sums_at_both_ends_of_the_room_are_read_right_and_beyond_are_not():
    """`Plan` has proved this range, as the ring sees it: n·D and the noise below 2^31."""
    ends = np.array([2**31 - 1, -(2**31 - 1), 2**31])
    found = out_of_ring(into_ring(ends, 32))
    assert found[:2].tolist() == ends[:2].tolist() and found[2] == -(2**31)


def test_a_client_that_sees_the_release_and_knows_its_own_share_has_to_be_counted():
    for colluding, is_enough in ((0, False), (1, True)):
        shares = Shares.of(2**40, Parties(6, 4, colluding))
        assert all(((left - 1) * shares.left(left) >= 2**40) == is_enough for left in (4, 5, 6))
