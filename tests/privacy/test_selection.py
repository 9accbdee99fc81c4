"""A private choice among hypotheses: its exact law, what one unit can change of it, and wrong twins that are caught."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from statistics_of_noise import FALSE_ALARM
from support import failures

from cloister.privacy.accounting.events import Pure
from cloister.privacy.mechanisms.selection import STEPS, PrivateChoice, accepted, bounded
from cloister.utils.errors import ConfigError, PrivacyError

EPSILON, LIMIT, DRAWS = 3.0, 10.0, 3000
"""So many draws tell each law below from each other one, but for one seed in half a million."""
LOSSES = [np.array([1.0, 2.0]), np.array([9.0, 4.0, 5.0]), np.array([0.5]), np.array([1e308, np.nan, 3.0])]
MEANS = [1.5, 6.0, 0.5, 23 / 3]


def law(scores, epsilon=EPSILON, sensitivity=LIMIT):
    """The exponential mechanism's, in floating point."""
    weights = np.exp(-epsilon * np.array(scores, float) / (2 * sensitivity))
    return weights / weights.sum()


def follows(draws, probabilities):
    """χ² of the choices against a law."""
    counts = np.bincount(draws, minlength=len(probabilities))
    return stats.chisquare(counts, np.array(probabilities) * len(draws)).pvalue > FALSE_ALARM


def draws_of(choice, losses, count=DRAWS, **more):
    below = random.Random(1).randrange
    return [choice.choose(losses, below=below, **more) for _ in range(count)]


# The law


def test_a_client_chooses_by_the_law_of_its_mean_losses_and_by_no_other():
    draws = draws_of(PrivateChoice(EPSILON, LIMIT), LOSSES)
    assert follows(draws, law(MEANS))
    assert not follows(draws, law(MEANS, 2 * EPSILON)) and not follows(draws, law(MEANS, EPSILON / 2))
    assert not follows(draws, law([1.5, 6.0, 0.5, 10.0], 2 * EPSILON)) and not follows(draws, [0.25] * 4)


def test_the_unit_of_an_example_counts_sums():
    sums = [3.0, 18.0, 0.5, 23.0]
    draws = draws_of(PrivateChoice(EPSILON, LIMIT, "example"), LOSSES)
    assert follows(draws, law(sums)) and not follows(draws, law(MEANS)) and not follows(draws, law(sums, 1.5 * EPSILON))


def test_the_unit_of_a_group_counts_the_mean_of_each():
    losses = [np.array([8.0, 0.0, 2.0, 2.0]), np.array([0.0, 0.0, 0.0, 9.0])]
    draws = draws_of(PrivateChoice(EPSILON, LIMIT, "group"), losses, groups=np.array([7, 3, 7, 7]))
    assert follows(draws, law([0.0 + 12 / 3, 0.0 + 3.0])) and not follows(draws, law([12.0, 9.0], 2 * EPSILON))


@pytest.mark.parametrize("kind", ["client", "example"])
def test_nothing_to_judge_by_is_a_uniform_choice(kind):
    assert follows(draws_of(PrivateChoice(EPSILON, LIMIT, kind), [np.zeros(0)] * 5, 1000), [0.2] * 5)


def test_a_coin_of_bias_exp_minus_gamma():
    def check(gamma):
        exact, count, below = Fraction(gamma), 4000, random.Random(1).randrange
        heads, bias = sum(accepted(exact, below) for _ in range(count)), math.exp(-gamma)
        assert (
            stats.binom.cdf(heads, count, bias) > FALSE_ALARM and stats.binom.sf(heads - 1, count, bias) > FALSE_ALARM
        )
        if 0.1 < gamma < 5:
            for wrong in (2 * gamma, gamma / 2):
                assert (
                    min(
                        stats.binom.cdf(heads, count, math.exp(-wrong)),
                        stats.binom.sf(heads - 1, count, math.exp(-wrong)),
                    )
                    < FALSE_ALARM
                )

    assert failures([0.0, 1e-9, 0.3, 1.0, 1.7, 4.0, 50.0, 1e6], check) == []


