"""Noise in shares, in words and figures: each refusal in full, what a plan says, and the edges that they name."""

import json
import math

import numpy as np
import pytest
from support import failures, zeros
from test_bits_in_shares import PARTIES, update_of
from test_clipping import cohort_of
from test_squares_in_shares import mechanism, scaled

from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.vocabulary import UNSAMPLED
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import (
    Plan,
    add_noise,
    add_share,
    encode_client_input,
    quantize_update,
    without_surplus,
)
from cloister.privacy.mechanisms.distributed.shared import SharedSum
from cloister.privacy.mechanisms.distributed.shares import Bits, Parties, Shares, Squares
from cloister.privacy.mechanisms.mechanism import Contributions
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.registry import MEAN, OPTIMIZER, SELECTION

ONE = update_of(0.1, 0.2, 0.3)
SHARES = Shares.of(25 + 2**40, PARTIES)
FIXED = DistributedMean(noise_multiplier=1.0, clip=FixedClip(0.7), parties=PARTIES)
ONLY_RMS = (
    "of sums alone only privacy.distance = 'rms' follows, with privacy.distance-release = 'private' and "
    "privacy.clipping = 'fixed'; found "
)
AGAINST = "secure-aggregation.enabled = true contradicts strategy Krum, which "
ON_THE_MEAN = ": the server learns the sum of the updates and no single one; use a strategy on the mean"


def test_a_configuration_that_shares_cannot_serve():
    def check(make, says):
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == says

    cases = [
        (lambda: mechanism(scaled(distance="l2")), f"{ONLY_RMS}'l2', 'private', FixedClip(bound=1.0)"),
        (lambda: mechanism(scaled(release="exact")), f"{ONLY_RMS}'rms', 'exact', FixedClip(bound=1.0)"),
        (
            lambda: mechanism(scaled(max_distance=1.0), clip=AdaptiveClip(2.0)),
            f"{ONLY_RMS}'rms', 'private', {AdaptiveClip(2.0)}",
        ),
        (
            lambda: DistributedMean(noise_multiplier=1.0, clip=FixedClip(1.0), parties=PARTIES, distance=0.0),
            "distance must be > 0, got 0.0",
        ),
        (
            lambda: FIXED.refuse_canaries(),
            "privacy.canaries contradicts secure-aggregation.enabled = true; use 0 canaries",
        ),
        (lambda: FIXED.suited_to(None, "Krum"), f"{AGAINST}declares no capabilities{ON_THE_MEAN}"),
        (lambda: FIXED.suited_to(SELECTION, "Krum"), f"{AGAINST}needs every reply{ON_THE_MEAN}"),
        (lambda: Plan.of(0.0, 1.0, PARTIES, 3), "bound must be > 0, got 0.0"),
        (lambda: Plan.of(1.0, 1.0, PARTIES, 0), "parameters must be > 0, got 0"),
        (lambda: Plan.of(1.0, -1.0, PARTIES, 3), "multiplier must be >= 0, got -1.0"),
        (lambda: Plan.of(1.0, 1.0, PARTIES, 3, 16), "bits must be one of 32, 64; got '16'"),
    ]
    assert failures(cases, check) == []


def test_what_shares_cannot_hold():
    def check(make, says):
        with pytest.raises(PrivacyError) as refused:
            make()
        assert str(refused.value) == says

    cases = [
        (
            lambda: FIXED.release(Contributions(ONE, (1.0,), 1, 1.0, GaussianNoise(1), 1)),
            "under secure aggregation clients add the noise, and the server has no single updates; there is nothing to "
            "noise here",
        ),
        (
            lambda: Plan.of(1.0, 1.0, PARTIES, 2 * 10**10),
            "20000000000 parameters are more than a grid of 2^26 steps is fine enough for",
        ),
        (
            lambda: Plan.of(1.0, 0.0, Parties(2047, 1), 100) and Plan.of(1.0, 0.0, Parties(2048, 1), 100),
            "a sum of 2048 updates of 1048576 steps with their noise reaches 2147483649, and has no room in 32 bits; "
            "take 64 bits, fewer members or a smaller noise multiplier",
        ),
        (
            lambda: Parties(3, 2, 2),
            "colluding must be at least 0, threshold above it, and members at least threshold; found 2, 2 and 3",
        ),
        (lambda: SHARES.left(7), "survivors must be from 4 to 6, found 7"),
        (
            lambda: Shares.of(2**50, Parties(2, 1), removable=False),
            "a share of the noise would have 33554432 steps; at most 33554431 can be made",
        ),
        (
            lambda: quantize_update(cohort_of([zeros(), zeros()]), FIXED.plan(16)),
            "noise in shares is planned for one update of 16 numbers, found 2 of 15",
        ),
        (
            lambda: add_share(np.zeros(3, np.int64), SHARES, bytes(32), {6: bytes(32), 5: bytes(32), 4: bytes(32)}),
            "seeds must be those of the components 5 to 6, found [4, 5, 6]",
        ),
        (
            lambda: without_surplus(np.zeros(3, np.int64), SHARES, 4, [{6: bytes(32), 5: bytes(32)}]),
            "no component is to be made here, found seeds for [5, 6]",
        ),
        (
            lambda: without_surplus(np.zeros(3, np.int64), SHARES, 5, [{5: bytes(32)}] * 6),
            "6 clients show seeds, of 5 survivors",
        ),
    ]
    assert failures(cases, check) == []


