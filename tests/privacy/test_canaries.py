"""Canaries among the clients: what they are, what they leave as it was, and which mechanisms they find out.

Coins, directions and noise are seeded, so that a test gives the same answer until a generator changes. With other seeds
a sound mechanism is flagged with a chance of `FALSE_ALARM`.
"""

import dataclasses
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from private_strategies import budget_in, played
from support import all_nodes, failures, random_models, zeros

from cloister.audits.canaries import OneRun
from cloister.privacy.accounting.account import Account
from cloister.privacy.claims.premises import CRYPTOGRAPHY
from cloister.privacy.mechanisms import gaussian
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip, clip
from cloister.privacy.mechanisms.gaussian import GaussianMean, global_dp, metric
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.canaries import LENGTH, MEASURABLE, NO_CANARIES, Canaries, decorrelated, evened, sign_in
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.screening import MAX_EXAMPLES
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.strategies.fedopt import FedAdam
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import Layout, from_record
from cloister.utils.cohort import Cohort
from cloister.utils.errors import ConfigError

FALSE_ALARM = 1e-3
DELTA = 1e-5
BOUND = 0.5
OPERATING_SYSTEM = "from the operating system's entropy"


def flat(model):
    return np.concatenate([array.ravel() for array in model.values()], dtype=np.float64)


def contributions(sent, models=(), server_round=1, seed=3):
    layout = Layout.of(sent)
    cohort = Cohort.of(layout, layout.rows(sent), tuple(layout.rows(model) for model in models))
    return Contributions(cohort, (1.0,) * len(models), len(models), len(models), GaussianNoise(seed), server_round)


def written_down(cohort):
    """The same cohort, every row of it in memory."""
    return Cohort.of(cohort.layout, cohort.sent, tuple(tuple(np.asarray(p) for p in row) for row in cohort.rows))


class TestDirections:
    def test_any_stretch_is_part_of_the_whole(self):
        directions = Canaries.drawn(3, seed=1).directions
        whole = directions.signs(2, 1, 0, 5000)
        for start, stop in ((0, 1), (1, 130), (127, 128), (128, 4096), (4999, 5000), (17, 17)):
            assert np.array_equal(directions.signs(2, 1, start, stop), whole[start:stop])

    def test_signs_are_independent_and_fair(self):
        directions = Canaries.drawn(3, seed=1).directions
        rows = np.array([directions.signs(canary, layer, 0, 10_000) for canary in (0, 1, 2) for layer in (0, 1)])
        assert set(np.unique(rows)) == {-1.0, 1.0}
        # Six deviations of a mean of 10,000.
        products = rows @ rows.T / 10_000 - np.eye(6)
        assert np.abs(products).max() < 0.06 and np.abs(rows.mean(axis=1)).max() < 0.06

    def test_others_are_not_taken_up_again(self):
        state = Canaries.drawn(30, seed=2).state_dict()
        assert np.array_equal(Canaries.drawn(30, seed=3).restored(state).coins, state["coins"])
        for name, other in (
            ("coins", state["coins"].astype(int)),
            ("coins", state["coins"][:-1]),
            ("scores", state["scores"][:-1]),
            ("key", state["key"][:-1]),
        ):
            with pytest.raises(ValueError, match=r"^the state of other canaries$"):
                Canaries.drawn(30, seed=3).restored(state | {name: other})

    def test_coins_and_directions_come_from_the_operating_system(self):
        one, other = Canaries.drawn(200), Canaries.drawn(200)
        assert not one.seeded and one.directions != other.directions and (one.coins != other.coins).any()
        assert 50 < one.coins.sum() < 150
        same = Canaries.drawn(200, seed=5)
        assert same.seeded and np.array_equal(same.coins, Canaries.drawn(200, seed=5).coins)
        assert same.directions != Canaries.drawn(200, seed=6).directions

    def test_a_seed_gives_the_same_in_every_release_of_cloister(self):
        """Figures of papers can be made again."""
        drawn = Canaries.drawn(12, seed=4)
        assert drawn.directions.key.hex() == "44f7eaf7e4d92684dc022bbddd46dabf"
        assert np.flatnonzero(drawn.coins).tolist() == [0, 7, 10, 11] and drawn.scores.tolist() == [0.0] * 12
        signs = "".join("-+"[int(sign > 0)] for sign in drawn.directions.signs(2, 1, 120, 136))
        assert signs == "-++++++++-+-++-+"

    def test_are_taken_up_again_as_they_were(self):
        old = Canaries.drawn(30, seed=2).seen((np.ones(500),), 1.0, 1)
        again = Canaries.drawn(30).restored(old.state_dict())
        assert again.directions == old.directions and again.facts() == old.facts() | {"drawn": OPERATING_SYSTEM}
        assert set(old.state_dict()) == {"key", "coins", "scores", "rounds", "size"}
        assert NO_CANARIES.state_dict() == {} and NO_CANARIES.restored({}) is NO_CANARIES


