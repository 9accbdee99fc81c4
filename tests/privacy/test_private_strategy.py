"""Claims, refusals, promises and measurements of a strategy inside a mechanism, field by field."""

import math
from functools import partial

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from private_strategies import (
    DRIVEN,
    LAYOUT,
    NOMINAL,
    SEEDED,
    SILENT,
    budget_in,
    globally,
    gone,
    metrically,
    played,
    privately,
)
from support import all_nodes, content, failures, flat, grid_of, one_round, random_models, zeros

from cloister.privacy.accounting.budget import from_wire
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import CARRIED, CRYPTOGRAPHY
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.gaussian import GaussianMean, global_dp, metric
from cloister.privacy.mechanisms.metric import CONSTANT, DistanceScaled
from cloister.privacy.mechanisms.noise import GaussianNoise, grid_step
from cloister.server.canaries import Canaries
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.strategy_wrapper import Measurements
from cloister.strategies.averaging import FedAvg
from cloister.strategies.averaging import Sampling as Drawing
from cloister.strategies.fedopt import FedYogi
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import to_record
from cloister.utils.errors import BudgetExhausted, ConfigError
from cloister.utils.registry import MEAN, SELECTION


class Unknown(FedAvg):
    """It aggregates in its own way, and declares nothing."""

    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, replies)


class Whole(FedAvg):
    """Meaningless on one reply, and no trimmed mean."""

    capabilities = SELECTION


def no_mean(name):
    return (
        f"privacy.placement is 'model': the noise is calibrated for a plain mean, and {name} is none; one client can "
        "move its output further than C/n"
    )


class TestClaims:
    def test_of_a_mechanism(self, tmp_path):
        strategy = globally(budget=budget_in(tmp_path, relation="replace-one"), examples_cap=5.0)
        assert strategy.claim() == Claim(
            premises=(CRYPTOGRAPHY, *CARRIED),
            mechanism="global-dp",
            relation="replace-one",
            parameters={
                "privacy.noise-multiplier": 2.0,
                "privacy.placement": "update",
                "privacy.examples-cap": 5.0,
                "privacy.clipping": "fixed",
                "privacy.clipping-norm": 1.5,
            },
        )
        assert globally().claim().relation == "add-or-remove" and globally().claim().seeded is False

    def test_named_mechanisms_cap_no_examples_unless_told(self):
        for make in (global_dp, metric):
            assert make(noise_multiplier=1.0, clipping_norm=1.0).examples_cap == 0.0

    def test_of_metric_noise(self):
        strategy = metrically(
            noise=GaussianNoise(1),
            distance="l2",
            direction="multiply",
            measure="before",
            distance_multiplier=0.7,
            min_distance=0.2,
            max_distance=3.0,
        )
        assert strategy.claim() == Claim(
            premises=(CRYPTOGRAPHY, *CARRIED),
            mechanism="metric",
            reasons=(SEEDED, NOMINAL + DRIVEN),
            seeded=True,
            parameters={
                "privacy.noise-multiplier": 2.0,
                "privacy.placement": "update",
                "privacy.examples-cap": 0.0,
                "privacy.clipping": "fixed",
                "privacy.clipping-norm": 1.5,
                "privacy.distance": "l2",
                "privacy.distance-direction": "multiply",
                "privacy.distance-clip": "before",
                "privacy.distance-release": "exact",
                "privacy.distance-noise-multiplier": 0.7,
                "privacy.min-distance": 0.2,
                "privacy.max-distance": 3.0,
            },
        )

    @pytest.mark.parametrize(
        ("strategy", "reasons"),
        [
            (globally(), ()),
            (globally(FedYogi()), ()),
            (globally(z=0.0), (SILENT,)),
            (globally(z=0.0, noise=GaussianNoise(1)), (SEEDED, SILENT)),
            (
                globally(placement="model"),
                ("privacy.placement is 'model': the noise depends on how many clients replied",),
            ),
            (globally(FedYogi(), z=0.0, placement="model"), (SILENT, no_mean("FedYogi"))),
            (globally(Unknown(), placement="model"), (no_mean("Unknown"),)),
            (privately(), ()),
            (metrically(), (NOMINAL,)),
            (metrically(measure="before"), (NOMINAL + DRIVEN,)),
        ],
    )
    def test_caveats(self, strategy, reasons):
        assert strategy.caveats() == reasons == strategy.claim().reasons
        assert strategy.is_accounted == (not reasons) == strategy.claim().is_guaranteed

    def test_what_a_strategy_is_made_with_unless_said(self):
        plain, metric = globally(), metrically()
        for each in (plain, metric):
            mechanism = each.mechanism
            assert (mechanism.placement, mechanism.examples_cap, each.budget) == ("update", 0.0, None)
            assert isinstance(each.noise, GaussianNoise) and not each.noise.seeded
            assert (mechanism.clip, mechanism.noise_multiplier) == (FixedClip(1.5), 2.0)
        assert plain.mechanism.scale is CONSTANT
        assert metric.mechanism.scale == DistanceScaled(
            distance="mean-layer-frobenius",
            direction="divide",
            measure="after",
            release="exact",
            distance_multiplier=1.0,
            min_distance=0.1,
            max_distance=0.0,
        )

    def test_what_is_given_is_what_is_used(self, tmp_path):
        noise, adaptive, budget = GaussianNoise(1), AdaptiveClip(1.0), budget_in(tmp_path)
        for make in (globally, metrically):
            strategy = make(bound=adaptive, noise=noise, budget=budget, examples_cap=3.0)
            assert strategy.noise is noise and strategy.mechanism.clip is adaptive and strategy.budget is budget
            assert strategy.mechanism.examples_cap == 3.0
            assert make(FedMedian(), placement="rule").mechanism.placement == "rule"


