"""The clip that follows a quantile: it gets there, its bits cost what the ledger says, no round mixes two bounds."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from statistics_of_noise import is_normal, std_is
from support import all_nodes, content, failures, flat, grid_of, mostly_slow, one_round, random_models, zeros
from test_clipping import cohort_of

from cloister import DiscreteGaussian
from cloister.audits.testing import Rehearsal
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.mechanisms.clipping import AdaptiveClip
from cloister.privacy.mechanisms.grid import Grid
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.private_strategy import GlobalDP
from cloister.utils.errors import ConfigError

CLIENTS = 200
NORMS = np.linspace(0.5, 1.5, CLIENTS)
"""Their quantile γ is 0.5 + γ."""


@pytest.fixture
def silent(monkeypatch):
    """No noise on the bits."""
    monkeypatch.setattr(Grid, "noised", lambda grid, whole, noise: whole * grid.step)


def with_norms(norms):
    """A cohort of updates of these norms."""
    return cohort_of([{"kernel": np.array([norm, 0, 0])} for norm in norms])


def followed(clip, norms, rounds, seed=1, size=None):
    """The bounds after each of so many rounds."""
    cohort, noise, bounds = with_norms(norms), GaussianNoise(seed), []
    for _ in range(rounds):
        clip = clip.followed(cohort, size or len(norms), noise)
        bounds.append(clip.bound)
    return np.array(bounds)


# --- where the bound goes ---


def wander(quantile, clients, slope, rate=0.2, bits_multiplier=10.0):
    """Standard deviation of ln C around its quantile, once it is there.

    A round adds noise of deviation s = η·z_b·max(γ, 1 - γ)/n, and takes back the part η·κ of what is missing, κ = slope
    of the share in ln C: together a stationary deviation of s/√(2ηκ - (ηκ)²).
    """
    pull = rate * slope
    return rate * bits_multiplier * max(quantile, 1 - quantile) / clients / math.sqrt(2 * pull - pull**2)


def test_it_finds_the_quantile_of_the_norms():
    """To six deviations of its wandering, and the step from one client to the next: below 13 %.

    As many clients again may not reply: they halve the pull, and do not move the goal.
    """

    def check(start, silent, quantile):
        true, asked = 0.5 + quantile, CLIENTS + silent
        # Of 400 rounds 180 take the farthest start to the goal: 0.2·0.1/2 of a logarithm of 6 each.
        bounds = followed(AdaptiveClip(start, quantile=quantile), NORMS, 400, size=asked)
        tolerance = 6 * wander(quantile, asked, slope=true * CLIENTS / asked) + 1 / CLIENTS / true
        assert tolerance < 0.13
        assert np.abs(np.log(bounds[-200:] / true)).max() < tolerance

    cases = [(0.1, CLIENTS, 0.1), (0.1, CLIENTS, 0.5), (10.0, 0, 0.25), (10.0, 0, 0.9)]
    assert failures(cases, check) == []


def test_it_is_the_share_below_the_bound_that_counts():
    """A bound above all norms must fall, one below all must rise: Flower's runs the other way."""
    assert followed(AdaptiveClip(2.0), NORMS, 1)[0] < 2.0 * math.exp(-0.2 * 0.4)
    assert followed(AdaptiveClip(0.2), NORMS, 1)[0] > 0.2 * math.exp(0.2 * 0.4)


@pytest.mark.usefixtures("silent")
def test_one_step_is_the_published_rule():
    """Andrew et al. (2021), Algorithm 1: C ← C·exp(-η(b - γ)), b the share of norms of at most C."""
    clip = AdaptiveClip(1.0, quantile=0.3, rate=0.7)
    clip = clip.followed(with_norms([0.2, 0.9, 1.0, 1.1, 5.0]), 5, GaussianNoise(1))
    assert clip.bound == pytest.approx(math.exp(-0.7 * (3 / 5 - 0.3)))


@pytest.mark.usefixtures("silent")
def test_a_round_without_replies_moves_the_bound_nowhere():
    clip = AdaptiveClip(1.0, quantile=0.9)
    clip = clip.followed(with_norms([1.0, 2.0]).take(np.arange(0)), 10, GaussianNoise(1))
    assert clip.bound == 1.0