def test_what_a_mechanism_with_shares_says_it_was_made_with():
    assert FIXED.suited_to(MEAN, "FedAvg") is FIXED is FIXED.suited_to(OPTIMIZER, "FedAdam")
    assert FIXED.parameters() == {
        "privacy.noise-multiplier": 1.0,
        "privacy.placement": "update",
        "privacy.examples-cap": 0.0,
        "privacy.clipping": "fixed",
        "privacy.clipping-norm": 0.7,
        "secure-aggregation.threshold": 4,
        "secure-aggregation.colluding": 1,
    }
    state = FIXED.state_dict()
    assert {name: array.tolist() for name, array in state.items()} == {"noise-multiplier": 1.0, "distance": 1.0}
    told = FIXED.restored({**state, "distance": np.array(0.25)})
    assert (told.distance, type(told.distance)) == (0.25, float)
    del state["distance"]
    assert told.restored(state) == told, "a state from before distances were saved"
    assert FIXED.events(ONE.layout) == FIXED.events(ONE.layout, UNSAMPLED) == FIXED.plan(3).events()


def test_what_a_plan_says():
    plan = Plan.of(0.5, 1.0, PARTIES, 3)
    assert json.loads(plan.terms()) == {
        "bound": 0.5,
        "steps": 2**20,
        "shares": {
            "parties": {"members": 6, "threshold": 4, "colluding": 1},
            "base": plan.shares.base,
            "components": list(plan.shares.components),
        },
        "parameters": 3,
        "bits": 32,
        "beside": [],
        "units": 1,
    }
    assert list(json.loads(plan.terms())) == ["beside", "bits", "bound", "parameters", "shares", "steps", "units"]
    assert plan.shares.base and not plan.beside
    assert Plan.of(0.5, 0.0, PARTIES, 3).event() == Unaccounted("the noise multiplier is 0: there is no noise")


def test_a_mean_by_hand():
    """Two arrays: the model is what was sent and the mean, in the dtype of each."""
    sent = cohort_of([zeros(1)], {"kernel": np.ones((1, 2), np.float32), "bias": np.full(3, 2.0)})
    layout, plan = sent.layout, FIXED.plan(5)
    total = np.arange(-2, 3) * 2**18
    released = FIXED.released(SharedSum(total, 5, 5), sent.sent, layout, 1)
    step = 0.7 / 2**20 / 5
    np.testing.assert_array_equal(released.models[0][0], (1.0 + total[:2] * step).astype(np.float32))
    np.testing.assert_array_equal(released.models[0][1], (2.0 + total[2:] * step).astype(sent.sent[1].dtype))
    assert [piece.dtype for piece in released.models[0]] == [piece.dtype for piece in sent.sent]
    assert (released.noise_std, released.sensitivity) == pytest.approx((0.7 / 5, 0.7 / 5), rel=1e-15)
    assert (released.noise_multiplier, released.clipping_norm) == (1.0, 0.7)
    assert released.released_distance is released.following is None and plan.length == 5
    with pytest.raises(ValueError, match=r"zip\(\)"):
        FIXED.released(SharedSum(total, 5, 5), sent.sent[:1], layout, 1)


def test_the_distance_takes_off_the_noise_that_is_in_the_sum():
    """u·Σ‖x‖² - ‖Σx‖² of five numbers, less the variance of those who have shown their surplus and of the others."""

    def check(shown):
        one = mechanism(scaled(distance_multiplier=0.05), z=0.1)
        plan = one.plan(2)
        total = np.array([3 * plan.steps // 10, -plan.steps // 5, 2 * 65536])
        variance = sum(plan.shares.left(6 if client < shown else 4) for client in range(6))
        summed = (int(total[0]) ** 2 + int(total[1]) ** 2 - 2 * variance) / plan.steps**2
        released = one.released(SharedSum(total, 6, shown), update_of(0.0, 0.0).sent, update_of(0.0, 0.0).layout, 1)
        assert released.released_distance == pytest.approx(math.sqrt(2 * (6 * 2 - summed) / 30), rel=1e-12)

    assert failures([6, 4], check) == []


def test_numbers_beside_an_update_have_noise_of_their_own():
    """Two of them: each part of the vector is noised once, from the secret that was drawn for it."""
    bits, squares = Bits.of(AdaptiveClip(1.0), PARTIES), Squares.of(0.5, PARTIES)
    plan, secrets = Plan.of(1.0, 2.0, PARTIES, 3, beside=(bits, squares)), [bytes([at]) * 40 for at in range(3)]
    given, drawn, seeds = np.zeros(5, np.int64), iter(secrets), {5: b"a".rjust(32), 6: b"b".rjust(32)}
    add_noise(given, plan, lambda size: next(drawn)[: int(size)], seeds)
    parts = [np.zeros(3, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)]
    for part, shares, secret in zip(parts, (plan.shares, bits.shares, squares.shares), secrets, strict=True):
        add_share(part, shares, secret[:32], seeds if part is parts[0] else {})
    np.testing.assert_array_equal(given, np.concatenate(parts))
    assert encode_client_input(ONE, plan)[3:].tolist() == [one.number(ONE, 1.0) for one in (bits, squares)]
    assert plan.events() == (bits.event(), squares.event(), plan.event())