class TestRefusals:
    def test_say_what_was_found_and_what_to_use(self):
        cases = [
            *[
                (
                    partial(make, FedMedian()),
                    "privacy.placement = 'update' shows strategy FedMedian one reply, the release, and it needs every "
                    "reply; use privacy.placement = 'rule' (sound), or 'model' (heuristic)",
                )
                for make in (globally, metrically)
            ],
            (
                partial(globally, Whole()),
                "privacy.placement = 'update' shows strategy Whole one reply, the release, and it needs every reply; "
                "use privacy.placement = 'model' (heuristic)",
            ),
            (
                partial(globally, Unknown()),
                "strategy Unknown declares no capabilities, so it is not known whether it means anything on one "
                "reply, the release; declare them in its class (capabilities = cloister.Capabilities(...)), or use "
                "privacy.placement = 'model' (heuristic)",
            ),
            *[
                (
                    partial(globally, inner(), placement="rule"),
                    "privacy.placement = 'rule' is for a coordinate-wise median or trimmed mean, and strategy "
                    f"{inner.__name__} is none; use privacy.placement = 'update'",
                )
                for inner in (FedAvg, Unknown)
            ],
            *[
                (
                    partial(globally, placement="model", **options),
                    "privacy.placement = 'model' goes with a fixed clip and uniform weights only; use "
                    "privacy.placement = 'update'",
                )
                for options in ({"examples_cap": 1.0}, {"bound": AdaptiveClip(1.0)})
            ],
            (
                partial(globally, FedMedian(train=Drawing(0.5, min_nodes=1, kind="poisson")), placement="rule"),
                "privacy.server = 'global-dp' as it is set needs a cohort of public size, and strategy.sampling = "
                "'poisson' draws a secret one; use 'fixed'",
            ),
            (
                partial(globally, FedMedian(), placement="rule", examples_cap=2.5),
                "privacy.examples-cap = 2.5 has no meaning with privacy.placement = 'rule': a rank knows no weights; "
                "remove it",
            ),
            (
                partial(privately, bound=AdaptiveClip(1.0)),
                "privacy.distance-release = 'private' with privacy.clipping = 'adaptive' needs privacy.max-distance "
                "above 0: the limit of the distance moves with the clip, so no minimum of the noise is known "
                "beforehand",
            ),
            (
                partial(privately, measure="before"),
                "privacy.distance-release = 'private' needs privacy.distance-clip = 'after': before clipping no noise "
                "covers what one client can do to the distance",
            ),
            (partial(globally, z=-1.0), "noise_multiplier must be >= 0, got -1.0"),
            (partial(globally, bound=0.0), "clipping_norm must be > 0, got 0.0"),
            (partial(globally, examples_cap=-1.0), "examples_cap must be >= 0, got -1.0"),
            (partial(globally, placement="x"), "placement must be one of model, rule, update; got 'x'"),
            (partial(metrically, direction="x"), "distance_direction must be one of divide, multiply; got 'x'"),
            (partial(metrically, measure="x"), "distance_clip must be one of after, before; got 'x'"),
            (partial(metrically, release="x"), "distance_release must be one of exact, private; got 'x'"),
            (partial(metrically, min_distance=-1.0), "min_distance must be >= 0, got -1.0"),
            (partial(metrically, distance_multiplier=0.0), "distance_noise_multiplier must be > 0, got 0.0"),
            (partial(metrically, max_distance=-1.0), "max_distance must be >= 0, got -1.0"),
        ]

        def check(make, says):
            with pytest.raises(ConfigError) as refused:
                make()
            assert str(refused.value) == says

        assert failures(cases, check) == []

    def test_what_goes_together(self):
        assert globally(FedMedian(), placement="model", z=1.0)
        assert metrically(bound=AdaptiveClip(1.0)) and metrically(measure="before")
        assert privately(bound=AdaptiveClip(1.0), max_distance=1.0)