class TestJoining:
    sent = random_models(1, like=zeros(40), seed=9)[0]

    def test_those_whose_coin_says_so_contribute_the_clip(self):
        canaries = Canaries.drawn(30, seed=2)
        given = canaries.joined(contributions(self.sent, [zeros(40)]), BOUND)
        assert len(given.cohort) == 1 + canaries.coins.sum()
        assert given.cohort.norms[1:] == pytest.approx(LENGTH * BOUND, rel=1e-4)
        contributed = clip(given.cohort, BOUND)
        assert (contributed.factors * contributed.norms <= BOUND).all()
        assert contributed.factors[1:] * contributed.norms[1:] == pytest.approx(BOUND, rel=1e-3)

    def test_the_public_size_grows_by_half_of_all_whatever_the_coins_are(self):
        for seed in range(3):
            given = Canaries.drawn(30, seed).joined(contributions(self.sent, [zeros(40)] * 2), BOUND)
            assert (given.expected, given.asked) == (2 + 15, 2 + 30)

    def test_they_weigh_as_much_as_a_client_can(self):
        given = Canaries.drawn(30, seed=2).joined(contributions(self.sent, [zeros(40)]), BOUND)
        assert given.examples == (1.0, *[MAX_EXAMPLES] * (len(given.cohort) - 1))

    def test_without_any_nothing_changes(self):
        given = contributions(self.sent, [zeros(40)])
        assert NO_CANARIES.joined(given, BOUND) is given and NO_CANARIES.scored(given, (), BOUND) is NO_CANARIES

    def test_rows_that_are_made_when_asked_for_are_the_same_as_written_down(self):
        mechanism = global_dp(noise_multiplier=1.0, clipping_norm=BOUND)
        given = Canaries.drawn(30, seed=2).joined(contributions(self.sent, random_models(2, like=self.sent)), BOUND)
        (made,) = mechanism.release(given).models
        again = replace(given, cohort=written_down(given.cohort), noise=GaussianNoise(3))
        (written,) = mechanism.release(again).models
        assert all(np.array_equal(one, other) for one, other in zip(made, written, strict=True))

    def test_no_matrix_of_them_is_kept(self):
        sent, canaries = {"kernel": np.zeros(150_000, np.float32)}, Canaries.drawn(200, seed=2)
        given = contributions(sent)
        tracemalloc.start()
        joined = canaries.joined(given, BOUND)
        models = global_dp(noise_multiplier=1.0, clipping_norm=BOUND).release(joined).models
        canaries.scored(joined, models, BOUND)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 24 << 20 < 150_000 * 4 * canaries.coins.sum()