@pytest.mark.usefixtures("silent")
def test_the_clip_of_the_next_round_remembers_that_of_the_first():
    """The parameters of a claim are those that the run was started with."""
    clip = AdaptiveClip(2.0)
    for _ in range(3):
        clip = clip.followed(with_norms([1.0]), 1, GaussianNoise(1))
    assert clip.bound != 2.0 and clip.parameters() == AdaptiveClip(2.0).parameters()


def rounds(strategy, models, sent, count):
    grid = grid_of(lambda node, _: content(models[node - 1]), len(models))
    for number in range(count):
        one_round(strategy, grid, sent, number + 1)


@pytest.mark.parametrize("start", [0.1, 10.0])
def test_over_whole_rounds_it_converges_and_flowers_runs_away(start):
    """Twenty clients of norm 1. Ours goes to 1; Flower's leaves by another factor of two, in the wrong direction."""
    sent = {"kernel": np.zeros(4, np.float32)}
    models = [{"kernel": np.eye(4, dtype=np.float32)[number % 4]} for number in range(20)]
    ours = GlobalDP(
        all_nodes(),
        noise_multiplier=0.5,
        clipping_norm=AdaptiveClip(start, bits_multiplier=1.0),
        noise=GaussianNoise(3),
    )
    theirs = flower.DifferentialPrivacyServerSideAdaptiveClipping(
        flower.FedAvg(min_available_nodes=1, fraction_evaluate=0.0), 0.5, 20, initial_clipping_norm=start
    )
    np.random.seed(0)
    rounds(ours, models, sent, 30)
    rounds(theirs, models, sent, 15)
    assert 0.75 < ours.mechanism.clip.bound < 1.33
    assert theirs.clipping_norm < start / 2 if start < 1 else theirs.clipping_norm > 2 * start


# --- which bound is noised for ---


def test_the_bound_that_clipped_is_the_bound_that_is_noised_for():
    """All norms are far above 2, so that the next bound is e times as large: noise for that one would show."""
    sent, *models = random_models(5, 0.1, like=zeros(100_000))

    def released(z):
        clip = AdaptiveClip(2.0, rate=2.0, bits_multiplier=0.1)
        strategy = GlobalDP(all_nodes(), noise_multiplier=z, clipping_norm=clip, noise=GaussianNoise(7))
        grid = grid_of(lambda node, _: content(models[node - 1]), 4)
        return strategy, flat(one_round(strategy, grid, sent)[0])

    (strategy, noisy), (_, calm) = released(3.0), released(0.0)
    expected, following = 3.0 * 2.0 / 4, 3.0 * strategy.mechanism.clip.bound / 4
    assert following / expected == pytest.approx(math.e, rel=0.1)
    assert strategy.measured.clipping_norm == 2.0 and strategy.measured.noise_std == expected
    assert std_is(noisy - calm, expected) and is_normal(noisy - calm, expected)
    for wrong in (following, expected * 2 / 3, expected * 3 / 2):
        assert not std_is(noisy - calm, wrong)


def test_the_next_round_clips_and_noises_with_the_next_bound():
    sent, *models = random_models(5, 10.0)
    strategy = GlobalDP(all_nodes(), noise_multiplier=3.0, clipping_norm=AdaptiveClip(2.0), noise=GaussianNoise(7))
    rounds(strategy, models, sent, 1)
    following = strategy.mechanism.clip.bound
    rounds(strategy, models, sent, 1)
    assert strategy.measured.clipping_norm == following != 2.0
    assert strategy.measured.sensitivity == following / 4
    assert strategy.measured.noise_std == pytest.approx(3.0 * following / 4)


# --- what the bits cost ---


@pytest.mark.parametrize("quantile", mostly_slow([0.5, 0.8], [0.8]))
def test_the_noise_on_the_bits(quantile):
    """Read from the bound, as an adversary would."""
    clip, noise = AdaptiveClip(1.0, bits_multiplier=3.0, quantile=quantile), GaussianNoise(5)
    cohort, samples = with_norms([0.5, 2, 3]), []
    for _ in range(8000):
        following = clip.followed(cohort, 1000, noise)
        samples.append(-1000 * math.log(following.bound) / clip.rate - (1 - 3 * quantile))
    sample, std = np.array(samples), 3.0 * quantile
    assert std_is(sample, std, tolerance=0.05) and is_normal(sample, std)
    assert not std_is(sample, std * 2 / 3, tolerance=0.05)
    assert not std_is(sample, std * 3 / 2, tolerance=0.05)