class TestPromises:
    def sent(self, strategy):
        config, grid = ConfigRecord({"lr": 0.5}), grid_of(lambda *_: None, 2)
        messages = list(strategy.configure_train(3, to_record(zeros()), config, grid))
        (told,) = {tuple(m.content["config"].get("privacy-events", ())) for m in messages}
        assert len(messages) == 2 and all(m.content["config"]["lr"] == 0.5 for m in messages)
        assert all(m.content["config"]["server-round"] == 3 for m in messages)
        return from_wire(told) if told else None

    def test_every_release_of_a_round_and_nothing_where_none_is_claimed(self):
        assert self.sent(globally()) == (Gaussian(2.0),)
        assert self.sent(privately(distance_multiplier=0.7, max_distance=0.5)) == (Gaussian(0.7), Gaussian(4.0))
        for none in (globally(z=0.0), globally(noise=GaussianNoise(1)), metrically(), globally(placement="model")):
            assert self.sent(none) is None

    def test_a_round_that_a_budget_covers_is_sent(self, tmp_path):
        strategy = globally(budget=budget_in(tmp_path, max_epsilon=50.0))
        assert self.sent(strategy) == (Gaussian(2.0),) and strategy.budget.ledger.entries == []
        with pytest.raises(BudgetExhausted):
            self.sent(globally(budget=budget_in(tmp_path, max_epsilon=0.5)))