class TestScores:
    def test_they_are_inner_products_with_the_release(self):
        sent, canaries = random_models(1, like=zeros(20))[0], Canaries.drawn(12, seed=4)
        layout, scores = Layout.of(sent), np.zeros(12)
        rows = [
            np.concatenate([canaries.directions.signs(i, j, 0, n) for j, n in enumerate(layout.sizes)])
            for i in range(12)
        ]
        for server_round in (1, 2, 3):
            given = canaries.joined(contributions(sent, [], server_round), BOUND)
            (model,) = global_dp(noise_multiplier=0.5, clipping_norm=BOUND).release(given).models
            update = np.concatenate(model).astype(np.float64) - flat(sent)
            scores += sign_in(server_round) * np.array(rows) @ update * given.expected / BOUND / layout.size**0.5
            canaries = canaries.scored(given, (model,), BOUND)
        assert layout.size < 64, "of so few numbers no covariance is measured"
        assert canaries.scores == pytest.approx(scores, rel=1e-4, abs=1e-4) and canaries.rounds == 3

    def test_alone_and_without_noise_a_canary_scores_one_a_round(self):
        sent = zeros(3000)
        canaries = replace(Canaries.drawn(2, seed=4), coins=np.array([True, False]))
        for server_round in (1, 2, 3, 4):
            given = canaries.joined(contributions(sent, [], server_round), BOUND)
            models = global_dp(noise_multiplier=0.0, clipping_norm=BOUND).release(given).models
            canaries = canaries.scored(given, models, BOUND)
        assert canaries.scores[0] == pytest.approx(4, rel=0.05) and abs(canaries.scores[1]) < 0.2

    def test_rounds_push_and_pull_in_the_order_of_thue_and_morse(self):
        assert [sign_in(number) for number in range(1, 9)] == [1, -1, -1, 1, -1, 1, 1, -1]

    def test_independent_noise_is_left_as_it_is(self):
        noise = np.random.default_rng(0).standard_normal(20_000)
        assert np.corrcoef(noise, decorrelated(noise))[0, 1] > 0.97
        assert decorrelated(noise).std() == pytest.approx(1, abs=0.05)

    def test_what_repeats_cancels(self):
        rng = np.random.default_rng(0)
        repeated, own = np.resize(rng.standard_normal(2048), 20_000), 0.01 * rng.standard_normal(20_000)
        assert np.corrcoef(own[:16_384], decorrelated(repeated + own)[:16_384])[0, 1] > 0.8

    def test_two_blocks_are_enough_to_see_what_repeats(self):
        """Beside noise that is there twice, what is left is the difference of the blocks."""
        rng = np.random.default_rng(0)
        repeated, own = np.resize(rng.standard_normal(128), 256), 0.01 * rng.standard_normal(256)
        difference = np.concatenate([own[:128] - own[128:], own[128:] - own[:128]])
        assert np.corrcoef(difference, decorrelated(repeated + own))[0, 1] > 0.99

    def test_blocks_are_weighed_by_the_inverse_of_their_covariance(self):
        for size, width in ((256, 128), (300, 128), (20_000, 1024)):
            update = np.random.default_rng(0).standard_normal(size)
            count = size // width
            blocks = update[: count * width].reshape(count, width)
            gram = blocks @ blocks.T
            weighed = np.linalg.solve(gram, blocks) * np.trace(gram) / count
            expected = np.concatenate([weighed.ravel(), update[count * width :]])
            np.testing.assert_allclose(decorrelated(update), expected, rtol=1e-8)

    def test_arrays_are_weighed_by_their_power(self):
        """One that is too short to measure is left as it is; together they are too short for blocks."""
        rng = np.random.default_rng(0)
        long, short, last = rng.standard_normal(MEASURABLE), rng.standard_normal(9), 3 * rng.standard_normal(20)
        power = np.square(np.concatenate([long, short, last])).mean()
        expected = (long * power / np.square(long).mean(), short, last)
        for piece, right in zip(evened((long, short, last)), expected, strict=True):
            np.testing.assert_allclose(piece, right, rtol=1e-12)

    @pytest.mark.parametrize("size", [MEASURABLE, 100])
    def test_an_array_with_less_noise_counts_for_more(self, size):
        rng = np.random.default_rng(0)
        loud, quiet = rng.standard_normal(400), 0.1 * rng.standard_normal(size)
        few = 0.1 * rng.standard_normal(9)
        weighed = evened((loud, quiet, few))
        gains = [float(piece[0] / own[0]) for piece, own in zip(weighed, (loud, quiet, few), strict=True)]
        assert gains[1] / gains[0] == pytest.approx(loud.var() / quiet.var(), rel=0.3) and gains[2] == 1

    def test_nothing_at_all_stays_nothing(self):
        assert not any(piece.any() for piece in evened((np.zeros(20_000), np.zeros(100))))

    def test_what_is_written_down(self):
        seen = Canaries.drawn(12, seed=4).seen((np.ones(500),), 1.0, 1)
        assert seen.facts() == {
            "canaries": 12,
            "guesses": 10,
            "drawn": "from privacy.noise-seed",
            "rounds": 1,
            "parameters": 500,
            "coins": [1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1],
            "scores": seen.scores.tolist(),
        }
        assert Canaries.drawn(12).facts()["drawn"] == OPERATING_SYSTEM

    def test_guesses_are_fixed_by_their_number_alone(self):
        guesses = {0: 0, 1: 0, 9: 8, 100: 30, 200: 42, 1000: 94}
        assert {count: Canaries.drawn(count).guesses for count in guesses} == guesses