UNFIT = {
    "not finite": {"kernel": np.array([np.nan, 0, 0], np.float32)},
    "of another shape": {"kernel": np.zeros(2, np.float32)},
}


def silent_round(models, absent=None, quantile=0.5):
    """The sum of bits, without noise, and the sum of updates, always with the same, of a round that one may miss."""
    clip = AdaptiveClip(1.0, bits_multiplier=3.0, quantile=quantile)
    strategy = GlobalDP(all_nodes(), noise_multiplier=2.0, clipping_norm=clip, noise=GaussianNoise(1))
    rehearsal = Rehearsal({"kernel": np.zeros(3, np.float32)}, models, [1.0] * len(models))
    mean = rehearsal.flat(rehearsal.run(strategy, absent))
    return -len(models) * math.log(strategy.mechanism.clip.bound) / clip.rate, len(models) * mean


@pytest.mark.usefixtures("silent")
def test_one_client_moves_the_bits_by_what_their_noise_is_for():
    """For the median by one half, whoever it is; elsewhere by γ or 1 - γ, as it lies outside the bound or within."""

    def check(quantile):
        rng, moved = np.random.default_rng(0), set()
        for _ in range(12):
            others = [{"kernel": row.astype(np.float32)} for row in rng.standard_normal((int(rng.integers(1, 8)), 3))]
            models = [{"kernel": (rng.standard_normal(3) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)}, *others]
            (bits, _), (fewer, _) = silent_round(models, None, quantile), silent_round(models, 0, quantile)
            moved.add(round(abs(bits - fewer), 5))
        assert moved == {round(quantile, 5), round(1 - quantile, 5)}

    assert failures([0.5, 0.2, 0.9], check) == []


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_reply_that_is_rejected_is_none(unfit):
    models = [UNFIT[unfit], {"kernel": np.ones(3, np.float32)}, {"kernel": np.zeros(3, np.float32)}]
    (bits, total), (fewer, rest) = silent_round(models), silent_round(models, absent=0)
    assert bits == pytest.approx(fewer, abs=1e-9) and (total == rest).all()


@pytest.mark.usefixtures("silent")
def test_sum_and_bits_are_one_release_of_the_joint_multiplier():
    """In units of their noise, one client moves the pair (sum, bits) by at most 1/z_joint, a far one by all of it."""
    z, z_b, rng, farthest = 2.0, 3.0, np.random.default_rng(1), 0.0
    joint = AdaptiveClip(1.0, bits_multiplier=z_b).joint_multiplier(z)
    for scale in [0.1, 0.5, 1.0, 10.0, 1e3] * 4:
        models = [{"kernel": (scale * row).astype(np.float32)} for row in rng.standard_normal((4, 3))]
        (bits, total), (fewer, rest) = silent_round(models), silent_round(models, absent=0)
        moved = math.hypot(np.linalg.norm(total - rest) / (z * 1.0), (bits - fewer) / (z_b / 2))
        assert moved <= 1 / joint * (1 + 1e-6)
        farthest = max(farthest, moved)
    assert farthest > 0.999 / joint


# --- in whole numbers ---


def counted(monkeypatch, clip, norms):
    """The whole number that noise is added to, and its grid."""
    seen = []
    monkeypatch.setattr(Grid, "noised", lambda grid, whole, noise: seen.append((whole, grid)) or 0.0)
    clip.followed(with_norms(norms), 10, GaussianNoise(1))
    return seen[0]


SHARES = [0.5, 0.3, 0.1, 1 / 3, 1e-9, 1 - 1e-9, 0.9999]
MULTIPLIERS = [1e-6, 0.1, 3.0, 10.0, 1e6, 1e9]