class TestARound:
    MODELS = random_models(4, 10.0)

    def test_is_measured_and_recorded(self, tmp_path):
        strategy = globally(z=2.0, bound=1.5, budget=budget_in(tmp_path))
        played(strategy, self.MODELS)
        assert strategy.measured == Measurements(
            asked=4,
            accepted=4,
            noise_std=2.0 * 1.5 / 4,
            noise_multiplier=2.0,
            sensitivity=1.5 / 4,
            clipping_norm=1.5,
            epsilon=strategy.budget.epsilon(),
        )
        assert 0 < strategy.measured.epsilon < math.inf
        (entry,) = strategy.budget.ledger.entries
        found = (entry.event, entry.round, entry.mechanism, entry.clip, entry.done)
        assert found == (Gaussian(2.0), 1, "global-dp", 1.5, True)

    def test_without_a_guarantee_the_server_sees_more(self):
        strategy = globally(z=2.0, bound=1.5, noise=GaussianNoise(1))
        near = {name: array * 0 for name, array in self.MODELS[0].items()}
        played(strategy, [*self.MODELS[:3], near])
        assert (strategy.measured.clipped_fraction, strategy.measured.epsilon) == (0.75, None)
        assert strategy.measured.distance is strategy.measured.clip_calibration is None

    def test_with_metric_noise(self):
        strategy = metrically(z=2.0, bound=1.5, noise=GaussianNoise(1), measure="before")
        for server_round in (1, 2):
            played(strategy, self.MODELS, server_round=server_round)
            measured = strategy.measured
            assert measured.noise_multiplier == pytest.approx(2.0 / measured.distance)
            assert measured.noise_std == pytest.approx(2.0 / measured.distance * 1.5 / 4)
            assert measured.released_distance is None
            assert (measured.clip_calibration is None) == (server_round == 2)

    def test_who_is_rejected_is_told_of_in_any_round(self):
        def unfit(node, _):
            return content({"kernel": np.zeros((1, 1), np.float32)} if node == 1 else self.MODELS[node])

        for make in (globally, metrically):
            strategy = make()
            one_round(strategy, grid_of(unfit, 3), zeros())
            assert [each.node_id for each in strategy.measured.rejected] == [1]
            assert (strategy.measured.asked, strategy.measured.accepted) == (3, 2)
        silent = metrically()
        assert one_round(silent, grid_of(gone, 3), zeros()) == (None, None)
        measured = silent.measured
        assert (measured.asked, measured.accepted, len(measured.rejected)) == (3, 0, 3)
        assert measured == Measurements(3, 0, measured.rejected)

    def test_weights_are_capped_counts(self):
        models = [{name: np.ones_like(array) for name, array in zeros().items()}] * 2
        strategy = globally(z=0.0, bound=100.0, examples_cap=20.0)
        grid = grid_of(lambda node, _: content(models[node - 1], (10, 80)[node - 1]), 2)
        np.testing.assert_allclose(flat(one_round(strategy, grid, zeros())[0]), (0.5 + 1.0) / 2, rtol=1e-6)

    @pytest.mark.parametrize(("replies", "divisor"), [(0, 1), (1, 1), (2, 2), (3, 3)])
    def test_of_models_is_noised_for_the_replies_that_came(self, replies, divisor):
        def answer(node, _):
            return content(self.MODELS[node]) if node <= replies else gone(node, _)

        strategy = globally(z=2.0, bound=1.5, placement="model")
        arrays, metrics = one_round(strategy, grid_of(answer, 3), zeros())
        assert strategy.measured.noise_std == pytest.approx(2.0 * 1.5 / divisor)
        assert strategy.measured.sensitivity == pytest.approx(1.5 / divisor)
        if not replies:
            assert (arrays, metrics) == (None, None)
        else:
            assert np.std(flat(arrays)) > 0.1

    def test_of_models_whose_strategy_returns_none(self):
        class Undecided(FedAvg):
            def aggregate_train(self, server_round, replies):
                assert len(replies) == 3 and server_round == 7
                return None, None

        strategy = globally(all_nodes(Undecided), placement="model")
        assert played(strategy, self.MODELS[:3], server_round=7) == (None, None)

    def test_of_models_asks_no_strategy_where_nobody_replied(self):
        """Flower's own strategies divide by the number of replies."""

        class Unasked(FedAvg):
            def aggregate_train(self, server_round, replies):
                pytest.fail("it was asked")

        strategy = globally(all_nodes(Unasked), placement="model")
        assert one_round(strategy, grid_of(gone, 3), zeros()) == (None, None)

    def test_is_recorded_before_the_strategy_sees_its_one_release(self, tmp_path):
        budget = budget_in(tmp_path)

        class Watching(FedAvg):
            capabilities = MEAN

            def aggregate_train(self, server_round, replies):
                self.noted = (server_round, len(list(replies)), [entry.done for entry in budget.ledger.entries])
                return super().aggregate_train(server_round, replies)

        inner = all_nodes(Watching)
        played(globally(inner, budget=budget), self.MODELS, server_round=7)
        assert inner.noted == (7, 1, [False])
        assert [(entry.round, entry.done) for entry in budget.ledger.entries] == [(7, True)]

    def test_of_models_by_hand(self):
        strategy = globally(z=2.0, bound=1.5, placement="model", noise=GaussianNoise(1))
        calm = globally(z=0.0, bound=1.5, placement="model", noise=GaussianNoise(1))
        found, plain = (flat(played(each, self.MODELS)[0]) for each in (strategy, calm))
        normals, drawn = GaussianNoise(1), [np.zeros(array.size) for array in zeros().values()]
        for piece in drawn:
            normals.add(piece, 0.75)
        np.testing.assert_allclose(found - plain, np.concatenate(drawn), atol=1e-5)

    def test_of_models_is_on_the_grid_of_the_most_noise_that_there_could_have_been(self):
        """Else the spacing of its numbers would tell the distance that has set the noise."""
        strategy = metrically(z=2.0, bound=1.5, placement="model", min_distance=0.25)
        arrays, _ = played(strategy, self.MODELS)
        widest = 2.0 / 0.25 * 1.5 / 4
        steps = flat(arrays).astype(np.float64) / grid_step(widest)
        assert strategy.measured.noise_std < widest / 4 and np.array_equal(steps, np.rint(steps))

    def test_of_a_rule_is_the_trimmed_mean_of_who_was_asked(self):
        def answer(node, _):
            return content(self.MODELS[node]) if node < 4 else gone(node, _)

        strategy = globally(all_nodes(FedMedian), z=0.0, bound=1e6, placement="rule")
        arrays, _ = one_round(strategy, grid_of(answer, 5), zeros())
        stacked = np.array([np.concatenate([a.ravel() for a in model.values()]) for model in self.MODELS[1:4]])
        expected = np.median(np.concatenate([stacked, np.zeros((2, stacked.shape[1]))]), axis=0)
        np.testing.assert_allclose(flat(arrays), expected, rtol=1e-5)
        assert strategy.measured.sensitivity == pytest.approx(1e6)

    def test_the_clip_follows_after_it(self, tmp_path):
        strategy = globally(bound=AdaptiveClip(1.0, bits_multiplier=3.0), budget=budget_in(tmp_path))
        played(strategy, self.MODELS)
        assert strategy.measured.clipping_norm == 1.0 != strategy.mechanism.clip.bound
        assert strategy.mechanism.clip.initial == 1.0
        assert strategy.budget.ledger.entries[0].clip == 1.0

    def test_a_private_round_is_recorded_in_two_lines(self, tmp_path):
        strategy = privately(distance_multiplier=0.7, max_distance=0.5, budget=budget_in(tmp_path))
        played(strategy, self.MODELS, server_round=4)
        found = [(entry.event, entry.round, entry.mechanism, entry.clip) for entry in strategy.budget.ledger.entries]
        assert found == [(Gaussian(0.7), 4, "metric", 1.5), (Gaussian(4.0), 4, "metric", 1.5)]
        assert strategy.measured.distance is None and strategy.measured.released_distance is not None

    def test_what_is_spent_after_it(self, tmp_path):
        assert globally().spent() is None
        strategy = globally(budget=budget_in(tmp_path))
        assert strategy.spent() == 0.0
        played(strategy, self.MODELS)
        assert strategy.spent() == strategy.budget.epsilon() > 0
        seeded = globally(noise=GaussianNoise(1), budget=strategy.budget)
        played(seeded, self.MODELS)
        assert seeded.spent() is None is strategy.spent()


