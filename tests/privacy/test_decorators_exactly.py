"""What the decorators claim, record, promise and refuse, field by field, and what a calibration comes to."""

import math

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from support import all_nodes, content, flat, grid_of, one_round, random_models, zeros
from test_clipping import cohort_of

from cloister.core.arrays import Layout, to_record
from cloister.core.decorator import Measurements
from cloister.core.errors import BudgetExhausted, ConfigError, PrivacyError
from cloister.privacy.books import Books
from cloister.privacy.claim import Claim
from cloister.privacy.clipping import AdaptiveClip, FixedClip, clip
from cloister.privacy.decorators import GlobalDP, MetricDP
from cloister.privacy.events import UNSAMPLED, Gaussian, Sampling, Unaccounted
from cloister.privacy.ledger import Ledger
from cloister.privacy.noise import GaussianNoise
from cloister.strategies.averaging import FedAvg
from cloister.strategies.fedopt import FedYogi
from cloister.strategies.robust import FedMedian
from cloister.strategies.sampling import Sampling as Drawing

LAYOUT = Layout.of(zeros())
SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
SILENT = "privacy.noise-multiplier is 0: there is no noise"
NOMINAL = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
DRIVEN = ", and before clipping one client can drive the noise to nothing"


def globally(inner=None, z=2.0, bound=1.5, **options):
    return GlobalDP(inner or all_nodes(), noise_multiplier=z, clipping_norm=bound, **options)


def metrically(inner=None, z=2.0, bound=1.5, **options):
    return MetricDP(inner or all_nodes(), noise_multiplier=z, clipping_norm=bound, **options)


def privately(**options):
    return metrically(release="private", **options)