# --- claims of real clients stay what they were ---


def around(mechanism, canaries, inner=all_nodes, **options):
    return PrivateStrategy(inner(), mechanism, canaries=canaries, **options)


class TestRealClients:
    models = random_models(3, like=zeros(40))

    def test_their_claim_and_their_ledger_are_the_same(self, tmp_path):
        told = []
        for canaries in (NO_CANARIES, Canaries.drawn(50)):
            budget = budget_in(tmp_path)
            strategy = around(global_dp(noise_multiplier=2.0, clipping_norm=BOUND), canaries, budget=budget)
            played(strategy, self.models, zeros(40))
            events = [entry.event for entry in budget.ledger.entries]
            told.append(
                (strategy.claim(), events, strategy.spent(), strategy.measured.asked, strategy.measured.accepted)
            )
        assert told[0] == told[1]

    def test_whoever_knows_the_canaries_can_subtract_them(self):
        """The remainder is the release of the clients alone, with the same noise."""
        canaries = Canaries.drawn(50, seed=8)
        mechanism, alone = global_dp(noise_multiplier=2.0, clipping_norm=BOUND), contributions(zeros(40), self.models)
        given = canaries.joined(contributions(zeros(40), self.models), BOUND)
        made, expected = (mechanism.release(each).models[0] for each in (given, alone))
        pushed = sum(
            clip(given.cohort, BOUND).factors[3:, None] * [np.concatenate(row) for row in given.cohort.rows[3:]]
        )
        left = given.expected * np.concatenate(made) - pushed
        assert left == pytest.approx(alone.expected * np.concatenate(expected), abs=1e-4)

    def test_what_the_noise_is_calibrated_for_is_the_same_part_of_a_smaller_mean(self):
        strategy = around(global_dp(noise_multiplier=2.0, clipping_norm=BOUND), Canaries.drawn(50))
        played(strategy, self.models, zeros(40))
        assert strategy.measured.sensitivity == BOUND / (3 + 25)
        assert strategy.measured.noise_std == 2 * BOUND / (3 + 25)


# --- where they do not fit ---

POISSON = {"train": Sampling(0.5, min_nodes=1, kind="poisson")}
POPULATION = {"train": Sampling(0.5, min_nodes=1, population=3)}


class Foreign(Mechanism):
    name = "foreign"
    premises = (CRYPTOGRAPHY,)

    def events(self, layout, sampling):
        return ()

    def release(self, contributions):
        raise AssertionError

    def parameters(self):
        return {}


GLOBAL = {"noise_multiplier": 1.0, "clipping_norm": 1.0}


def test_they_are_refused_where_they_do_not_fit():
    def check(mechanism, inner, reason):
        around(mechanism, NO_CANARIES, inner)
        with pytest.raises(ConfigError, match=rf"privacy\.canaries .*{reason}"):
            around(mechanism, Canaries.drawn(10), inner)

    cases = [
        (global_dp(**GLOBAL, placement="rule"), lambda: all_nodes(FedMedian), r"privacy\.placement = 'rule'"),
        (global_dp(**GLOBAL, placement="model"), all_nodes, r"privacy\.placement = 'model'"),
        (global_dp(**GLOBAL | {"clipping_norm": AdaptiveClip(1.0)}), all_nodes, r"privacy\.clipping = 'adaptive'"),
        (metric(**GLOBAL), all_nodes, "decide the distance"),
        (metric(**GLOBAL, release="private"), all_nodes, "decide the distance"),
        (Foreign(), all_nodes, r"privacy\.server = 'foreign'"),
        (global_dp(**GLOBAL), lambda: FedAvg(**POISSON), r"strategy\.sampling = 'poisson'"),
        (global_dp(**GLOBAL), lambda: FedAvg(**POPULATION), r"privacy\.population"),
    ]
    assert failures(cases, check) == []