def test_no_client_moves_the_count_by_more_steps_than_its_noise_is_for(monkeypatch):
    """In integers, and for any norms: what one client adds is the same beside any others."""

    def check(quantile, z_b):
        clip, rng = AdaptiveClip(1.0, quantile=quantile, bits_multiplier=z_b), np.random.default_rng(0)
        for _ in range(2):
            others = rng.exponential(1.0, rng.integers(1, 50))
            owns = ([], [0.0], [1.0], [1.1], [1e9])
            (fewer, grid), *more = (counted(monkeypatch, clip, [*others, *own]) for own in owns)
            moved = [whole - fewer for whole, _ in more]
            assert all(type(steps) is int and abs(steps) <= grid.steps for steps in moved)
            assert max(moved) - min(moved) <= 2 * grid.steps
            assert max(map(abs, moved)) > grid.steps - 1
            expected = [1 - quantile] * 2 + [-quantile] * 2
            assert [steps * grid.step for steps in moved] == pytest.approx(expected, abs=grid.step)
            assert grid.scale**2 >= (Fraction(z_b) * Fraction(grid.steps)) ** 2 + 25

    assert failures(product(SHARES, MULTIPLIERS), check) == []


def test_a_count_of_shares_that_are_rounded_up_is_found_out(monkeypatch):
    """The broken twin: its steps pass D."""
    clip = AdaptiveClip(1.0, quantile=0.5, bits_multiplier=3.0)
    monkeypatch.setattr(Grid, "whole", lambda grid, share: math.copysign(math.ceil(abs(share) * grid.steps), share))
    (one, grid), (two, _) = (counted(monkeypatch, clip, norms) for norms in ([0.5], [0.5, 0.5]))
    assert two - one > grid.steps


def test_the_count_is_released_with_exact_noise():
    """By hand: the next key of the noise, and one number of it."""
    clip, cohort = AdaptiveClip(1.0, quantile=0.3, bits_multiplier=3.0), with_norms([0.5, 2.0, 3.0])
    following = clip.followed(cohort, 1000, GaussianNoise(5))
    grid = Grid.of(0.7, 3.0, 3)
    whole = int(grid.steps) - 2 * int(0.3 / 0.7 * grid.steps)
    noisy = (whole + int(DiscreteGaussian(grid.scale, GaussianNoise(5)).integers(1)[0])) * grid.step
    assert following.bound == math.exp(-clip.rate * (noisy / 1000))


def test_the_joint_multiplier_is_that_of_two_releases():
    for z, z_b in [(1.0, 10.0), (0.3, 0.5), (4.0, 4.0)]:
        joint = Gaussian(AdaptiveClip(1.0, bits_multiplier=z_b).joint_multiplier(z))
        for accountant in ("rdp", "pld"):
            apart = Account([Gaussian(z), Gaussian(z_b)]).epsilon(1e-5, accountant)
            assert Account([joint]).epsilon(1e-5, accountant) == pytest.approx(apart, rel=1e-9)


def test_without_noise_on_the_sum_bits_protect_nothing():
    assert AdaptiveClip(1.0).joint_multiplier(0.0) == 0.0


def test_the_ledger_holds_both(tmp_path):
    budget = PrivacyBudget(Ledger(tmp_path / "ledger.jsonl"), "run")
    strategy = GlobalDP(
        all_nodes(), noise_multiplier=2.0, clipping_norm=AdaptiveClip(1.0, bits_multiplier=3.0), budget=budget
    )
    rounds(strategy, random_models(3), zeros(), 2)
    assert [entry.event for entry in budget.ledger.entries] == [Gaussian(1 / math.sqrt(1 / 4 + 1 / 9))] * 2
    assert strategy.events(None) == (budget.ledger.entries[0].event,)


def test_parameters_out_of_range():
    def check(name, value):
        key = {"bound": "clipping_norm", "bits_multiplier": "clipping_count_noise_multiplier"}.get(
            name, f"clipping_{name}"
        )
        with pytest.raises(ConfigError, match=key):
            AdaptiveClip(**({"bound": 1.0} | {name: value}))

    cases = [
        ("bound", 0.0),
        ("bound", math.inf),
        ("quantile", 0.0),
        ("quantile", 1.0),
        ("quantile", math.nan),
        ("rate", 0.0),
        ("rate", -1.0),
        ("bits_multiplier", 0.0),
        ("bits_multiplier", math.nan),
    ]
    assert failures(cases, check) == []


def test_the_published_placement_has_a_fixed_clip():
    with pytest.raises(ConfigError, match=r"'model' goes with a fixed clip"):
        GlobalDP(all_nodes(), noise_multiplier=1.0, clipping_norm=AdaptiveClip(1.0), placement="model")