@pytest.fixture
def books(tmp_path):
    def of(**options):
        return Books(Ledger(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"), "run", **options)

    return of


def gone(node, _):
    raise RuntimeError("gone")


def played(strategy, models, sent=None, server_round=1):
    grid = grid_of(lambda node, _: content(models[node - 1]), len(models))
    return one_round(strategy, grid, zeros() if sent is None else sent, server_round)


class TestClaims:
    def test_of_a_mechanism(self, books):
        strategy = globally(books=books(relation="replace-one"), examples_cap=5.0)
        assert strategy.claim() == Claim(
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
            (globally(), []),
            (globally(z=0.0), [SILENT]),
            (globally(z=0.0, noise=GaussianNoise(1)), [SILENT, SEEDED]),
            (
                globally(placement="model"),
                ["privacy.placement is 'model': the noise depends on how many clients replied"],
            ),
            (
                globally(FedYogi(), placement="model"),
                [
                    "privacy.placement is 'model': the noise is calibrated for a plain mean, and FedYogi is none; one "
                    "client can move its output further than C/n"
                ],
            ),
            (
                globally(flower.FedAvg(), placement="model"),
                [
                    "privacy.placement is 'model': the noise is calibrated for a plain mean, and FedAvg is none; one "
                    "client can move its output further than C/n"
                ],
            ),
            (privately(), []),
            (metrically(), [NOMINAL]),
            (metrically(measure="before"), [NOMINAL + DRIVEN]),
        ],
    )
    def test_reservations(self, strategy, reasons):
        assert strategy.reservations() == reasons == list(strategy.claim().reasons)
        assert strategy.is_accounted == (not reasons)

    def test_what_a_strategy_is_made_with_unless_said(self):
        plain, metric = globally(), metrically()
        for each in (plain, metric):
            assert (each.placement, each.examples_cap, each.books) == ("update", 0.0, None)
            assert isinstance(each.noise, GaussianNoise) and not each.noise.seeded
            assert type(each.clip) is FixedClip and (each.clip.bound, each.noise_multiplier) == (1.5, 2.0)
        found = (metric.distance_name, metric.direction, metric.measure, metric.release)
        assert found == ("mean-layer-frobenius", "divide", "after", "exact")
        assert (metric.distance_multiplier, metric.min_distance, metric.max_distance) == (1.0, 0.1, 0.0)

    def test_what_is_given_is_what_is_used(self, books):
        noise, adaptive, kept = GaussianNoise(1), AdaptiveClip(1.0), books()
        for make in (globally, metrically):
            strategy = make(bound=adaptive, noise=noise, books=kept, examples_cap=3.0)
            assert strategy.noise is noise and strategy.clip is adaptive and strategy.books is kept
            assert strategy.examples_cap == 3.0
            assert make(FedMedian(), placement="rule").placement == "rule"


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (
                lambda: globally(FedMedian()),
                "privacy.placement = 'update' shows strategy FedMedian one reply, the release, and it needs every "
                "reply; use privacy.placement = 'rule' (sound), or 'model' (heuristic)",
            ),
            (
                lambda: globally(Whole()),
                "privacy.placement = 'update' shows strategy Whole one reply, the release, and it needs every reply; "
                "use privacy.placement = 'model' (heuristic)",
            ),
            (
                lambda: globally(placement="rule"),
                "privacy.placement = 'rule' is for a coordinate-wise median or trimmed mean, and strategy FedAvg is "
                "none; use privacy.placement = 'update'",
            ),
            *[
                (
                    make,
                    "privacy.placement = 'model' goes with a fixed clip and uniform weights only; use "
                    "privacy.placement = 'update'",
                )
                for make in (
                    lambda: globally(placement="model", examples_cap=1.0),
                    lambda: globally(placement="model", bound=AdaptiveClip(1.0)),
                )
            ],
            (
                lambda: globally(FedMedian(train=Drawing(0.5, min_nodes=1, kind="poisson")), placement="rule"),
                "privacy.placement = 'rule' needs a cohort of public size, and strategy.sampling = 'poisson' draws a "
                "secret one; use 'fixed'",
            ),
            (
                lambda: globally(FedMedian(), placement="rule", examples_cap=2.5),
                "privacy.examples-cap = 2.5 has no meaning with privacy.placement = 'rule': a rank knows no weights; "
                "remove it",
            ),
            (
                lambda: privately(bound=AdaptiveClip(1.0)),
                "privacy.distance-release = 'private' with privacy.clipping = 'adaptive' needs privacy.max-distance "
                "above 0: the limit of the distance moves with the clip, so the noise has no floor known beforehand",
            ),
            (
                lambda: privately(measure="before"),
                "privacy.distance-release = 'private' needs privacy.distance-clip = 'after': before clipping no noise "
                "covers what one client can do to the distance",
            ),
            (lambda: globally(z=-1.0), "noise_multiplier must be >= 0, got -1.0"),
            (lambda: globally(examples_cap=-1.0), "examples_cap must be >= 0, got -1.0"),
            (lambda: globally(placement="x"), "placement must be one of model, rule, update; got 'x'"),
            (lambda: metrically(direction="x"), "distance_direction must be one of divide, multiply; got 'x'"),
            (lambda: metrically(measure="x"), "distance_clip must be one of after, before; got 'x'"),
            (lambda: metrically(release="x"), "distance_release must be one of exact, private; got 'x'"),
            (lambda: metrically(min_distance=0.0), "min_distance must be > 0, got 0.0"),
            (lambda: metrically(distance_multiplier=0.0), "distance_noise_multiplier must be > 0, got 0.0"),
            (lambda: metrically(max_distance=-1.0), "max_distance must be >= 0, got -1.0"),
        ],
    )
    def test_say_what_was_found_and_what_to_use(self, make, says):
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == says

    def test_what_goes_together(self):
        assert globally(FedMedian(), placement="model", z=1.0)
        assert metrically(bound=AdaptiveClip(1.0)) and metrically(measure="before")
        assert privately(bound=AdaptiveClip(1.0), max_distance=1.0)


class Whole(FedAvg):
    """Meaningless on one reply, and no trimmed mean."""

    needs_every_reply = True