def test_a_draw_that_a_claim_counts_is_named_with_the_remedy():
    with pytest.raises(ConfigError) as refused:
        around(global_dp(**GLOBAL), Canaries.drawn(10), lambda: FedAvg(**POISSON))
    assert str(refused.value) == (
        "privacy.canaries = 10 contradicts strategy.sampling = 'poisson' and privacy.population: canaries take part in "
        "every round, and what is claimed counts on clients who do not; use 'fixed' and no population"
    )


# --- what they find out ---

SENT = {"kernel": np.zeros((100, 190), np.float32), "bias": np.zeros(1000, np.float32)}
CLIENTS = random_models(3, like=SENT)
COUNT = 300


def measured(mechanism, rounds=2, inner=all_nodes, seed=1, noise=None):
    """Coins and scores of a run of so many rounds."""
    strategy = around(
        mechanism, Canaries.drawn(COUNT, seed), inner, noise=GaussianNoise(seed) if noise is None else noise
    )
    sent = SENT
    for server_round in range(1, rounds + 1):
        arrays, _ = played(strategy, CLIENTS, sent, server_round)
        sent = from_record(arrays)
    seen = strategy.canaries
    assert seen.rounds == rounds
    return OneRun(seen.coins, seen.scores, seen.guesses)


def verdict(run, mechanism, rounds=2, confidence=1 - FALSE_ALARM):
    """Return whether each bound is above the mechanism's claim for so many rounds."""
    claim = Account(mechanism.events(Layout.of(SENT)) * rounds).epsilon(DELTA, "pld")
    shaped, free = run.gaussian(DELTA, confidence), run.distribution_free(DELTA, confidence)
    print(f"claimed {claim:.3f}, Gaussian shape {shaped:.3f}, distribution-free {free:.3f}")
    return shaped > claim, free > claim


RIGHT = global_dp(noise_multiplier=2.0, clipping_norm=BOUND)
"""Of two rounds it claims ε = 2.96: the distribution-free bound, too, can show more."""


class TestSoundOnes:
    @pytest.mark.parametrize(
        ("mechanism", "rounds", "inner"),
        [
            (RIGHT, 4, all_nodes),
            (RIGHT, 2, lambda: all_nodes(FedAdam)),
            (global_dp(noise_multiplier=0.5, clipping_norm=BOUND), 1, all_nodes),
            (global_dp(noise_multiplier=2.0, clipping_norm=BOUND, examples_cap=50), 2, all_nodes),
        ],
    )
    def test_are_not_flagged_and_most_is_seen(self, mechanism, rounds, inner):
        run = measured(mechanism, rounds, inner)
        assert verdict(run, mechanism, rounds) == (False, False)
        assert run.shift(0.5) > 0.7 * rounds**0.5 / mechanism.multiplier, "what is hardly seen is not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twin(GaussianMean):
    """A right mechanism that releases with other noise, or another clip, than it claims."""

    share: float = 0.5

    def release(self, contributions):
        less = GaussianMean(noise_multiplier=self.share * self.multiplier, clip=self.clip)
        return replace(less.release(contributions), following=None)


class WideClip(Twin):
    """The noise is that of C, and the clip lets 4C pass."""

    def release(self, contributions):
        wide = GaussianMean(noise_multiplier=self.multiplier / 4, clip=FixedClip(4 * self.clip.bound))
        return replace(wide.release(contributions), following=None)


class DividedTwice(Twin):
    def release(self, contributions):
        less = GaussianMean(noise_multiplier=self.multiplier / contributions.expected, clip=self.clip)
        return replace(less.release(contributions), following=None)


class Repeated(Twin):
    """The same noise again in every `period`th round."""

    period = 1

    def release(self, contributions):
        noise = GaussianNoise(contributions.server_round % self.period)
        return GaussianMean.release(self, replace(contributions, noise=noise))


class RepeatedEverySecondRound(Repeated):
    period = 2


class Bare(Twin):
    """One number out of `spared` carries no noise."""

    def release(self, contributions):
        calm = GaussianMean(noise_multiplier=0.0, clip=self.clip).release(contributions).models[0]
        noised = GaussianMean.release(self, contributions)
        return replace(noised, models=(self.mixed(calm, noised.models[0]),))

    def mixed(self, calm, noised):
        return (noised[0], calm[1])