class TestWhatADrawAmplifies:
    """An accountant may count on a draw that was random and secret, over a population that is known; on no other."""

    @pytest.mark.parametrize(
        ("draw", "expected"),
        [
            ({"kind": "poisson"}, Sampling("poisson", probability=0.5)),
            ({"population": 8}, Sampling("without-replacement", cohort=4, population=8)),
            ({}, UNSAMPLED),
            ({"population": 8, "rng": np.random.default_rng(3)}, UNSAMPLED),
            ({"kind": "poisson", "rng": np.random.default_rng(3)}, UNSAMPLED),
        ],
    )
    def test_is_the_one_release_of_a_round(self, draw, expected):
        strategy = globally(FedAvg(train=Drawing(0.5, min_nodes=1, **draw)))
        assert strategy.sampling == expected and strategy.events(LAYOUT) == (Gaussian(2.0, expected),)
        assert strategy.has_secret_cohorts == (expected != UNSAMPLED)
        metric = privately(inner=FedAvg(train=Drawing(0.5, min_nodes=1, **draw)))
        assert metric.sampling == UNSAMPLED and not metric.has_secret_cohorts

    def test_is_nothing_where_a_strategy_says_nothing_of_its_draw(self):
        assert globally(flower.FedAvg()).sampling == UNSAMPLED