def test_a_hundred_hypotheses_and_a_hundred_thousand_examples():
    choice = PrivateChoice(1.0, LIMIT, "example")
    losses = [np.full(100_000, 1.0 + (number != 42)) for number in range(100)]
    assert choice.choose(losses) == 42


# What one unit can change


def probabilities(choice, losses, groups=None):
    """The exact law of a choice, as exponents: -γ for each hypothesis, and ln of their sum."""
    scores = [choice._score(each, groups) for each in losses]
    exponents = [-float(Fraction(choice.epsilon) / 2 * (score - min(scores))) for score in scores]
    total = max(exponents) + math.log(sum(math.exp(e - max(exponents)) for e in exponents))
    return [exponent - total for exponent in exponents]


def adversarial(rng, size):
    """Losses of one hypothesis that somebody would choose who looks for a hole."""
    scale = 10.0 ** rng.uniform(-300, 308)
    special = rng.choice([np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, 0.0, LIMIT, np.nextafter(LIMIT, 0)], size)
    kinds = [
        special,
        rng.uniform(0, LIMIT, size),
        np.full(size, 0.0),
        np.full(size, LIMIT),
        rng.normal(size=size) * scale,
    ]
    return kinds[rng.integers(len(kinds))]


def worst_ratio(choice, cases=300, score=None):
    """The most by which one unit moved ln of a probability, over adversarial losses: of all data, or of one example."""
    worst = 0.0
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        k, n = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        one = [adversarial(rng, n) for _ in range(k)]
        if choice.unit == "client":
            other = [adversarial(rng, int(rng.integers(1, 5))) for _ in range(k)]
        else:
            other = [np.concatenate([each[1:], adversarial(rng, int(rng.integers(2)))]) for each in one]
        if choice.unit == "client" and seed % 2:
            one, other = (
                [[np.zeros(n), np.full(n, 1e308)][j % 2] for j in range(k)],
                [[np.full(n, np.nan), np.zeros(n)][j % 2] for j in range(k)],
            )
        pairs = zip(probabilities(choice, one), probabilities(choice, other), strict=True)
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    return worst


@pytest.mark.parametrize("kind", ["client", "example"])
def test_no_losses_move_a_probability_by_more_than_epsilon(kind):
    worst = worst_ratio(PrivateChoice(EPSILON, LIMIT, kind))
    assert EPSILON / 2 < worst <= EPSILON * (1 + 1e-12)


def test_a_group_of_any_size_moves_it_no_more():
    choice = PrivateChoice(EPSILON, LIMIT, "group")
    groups = np.array([1] * 50 + [2])
    one = [np.concatenate([np.full(50, value), [3.0]]) for value in (0.0, LIMIT, np.nan)]
    other = [np.concatenate([np.full(50, value), [3.0]]) for value in (1e308, -1.0, 0.0)]
    pairs = zip(probabilities(choice, one, groups), probabilities(choice, other, groups), strict=True)
    assert EPSILON / 2 < max(abs(a - b) for a, b in pairs) <= EPSILON * (1 + 1e-12)


class HalfTheScale(PrivateChoice):
    def _score(self, losses, groups):
        return 2 * super()._score(losses, groups)


class Unbounded(PrivateChoice):
    def _score(self, losses, groups):
        with np.errstate(all="ignore"):
            return Fraction(float(np.nan_to_num(np.mean(losses) if len(losses) else 0.0) / self.max_loss))


class SumForAMean(PrivateChoice):
    def _score(self, losses, groups):
        return super()._score(losses, groups) * max(1, len(losses))


def test_a_twin_that_bounds_too_little_is_caught():
    def check(twin):
        assert worst_ratio(twin(EPSILON, LIMIT), cases=50) > EPSILON * (1 + 1e-12)

    assert failures([HalfTheScale, Unbounded, SumForAMean], check) == []


def test_and_so_is_its_law():
    def check(twin):
        assert not follows(draws_of(twin(EPSILON, LIMIT), LOSSES, 1000), law(MEANS))

    assert failures([HalfTheScale, Unbounded, SumForAMean], check) == []