class TestPromises:
    def sent(self, strategy):
        config, grid = ConfigRecord({"lr": 0.5}), grid_of(lambda *_: None, 2)
        messages = list(strategy.configure_train(3, to_record(zeros()), config, grid))
        (told,) = {tuple(map(tuple, [dict(m.content["config"]).get("privacy-multipliers", ())])) for m in messages}
        assert len(messages) == 2 and all(m.content["config"]["lr"] == 0.5 for m in messages)
        assert all(m.content["config"]["server-round"] == 3 for m in messages)
        return list(told[0])

    def test_every_gaussian_release_of_a_round_and_nothing_where_none_is_claimed(self):
        assert self.sent(globally()) == [2.0]
        assert self.sent(privately(distance_multiplier=0.7, max_distance=0.5)) == [0.7, 4.0]
        for none in (globally(z=0.0), globally(noise=GaussianNoise(1)), metrically(), globally(placement="model")):
            assert self.sent(none) == []

    def test_a_round_that_a_budget_covers_is_sent(self, books):
        strategy = globally(books=books(max_epsilon=50.0))
        assert self.sent(strategy) == [2.0] and strategy.books.ledger.entries == []
        with pytest.raises(BudgetExhausted):
            self.sent(globally(books=books(max_epsilon=0.5)))


class TestARound:
    MODELS = random_models(4, 10.0)

    def test_is_measured(self, books):
        strategy = globally(z=2.0, bound=1.5, books=books())
        played(strategy, self.MODELS)
        assert strategy.measured == Measurements(
            asked=4,
            accepted=4,
            noise_std=2.0 * 1.5 / 4,
            noise_multiplier=2.0,
            sensitivity=1.5 / 4,
            clipping_norm=1.5,
            epsilon=strategy.books.epsilon(),
        )
        assert 0 < strategy.measured.epsilon < math.inf
        (entry,) = strategy.books.ledger.entries
        assert (entry.event, entry.round, entry.mechanism, entry.clip, entry.done) == (
            Gaussian(2.0),
            1,
            "global-dp",
            1.5,
            True,
        )

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

    def test_of_one_release_is_that_of_its_round(self):
        class Noted(FedAvg):
            def aggregate_train(self, server_round, replies):
                self.noted = (server_round, len(list(replies)))
                return super().aggregate_train(server_round, replies)

        inner = all_nodes(Noted)
        strategy = globally(inner)
        played(strategy, self.MODELS, server_round=7)
        assert inner.noted == (7, 1)

    def test_of_models_by_hand(self):
        strategy = globally(z=2.0, bound=1.5, placement="model", noise=GaussianNoise(1))
        calm = globally(z=0.0, bound=1.5, placement="model", noise=GaussianNoise(1))
        found, plain = (flat(played(each, self.MODELS)[0]) for each in (strategy, calm))
        normals, drawn = GaussianNoise(1), [np.zeros(array.size) for array in zeros().values()]
        for piece in drawn:
            normals.add(piece, 0.75)
        np.testing.assert_allclose(found - plain, np.concatenate(drawn), atol=1e-5)

    def test_of_a_rule_is_the_trimmed_mean_of_who_was_asked(self):
        def answer(node, _):
            return content(self.MODELS[node]) if node < 4 else gone(node, _)

        strategy = globally(all_nodes(FedMedian), z=0.0, bound=1e6, placement="rule")
        arrays, _ = one_round(strategy, grid_of(answer, 5), zeros())
        stacked = np.array([np.concatenate([a.ravel() for a in model.values()]) for model in self.MODELS[1:4]])
        expected = np.median(np.concatenate([stacked, np.zeros((2, stacked.shape[1]))]), axis=0)
        np.testing.assert_allclose(flat(arrays), expected, rtol=1e-5)
        assert strategy.measured.sensitivity == pytest.approx(1e6)

    def test_the_clip_follows_after_it(self, books):
        strategy = globally(bound=AdaptiveClip(1.0, bits_multiplier=3.0), books=books())
        played(strategy, self.MODELS)
        assert strategy.measured.clipping_norm == 1.0 != strategy.clip.bound
        assert strategy.books.ledger.entries[0].clip == 1.0

    def test_a_private_round_is_recorded_in_two_lines(self, books):
        strategy = privately(distance_multiplier=0.7, max_distance=0.5, books=books())
        played(strategy, self.MODELS, server_round=4)
        found = [(entry.event, entry.round, entry.mechanism, entry.clip) for entry in strategy.books.ledger.entries]
        assert found == [(Gaussian(0.7), 4, "metric", 1.5), (Gaussian(4.0), 4, "metric", 1.5)]
        assert strategy.measured.distance is None and strategy.measured.released_distance is not None