def test_the_events_of_a_round_without_a_guarantee_say_why():
    assert globally().events(LAYOUT) == (Gaussian(2.0),)
    assert metrically().events(LAYOUT) == (Unaccounted(NOMINAL),)
    assert globally(z=0.0, noise=GaussianNoise(1)).events(LAYOUT) == (Unaccounted(f"{SEEDED}; {SILENT}"),)
    seeded = privately(noise=GaussianNoise(1), z=0.0).events(LAYOUT)
    assert seeded == (Unaccounted(f"{SEEDED}; {SILENT}"),) * 2


def globally_with_canaries(canaries):
    return PrivateStrategy(all_nodes(), global_dp(noise_multiplier=2.0, clipping_norm=1.5), canaries=canaries)


class TestAMechanismThatInheritsItsState:
    """It may keep more from round to round than the class it inherits from says."""

    @staticmethod
    def of(**options):
        class Inheriting(GaussianMean):
            __module__ = "elsewhere"

        mechanism = globally(**options).mechanism
        return PrivateStrategy(all_nodes(), Inheriting(**vars(mechanism)), noise=GaussianNoise(1))

    REFUSAL = (
        "resume: privacy.server = 'global-dp' was calibrated, or changes from round to round, and does not say how it "
        "goes on; its class needs state_dict and restored of its own (docs/extending.md)"
    )

    def test_goes_on_where_nothing_has_changed(self):
        self.of().load_state_dict(self.of().state_dict())

    def test_is_not_resumed_where_something_has(self):
        strategy = self.of(bound=AdaptiveClip(1.5))
        played(strategy, [zeros()] * 3)
        with pytest.raises(ConfigError) as refused:
            self.of(bound=AdaptiveClip(1.5)).load_state_dict(strategy.state_dict())
        assert str(refused.value) == self.REFUSAL

    def test_is_not_resumed_where_its_noise_is_calibrated(self):
        with pytest.raises(ConfigError) as refused:
            self.of(z="auto").load_state_dict(self.of().state_dict())
        assert str(refused.value) == self.REFUSAL


class TestItsState:
    """One that takes up the state of another goes on as that one does."""

    def test_holds_the_clip_and_what_the_strategy_keeps(self):
        old, new = (globally(all_nodes(FedYogi), bound=AdaptiveClip(1.5), noise=GaussianNoise(1)) for _ in range(2))
        played(old, [zeros()] * 3)
        new.load_state_dict(old.state_dict())
        assert new.mechanism == old.mechanism and new.mechanism.clip.bound != 1.5
        assert new.state_dict().keys() == old.state_dict().keys()
        for name, array in old.state_dict().items():
            np.testing.assert_array_equal(new.state_dict()[name], array)

    def test_holds_canaries_and_whether_the_mechanism_has_followed(self):
        def made():
            return globally_with_canaries(Canaries.drawn(20))

        old, new = made(), made()
        played(old, [zeros()] * 3)
        new.load_state_dict(old.state_dict())
        assert new.canaries.facts() == old.canaries.facts() and new.canaries.rounds == 1
        told = [each.state_dict()["followed"] for each in (made(), old, new)]
        assert [flag.dtype for flag in told] == [bool] * 3 and [bool(flag) for flag in told] == [False, True, True]