def test_a_choice_without_noise_is_caught():
    assert not follows([int(np.argmin(MEANS))] * DRAWS, law(MEANS))


# Losses


def test_a_loss_is_held_within_its_limits_and_counts_as_the_largest_if_it_is_none():
    def check(loss, share):
        for dtype in (np.float32, np.float64):
            assert bounded(np.array([loss], dtype), LIMIT)[0] == share * STEPS, dtype

    kept = [(0.0, 0), (10.0, 1), (5.0, 0.5), (-3.0, 0), (1e38, 1), (-1e38, 0), (11.0, 1)]
    assert failures([*kept, *((bad, 1) for bad in (np.nan, np.inf, -np.inf))], check) == []


def test_losses_stay_within_the_steps_whatever_the_limit():
    def check(limit):
        losses = np.array([0.0, 5e-324, limit / 3, np.nextafter(limit, 0), limit, np.nextafter(limit, np.inf)])
        steps = bounded(np.sort(losses), limit)
        assert steps.min() == 0 and steps.max() == STEPS and (np.diff(steps) >= 0).all()

    assert failures([5e-324, 1e-300, 0.1, 1e308], check) == []


def test_what_diverged_is_not_taken_for_the_best():
    """The twin that counts NaN as 0 would choose it nearly always."""
    losses = [np.full(50, np.nan), np.full(50, 0.1)]
    draws = draws_of(PrivateChoice(8.0, LIMIT), losses, 1000)
    assert follows(draws, law([10.0, 0.1], 8.0)) and not follows(draws, law([0.0, 0.1], 8.0))


def test_losses_are_not_changed():
    losses = np.array([np.nan, 20.0])
    PrivateChoice(1.0, LIMIT).choose([losses, losses])
    assert math.isnan(losses[0]) and losses[1] == 20


# The value


def test_a_choice_costs_epsilon_and_none_costs_nothing():
    assert PrivateChoice(0.5, LIMIT).events(3) == [Pure(0.5)]
    assert PrivateChoice(0.5, LIMIT).events(1) == []
    assert PrivateChoice(0.5, LIMIT).choose([np.array([np.nan])]) == 0


def test_the_integers_are_the_operating_systems(monkeypatch):
    asked, urandom = [], random._urandom

    def counted(size):
        asked.append(size)
        return urandom(size)

    monkeypatch.setattr(random, "_urandom", counted)
    assert len({PrivateChoice(0.1, LIMIT).choose(LOSSES) for _ in range(400)}) == 4
    assert len(asked) >= 800


def test_a_seeded_choice_repeats():
    def choices(seed):
        below = random.Random(seed).randrange
        return [PrivateChoice(0.1, LIMIT).choose(LOSSES, below=below) for _ in range(50)]

    assert choices(3) == choices(3) != choices(4)


def test_numbers_out_of_range_are_refused():
    def check(bad):
        with pytest.raises(ConfigError, match="choice_epsilon"):
            PrivateChoice(bad, 1.0)
        with pytest.raises(ConfigError, match="max_loss"):
            PrivateChoice(1.0, bad)

    assert failures([0.0, -1.0, math.nan, math.inf], check) == []


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="unit"):
        PrivateChoice(1.0, 1.0, "neighbourhood")
    with pytest.raises(PrivacyError, match="no hypothesis"):
        PrivateChoice(1.0, 1.0).choose([])
    with pytest.raises(PrivacyError, match="groups"):
        PrivateChoice(1.0, 1.0).choose(LOSSES, groups=np.zeros(2, int))
    with pytest.raises(PrivacyError, match="groups"):
        PrivateChoice(1.0, 1.0, "group").choose(LOSSES)


# By hand


def coins(*numbers):
    """Integers that come in this order; each must be below what was asked for."""
    left, asked = list(numbers), []

    def below(limit):
        asked.append(limit)
        found = left.pop(0)
        assert found < limit
        return found

    return below, asked, left