class TestEvents:
    def test_of_a_sum(self):
        assert globally().sum_event(3.0) == Gaussian(3.0)
        assert globally().sum_event(1e9) == Gaussian(1e6) and globally().sum_event(1e6) == Gaussian(1e6)
        joint = globally(bound=AdaptiveClip(1.0, bits_multiplier=4.0)).sum_event(3.0)
        assert joint.noise_multiplier == pytest.approx(2.4)
        assert globally(z=0.0, noise=GaussianNoise(1)).sum_event(3.0) == Unaccounted(f"{SILENT}; {SEEDED}")

    def test_of_a_round(self):
        assert globally().worst_events(LAYOUT) == [Gaussian(2.0)]
        assert metrically().worst_events(LAYOUT) == [Unaccounted(NOMINAL)]
        limit = 2 * 1.5 / math.sqrt(2)
        for options, least in (
            ({}, 2.0 / limit),
            ({"max_distance": 0.5}, 2.0 / 0.5),
            ({"max_distance": 0.5, "min_distance": 0.8}, 2.0 / 0.8),
            ({"min_distance": 9.0}, 2.0 / 9.0),
            ({"direction": "multiply"}, 2.0 * 0.1),
            ({"direction": "multiply", "min_distance": 0.3}, 2.0 * 0.3),
            ({"bound": AdaptiveClip(1.0, bits_multiplier=1e6), "max_distance": 0.5}, 2.0 / 0.5),
            (
                {"bound": AdaptiveClip(1.0, bits_multiplier=1e6), "max_distance": 0.5, "min_distance": 0.8},
                2.0 / 0.8,
            ),
        ):
            distance, total = privately(distance_multiplier=0.7, **options).worst_events(LAYOUT)
            assert distance == Gaussian(0.7) and total.noise_multiplier == pytest.approx(least)
        seeded = privately(noise=GaussianNoise(1), z=0.0).worst_events(LAYOUT)
        assert seeded == [Unaccounted(f"{SILENT}; {SEEDED}")] * 2

    @pytest.mark.parametrize(
        ("options", "distance", "expected"),
        [
            ({}, 0.5, 4.0),
            ({}, 0.01, 20.0),
            ({}, 100.0, 0.02),
            ({"max_distance": 3.0}, 100.0, 2 / 3),
            ({"min_distance": 0.25}, 0.01, 8.0),
            ({"direction": "multiply"}, 0.5, 1.0),
            ({"direction": "multiply"}, 0.01, 0.2),
            ({"direction": "multiply"}, 100.0, 200.0),
            ({"direction": "multiply", "max_distance": 3.0}, 100.0, 6.0),
            ({"release": "private"}, 100.0, 2 / (3 / math.sqrt(2))),
            ({"release": "private", "max_distance": 0.4}, 100.0, 5.0),
            ({"release": "private", "max_distance": 50.0}, 100.0, 2 / (3 / math.sqrt(2))),
            ({"release": "private", "min_distance": 7.0}, 100.0, 2 / 7.0),
        ],
    )
    def test_a_multiplier_by_hand(self, options, distance, expected):
        assert metrically(**options)._scaled(distance, LAYOUT) == pytest.approx(expected)

    def test_the_noise_on_a_distance_by_hand(self):
        strategy = privately(distance_multiplier=0.7, noise=GaussianNoise(5))
        normals, expected = GaussianNoise(5), np.array([0.4])
        normals.add(expected, 0.7 * 3 / math.sqrt(2))
        found = strategy._noised_distance(0.4, LAYOUT)
        assert type(found) is float and found == pytest.approx(expected[0], abs=1e-5)

    @pytest.mark.parametrize("measure", ["before", "after"])
    def test_which_distance_is_measured(self, measure):
        raw = cohort_of(random_models(3, 100.0))
        bounded = clip(raw, 1.5)
        strategy = metrically(measure=measure)
        multiplier, distance, released = strategy.multiplier(1, raw, bounded)
        assert released is None and multiplier == pytest.approx(2.0 / distance)
        assert distance > 100 if measure == "before" else 0 < distance <= 2.13
        assert strategy.clip_calibration(1, raw) > 100 and strategy.clip_calibration(2, raw) is None
        assert strategy.clip_calibration(0, raw) is None and globally().clip_calibration(1, raw) is None
        assert globally().multiplier(1, raw, bounded) == (2.0, None, None)

    def test_a_distance_without_a_bound(self):
        strategy = privately()
        strategy.distance = type("Unbounded", (), {"largest": staticmethod(lambda bound, arrays: math.inf)})
        with pytest.raises(PrivacyError) as refused:
            strategy._limit(LAYOUT)
        assert str(refused.value) == (
            "privacy.distance = 'mean-layer-frobenius' has no bound after clipping, so no noise covers its release"
        )

    def test_which_rounds_make_no_release(self):
        empty = cohort_of(random_models(1)).take(np.arange(0))
        full = cohort_of(random_models(1))
        assert [metrically().skips(each) for each in (empty, full)] == [True, False]
        assert not privately().skips(empty) and globally().skips(empty) is False

    @pytest.mark.parametrize(
        ("draw", "expected"),
        [
            ({"kind": "poisson"}, Sampling("poisson", probability=0.5)),
            ({"population": 8}, Sampling("without-replacement", cohort=4, population=8)),
            ({}, UNSAMPLED),
        ],
    )
    def test_what_a_draw_amplifies(self, draw, expected):
        strategy = globally(FedAvg(train=Drawing(0.5, min_nodes=1, **draw)))
        assert strategy.amplification() == expected and strategy.sum_event(2.0) == Gaussian(2.0, expected)
        assert strategy.has_secret_cohorts == (expected != UNSAMPLED)
        metric = privately(inner=FedAvg(train=Drawing(0.5, min_nodes=1, **draw)))
        assert metric.amplification() == UNSAMPLED and not metric.has_secret_cohorts

    def test_a_strategy_that_says_nothing_of_its_draw_amplifies_nothing(self):
        assert globally(flower.FedAvg()).amplification() == UNSAMPLED

    def test_what_is_spent(self, books):
        assert globally().spent() is None
        strategy = globally(books=books())
        assert strategy.spent() == 0.0
        with strategy.recorded(Gaussian(2.0), 3):
            assert [(entry.round, entry.done) for entry in strategy.books.ledger.entries] == [(3, False)]
        assert strategy.spent() == strategy.books.epsilon() > 0
        with strategy.recorded(Unaccounted("x"), 4):
            pass
        assert strategy.spent() is None
        with globally().recorded(Gaussian(2.0), 3):
            pass