class WithSharedNoise(Bare):
    """Numbers that should have noise of their own share it."""

    def mixed(self, calm, noised):
        std = float((noised[0] - calm[0]).std())
        return tuple(piece + np.float32(std) * self.pattern(piece.size) for piece in calm)


class OneNumberForAll(WithSharedNoise):
    def pattern(self, size):
        return np.full(size, np.random.default_rng(0).standard_normal(), np.float32)


class OneBlockForAll(WithSharedNoise):
    def pattern(self, size):
        return np.resize(np.random.default_rng(0).standard_normal(2048).astype(np.float32), size)


def twin(kind, **options):
    kind = kind if "__dataclass_params__" in vars(kind) else dataclasses.dataclass(frozen=True, kw_only=True)(kind)
    return kind(noise_multiplier=2.0, clip=FixedClip(BOUND), **options)


BROKEN = {
    "half of the noise": (lambda: twin(Twin), 2),
    "a third of the noise": (lambda: twin(Twin, share=1 / 3), 1),
    "no noise": (lambda: twin(Twin, share=0.0), 1),
    "a clip that is too wide": (lambda: twin(WideClip), 2),
    "noise divided twice": (lambda: twin(DividedTwice), 1),
    "the same noise in all rounds": (lambda: twin(Repeated), 2),
    "the same noise in every second round": (lambda: twin(RepeatedEverySecondRound), 4),
    "an array without noise": (lambda: twin(Bare), 1),
    "one number of noise for all": (lambda: twin(OneNumberForAll), 1),
    "one block of noise for all": (lambda: twin(OneBlockForAll), 1),
}


class TestBrokenOnes:
    def test_the_control_is_not_flagged(self):
        same = twin(Twin, share=1.0)
        assert verdict(measured(same), same) == (False, False)

    @pytest.mark.parametrize("name", BROKEN)
    def test_are_flagged(self, name):
        make, rounds = BROKEN[name]
        broken = make()
        shaped, _ = verdict(measured(broken, rounds), RIGHT, rounds, confidence=0.95)
        assert shaped

    def test_without_a_distribution_too(self):
        assert verdict(measured(twin(Twin, share=0.1), 1), RIGHT, 1, confidence=0.95) == (True, True)

    def test_a_clip_that_is_left_out(self, monkeypatch, unverified):
        monkeypatch.setattr(gaussian, "clip", lambda cohort, bound: replace(cohort, l2_bound=bound))
        assert verdict(measured(RIGHT, 1), RIGHT, 1, confidence=0.95) == (True, True)

    def test_a_source_that_says_the_same_again(self):
        class Stuck(GaussianNoise):
            def places(self, stretches):
                self._numbers = iter(range(10**6))
                return super().places(stretches)

        assert verdict(measured(RIGHT, noise=Stuck(3)), RIGHT)[0]


# --- mechanisms on the clients, whose releases are one canary's each ---


class TestLocalMechanisms:
    """Each canary is a client that releases its own update, or zero: neighbours that are told apart by zeroing."""

    def scored(self, mechanism, size=32):
        canaries, noise, scores = Canaries.drawn(COUNT, seed=1), GaussianNoise(1), []
        start = {"w": np.zeros(size, np.float32)}
        for canary, coin in enumerate(canaries.coins):
            direction = canaries.directions.signs(canary, 0, 0, size)
            released = mechanism.release({"w": LENGTH * coin * direction}, start, noise)
            scores.append(float(released["w"] @ direction))
        return OneRun(canaries.coins, np.array(scores), canaries.guesses)

    def test_local_gaussian(self):
        claim = Account(LocalGaussian(1.0, 1.5).events(32)).epsilon(DELTA, "pld")
        assert 0.3 * claim < self.scored(LocalGaussian(1.0, 1.5)).gaussian(DELTA, 1 - FALSE_ALARM) <= claim
        assert self.scored(LocalGaussian(1.0, 0.75)).gaussian(DELTA, 1 - FALSE_ALARM) > claim

    def test_local_laplace(self):
        """Pure p/ν: only the bound without a distribution speaks of it."""
        size, nu = 32, 16.0
        sound = self.scored(LocalLaplace(1.0, nu), size).distribution_free(0.0, 1 - FALSE_ALARM)
        assert sound <= size / nu
        assert self.scored(LocalLaplace(1.0, nu / 20), size).distribution_free(0.0) > size / nu