def test_a_coin_by_hand():
    def check(gamma, drawn, limits, heads):
        below, asked, left = coins(*drawn)
        assert accepted(gamma, below) is heads and asked == limits and not left

    cases = [
        (Fraction(0), [0], [1], True),
        (Fraction(1, 3), [1], [3], True),
        (Fraction(1, 3), [0, 1], [3, 6], False),
        (Fraction(1, 3), [0, 0, 1], [3, 6, 9], True),
        (Fraction(4, 3), [0, 1], [1, 2], False),
        (Fraction(4, 3), [0, 0, 1, 2], [1, 2, 3, 3], True),
        (Fraction(4, 3), [0, 0, 1, 0, 5], [1, 2, 3, 3, 6], False),
        (Fraction(2), [0, 0, 1, 0, 0, 2, 0], [1, 2, 3, 1, 2, 3, 1], True),
    ]
    assert failures(cases, check) == []


def test_a_choice_by_hand():
    """Scores in units of L; a proposal is accepted with exp(-ε/2·(its score less the best))."""
    choice = PrivateChoice(3.0, 10.0)
    losses = [np.array([10.0, 0.0]), np.array([0.0, 0.0])]
    below, asked, left = coins(0, 0, 3, 1, 0)
    # Hypothesis 0 is proposed; γ = 3/2·1/2 = 3/4: heads (0 < 3), then 3 of 8 is no success: even, so refused.
    assert choice.choose(losses, below=below) == 1
    assert asked == [2, 4, 8, 2, 1] and not left


def test_a_score_by_hand():
    def check(unit, groups, score):
        found = PrivateChoice(1.0, 10.0, unit)._score(np.array([5.0, 2.0, 5.0, 1.0]), groups)
        assert abs(found - score) <= Fraction(4, STEPS) and isinstance(found, Fraction)
        assert PrivateChoice(1.0, 10.0)._score(np.zeros(0), None) == 0

    cases = [
        ("client", None, Fraction(13, 40)),
        ("example", None, Fraction(13, 10)),
        ("group", np.array([5, 5, 2, 2]), Fraction(1, 1) * (Fraction(7, 20) + Fraction(3, 10))),
    ]
    assert failures(cases, check) == []


def test_means_of_groups_are_rounded_down():
    losses = np.array([5, 2, 2, 1]) / STEPS
    assert PrivateChoice(1.0, 1.0, "group")._score(losses, np.array([9, 9, 3, 9])) == Fraction(2 + 2, STEPS)


def test_losses_of_any_shape_are_steps():
    steps = bounded(np.array([[1.0, 2.5], [np.nan, -1.0]], np.float32), 10.0)
    assert steps.tolist() == [round(STEPS / 10), STEPS // 4, STEPS, 0] and steps.dtype == np.int64


def test_a_choice_costs_from_two_hypotheses_on():
    choice = PrivateChoice(0.5, 1.0)
    assert [choice.events(count) for count in (0, 1, 2, 3)] == [[], [], [Pure(0.5)], [Pure(0.5)]]
    assert choice.unit == "client"


def test_what_is_said_of_a_choice_that_is_none():
    for call, says in (
        (lambda: PrivateChoice(1.0, 1.0).choose([]), "there is no hypothesis to choose"),
        (
            lambda: PrivateChoice(1.0, 1.0).choose(LOSSES, np.zeros(2, int)),
            "examples are told apart by groups where the unit is a group, and it is 'client'",
        ),
        (
            lambda: PrivateChoice(1.0, 1.0, "group").choose(LOSSES),
            "examples are told apart by groups where the unit is a group, and it is 'group'",
        ),
    ):
        with pytest.raises(PrivacyError) as refused:
            call()
        assert str(refused.value) == says
    for make, says in (
        (lambda: PrivateChoice(0.0, 1.0), "choice_epsilon must be > 0, got 0.0"),
        (lambda: PrivateChoice(1.0, 0.0), "max_loss must be > 0, got 0.0"),
        (lambda: PrivateChoice(1.0, 1.0, "x"), "unit must be one of client, example, group; got 'x'"),
    ):
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == says