class TestCalibration:
    @pytest.mark.parametrize("make", [globally, privately])
    @pytest.mark.parametrize("before", [0, 3])
    def test_fills_what_is_left_of_a_budget(self, books, make, before):
        kept = books(max_epsilon=3.0)
        for number in range(before):
            with kept.release(Gaussian(8.0), number):
                pass
        more = {"distance_multiplier": 20.0} if make is privately else {}
        strategy = make(books=kept, **more)
        strategy.calibrate(LAYOUT, 10)
        z = strategy.noise_multiplier

        def after(multiplier):
            strategy.noise_multiplier = multiplier
            return kept.spent() + 10 * sum(kept.cost(event) for event in strategy.worst_events(LAYOUT))

        assert after(z) <= kept.limit < after(z / 1.002)

    @pytest.mark.parametrize("kept", [None, 0.0])
    def test_without_a_budget(self, books, kept):
        strategy = globally(books=None if kept is None else books(max_epsilon=kept))
        with pytest.raises(ConfigError) as refused:
            strategy.calibrate(LAYOUT, 10)
        assert str(refused.value) == ("a noise multiplier can only be calibrated to a budget; set privacy.max-epsilon")

    def spend(self, kept, share):
        with kept.release(Gaussian(math.sqrt(1 / share / kept.limit)), 1):
            pass

    def test_of_a_budget_that_is_nearly_spent(self, books):
        kept = books(max_epsilon=2.0)
        self.spend(kept, 0.995)
        strategy = globally(books=kept)
        with pytest.raises(BudgetExhausted) as refused:
            strategy.calibrate(LAYOUT, 10)
        assert str(refused.value) == (
            f"{kept.ledger.path}: 99.5 % of privacy.max-epsilon = 2 is spent; what is left would take noise in which "
            "nothing can be learnt"
        )
        assert strategy.noise_multiplier == 2.0

    def test_of_a_budget_of_which_little_is_left(self, books):
        kept = books(max_epsilon=2.0)
        self.spend(kept, 0.98)
        strategy = globally(books=kept)
        strategy.calibrate(LAYOUT, 1)
        assert kept.cost(Gaussian(strategy.noise_multiplier)) == pytest.approx(0.02 * kept.limit, rel=3e-3)

    @pytest.mark.parametrize("share", [0.99, 0.9900001])
    def test_at_the_share_that_is_too_much(self, books, monkeypatch, share):
        kept = books(max_epsilon=2.0)
        monkeypatch.setattr(kept, "spent", lambda: share * kept.limit)
        strategy = globally(books=kept)
        if share == 0.99:
            strategy.calibrate(LAYOUT, 1)
        else:
            with pytest.raises(BudgetExhausted):
                strategy.calibrate(LAYOUT, 1)

    def test_of_a_budget_that_was_passed(self, books):
        kept = books()
        with kept.release(Gaussian(0.5), 1):
            pass
        passed = Books(kept.ledger, "run", max_epsilon=2.0)
        with pytest.raises(BudgetExhausted, match="past the budget of 2"):
            globally(books=passed).calibrate(LAYOUT, 10)

    def test_where_no_noise_on_the_sum_is_enough(self, books):
        kept = books(max_epsilon=2.0)
        strategy = globally(bound=AdaptiveClip(1.0, bits_multiplier=4.0), books=kept)
        with pytest.raises(ConfigError) as refused:
            strategy.calibrate(LAYOUT, 100)
        assert strategy.noise_multiplier == 2.0
        assert str(refused.value) == (
            "privacy.max-epsilon = 2 is passed whatever privacy.noise-multiplier is: what the ledger holds and what "
            "100 rounds release beside the sum (a distance, with privacy.distance-noise-multiplier; the share of an "
            "adaptive clip, with privacy.bits-noise-multiplier) already take "
            f"{100 * 100 / 16 / kept.limit:.4g} % of it"
        )

    def test_what_is_beside_the_sum_may_take_all_of_it(self, books, monkeypatch):
        """To the last bit: then it is the sum that does not fit."""
        kept = books(max_epsilon=2.0)
        monkeypatch.setattr(kept, "spent", lambda: kept.limit / 2)
        monkeypatch.setattr(kept, "cost", lambda event: kept.limit / 2)
        with pytest.raises(ConfigError, match=r"^no noise multiplier up to 1e6"):
            globally(books=kept).calibrate(LAYOUT, 1)

    def test_where_no_noise_up_to_the_largest_is_enough(self, books, monkeypatch):
        kept = books(max_epsilon=2.0)
        monkeypatch.setattr(kept, "cost", lambda event: kept.limit if event.noise_multiplier < 1e6 else 0.0)
        strategy = globally(books=kept)
        with pytest.raises(ConfigError, match=r"^no noise multiplier up to 1e6 stays within privacy.max-epsilon = 2$"):
            strategy.calibrate(LAYOUT, 1)
        assert strategy.noise_multiplier == 2.0
