"""The decorators over a whole round: what leaves is noised as configured, in both placements, whatever is inside."""

import dataclasses

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from statistics_of_noise import is_normal, std_is
from support import all_nodes, content, flat, grid_of, one_round, random_models, zeros
from test_distance import GOLDEN

from cloister.flower.messages import assume_run
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.server.strategy_wrapper import Measurements, NoPrivacyStrategy, make_reply, state_of
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.strategies.fedopt import FedAvgM
from cloister.strategies.robust import FedMedian, FedTrimmedAvg
from cloister.utils.arrays import Layout, from_record, to_record
from cloister.utils.cohort import NORM_ERROR
from cloister.utils.errors import BudgetExhausted, ConfigError, FederationError

WIDTH = 100_000
PLACEMENTS = ["update", "model"]


def decorated(kind, z, placement="update", inner=None, clip=1.0, **options):
    inner = inner or all_nodes()
    return kind(inner, noise_multiplier=z, clipping_norm=clip, placement=placement, noise=GaussianNoise(7), **options)


def released(strategy, models, sent):
    arrays, _ = one_round(strategy, grid_of(lambda node, _: content(models[node - 1]), len(models)), sent)
    return flat(arrays)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_golden_standard_deviation(placement):
    sent = {name: np.zeros_like(array) for name, array in GOLDEN[0].items()}
    strategy = decorated(MetricDP, 0.7, placement, clip=2.5, measure="before")
    released(strategy, GOLDEN, sent)
    assert strategy.measured.noise_std == pytest.approx(0.0822735334, rel=1e-8)
    assert strategy.measured.distance == pytest.approx(7.0901699437, rel=1e-10)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", [GlobalDP, MetricDP])
def test_the_noise_of_a_whole_round(kind, placement):
    sent, *models = random_models(5, 0.1, like=zeros(WIDTH))
    noisy = decorated(kind, 3.0, placement)
    noise = released(noisy, models, sent) - released(decorated(kind, 0.0, placement), models, sent)
    expected = 3.0 * 1.0 / 4
    if kind is MetricDP:
        expected /= noisy.measured.distance
    assert noisy.measured.noise_std == pytest.approx(expected)
    assert std_is(noise, expected) and is_normal(noise, expected)
    assert not std_is(noise, expected * 2 / 3)
    assert not std_is(noise, expected * 3 / 2)


def test_without_noise_the_release_is_the_mean_of_the_clipped_updates():
    sent, *models = random_models(5, 10.0)
    vector = np.concatenate([np.concatenate([a.ravel() for a in model.values()])[None] for model in models])
    origin = np.concatenate([array.ravel() for array in sent.values()])
    updates = vector - origin
    updates *= np.minimum(1, 1 / (1 + NORM_ERROR) / np.linalg.norm(updates, axis=1, keepdims=True))
    for placement in PLACEMENTS:
        found = released(decorated(GlobalDP, 0.0, placement), models, sent)
        np.testing.assert_allclose(found, origin + updates.mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("kind", [GlobalDP, MetricDP])
def test_the_wrapped_optimizer_gets_the_noised_update_and_only_that(kind):
    """FedAvgM at rate 0.1 scales a release it is given by 0.1; noise after it would not be scaled."""
    sent, *models = random_models(5, 0.1, like=zeros(WIDTH))
    inner = [FedAvgM(train=Sampling(min_nodes=1), server_learning_rate=0.1, momentum=0.0) for _ in range(2)]
    noisy = decorated(kind, 3.0, inner=inner[0])
    noise = released(noisy, models, sent) - released(decorated(kind, 0.0, inner=inner[1]), models, sent)
    assert std_is(noise, 0.1 * noisy.measured.noise_std)


def test_rounds_draw_new_noise():
    sent, *models = random_models(3)
    strategy = decorated(GlobalDP, 1.0)
    assert not np.allclose(released(strategy, models, sent), released(strategy, models, sent), atol=1e-3)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_reported_example_counts_do_not_move_a_private_release(placement):
    sent, *models = random_models(4)
    even = released(decorated(GlobalDP, 0.0, placement), models, sent)
    counts = [1, 10**9, 5]
    grid = grid_of(lambda node, _: content(models[node - 1], counts[node - 1]), 3)
    arrays, _ = one_round(decorated(GlobalDP, 0.0, placement), grid, sent)
    np.testing.assert_array_equal(flat(arrays), even)


def test_dropouts_neither_lower_the_noise_nor_change_the_divisor():
    sent, *models = random_models(5, 0.1, like=zeros(WIDTH))

    def half(node, _):
        if node > 2:
            raise RuntimeError("gone")
        return content(models[node - 1])

    strategy = decorated(GlobalDP, 3.0)
    arrays, _ = one_round(strategy, grid_of(half, 4), sent)
    silent = decorated(GlobalDP, 0.0)
    calm, _ = one_round(silent, grid_of(half, 4), sent)
    assert std_is(flat(arrays) - flat(calm), 3.0 / 4)
    assert (strategy.measured.accepted, strategy.measured.asked) == (2, 4)
    assert strategy.measured.sensitivity == 1.0 / 4


def test_a_round_in_which_everybody_fails_still_releases_noise():
    """Otherwise the release would tell whether the one client that could have replied did."""

    def gone(node, _):
        raise RuntimeError("gone")

    arrays, _ = one_round(decorated(GlobalDP, 2.0), grid_of(gone, 2), zeros(WIDTH))
    assert std_is(flat(arrays), 2.0 / 2)


def test_fewer_replies_than_asked_for_mean_more_noise_in_placement_model():
    sent, *models = random_models(5)

    def half(node, _):
        if node > 2:
            raise RuntimeError("gone")
        return content(models[node - 1])

    strategy = decorated(GlobalDP, 3.0, "model")
    one_round(strategy, grid_of(half, 4), sent)
    assert strategy.measured.noise_std == pytest.approx(3.0 / 2)


def sound(kind, z=2.0, noise=None, **options):
    """A decorator with a guarantee, from the operating system's noise."""
    private = {"release": "private", "distance_multiplier": z} if kind is MetricDP else {}
    return kind(
        options.pop("inner", None) or all_nodes(),
        noise_multiplier=z,
        clipping_norm=1.0,
        noise=noise or GaussianNoise(),
        **private,
        **options,
    )


SOUND = pytest.mark.parametrize(
    ("kind", "options"),
    [(GlobalDP, {}), (MetricDP, {}), (GlobalDP, {"placement": "rule"}), (GlobalDP, {"examples_cap": 5.0})],
    ids=["global-dp", "metric", "rule", "capped"],
)


def gone(node, _):
    raise RuntimeError("gone")


class TestARoundUnderAGuarantee:
    def strategy(self, kind, options, **others):
        inner = all_nodes(FedMedian) if options.get("placement") == "rule" else None
        return sound(kind, inner=inner, **options, **others)

    @SOUND
    def test_in_which_nobody_replies_is_recorded_and_released_like_any_other(self, tmp_path, kind, options):
        """Silence would tell whoever was silent whether the last one replied."""
        ledgers = []
        for name, answer in (("silent", gone), ("full", lambda node, sent: content(sent))):
            budget = PrivacyBudget(Ledger(tmp_path / name), "run")
            strategy = self.strategy(kind, options, budget=budget)
            arrays, _ = one_round(strategy, grid_of(answer, 3), zeros(2000))
            assert np.std(flat(arrays)) > 0.1, "nothing was noised"
            ledgers.append([(entry.event, entry.done) for entry in budget.ledger.entries])
        assert ledgers[0] == ledgers[1] and ledgers[0]

    @SOUND
    def test_publishes_nothing_that_was_not_noised(self, tmp_path, kind, options):
        """Measurements of two cohorts that one client distinguishes are the same, except for noise and counts."""
        sent, *models = random_models(5, 0.01)
        hostile = [*models[:-1], {name: array + 1000 for name, array in models[-1].items()}]
        seen = []
        for cohort in (models, hostile):
            strategy = self.strategy(kind, options, noise=Unseeded(7))
            released(strategy, cohort, sent)
            seen.append(dataclasses.asdict(strategy.measured))
        noised = {"released_distance", "noise_std", "noise_multiplier"} if kind is MetricDP else set()
        assert {name for name in seen[0] if seen[0][name] != seen[1][name]} <= noised
        assert all(one["clipped_fraction"] is one["distance"] is one["clip_calibration"] is None for one in seen)

    def test_without_one_they_are_shown_to_the_server(self):
        """The control: the same two cohorts differ there."""
        sent, *models = random_models(5, 0.01)
        hostile = [*models[:-1], {name: array + 1000 for name, array in models[-1].items()}]
        strategies = [decorated(MetricDP, 1.0, measure="before") for _ in range(2)]
        for strategy, cohort in zip(strategies, (models, hostile), strict=True):
            released(strategy, cohort, sent)
        plain, moved = (strategy.measured for strategy in strategies)
        assert (plain.clipped_fraction, moved.clipped_fraction) == (0.0, 0.25)
        assert moved.distance > 100 > plain.distance and moved.clip_calibration > 100 > plain.clip_calibration

    @SOUND
    def test_that_would_pass_the_budget_asks_nobody(self, tmp_path, kind, options):
        """Clients who train for a round that is never released have worked, and told the server all, for nothing."""
        trained = []

        def answer(node, sent):
            trained.append(node)
            return content(sent)

        strategy = self.strategy(
            kind, options, budget=PrivacyBudget(Ledger(tmp_path / "ledger"), "run", max_epsilon=0.1)
        )
        with pytest.raises(BudgetExhausted, match=r"past the budget of 0\.1"):
            one_round(strategy, grid_of(answer, 3), zeros())
        assert trained == [] and strategy.budget.ledger.entries == []


class Unseeded(GaussianNoise):
    """Noise that a test can repeat, and that says it cannot be."""

    def __init__(self, seed):
        super().__init__(seed)
        self.seeded = False


class TestMetricNoise:
    def test_directions(self):
        sent, *models = random_models(4, 0.1)
        divided, multiplied = decorated(MetricDP, 1.0), decorated(MetricDP, 1.0, direction="multiply")
        released(divided, models, sent)
        released(multiplied, models, sent)
        distance = divided.measured.distance
        assert divided.measured.noise_multiplier == pytest.approx(1 / distance)
        assert multiplied.measured.noise_multiplier == pytest.approx(distance)

    def test_before_and_after_the_clip(self):
        sent, *models = random_models(4, 100.0)
        before, after = decorated(MetricDP, 1.0, measure="before"), decorated(MetricDP, 1.0, measure="after")
        released(before, models, sent)
        released(after, models, sent)
        assert before.measured.distance > 100 > 2 >= after.measured.distance

    def test_one_distant_client_cannot_switch_the_noise_off(self):
        """The published form (distance before the clip) is the control: there it can."""
        sent, *models = random_models(5, 0.01)
        hostile = [*models[:-1], {name: array + 1000 for name, array in models[-1].items()}]
        stds = {}
        for measure in ("after", "before"):
            strategy = decorated(MetricDP, 1.0, measure=measure)
            released(strategy, hostile, sent)
            stds[measure] = strategy.measured.noise_std
        # After clipping, the mean over L arrays of a pair's distance is at most 2C/√L.
        assert stds["after"] >= 1.0 / 4 / (2 / np.sqrt(2)) > 1e-3 > stds["before"]

    @pytest.mark.parametrize("replies", [1, 3])
    def test_equal_clients_get_the_floor(self, replies):
        model = random_models(1, 0.01)[0]
        strategy = decorated(MetricDP, 1.0, min_distance=0.5)
        released(strategy, [model] * replies, zeros())
        assert strategy.measured.noise_multiplier == pytest.approx(2.0)

    def test_the_first_round_says_how_far_models_lie_apart_to_choose_a_clip_by(self):
        strategy = decorated(MetricDP, 1.0)
        models = random_models(3, 5.0)
        released(strategy, models, zeros())
        vectors = [np.concatenate([array.ravel() for array in model.values()]) for model in models]
        apart = max(np.linalg.norm(a - b) for a in vectors for b in vectors)
        assert strategy.measured.clip_calibration == pytest.approx(apart, rel=1e-6)

    def test_without_replies_there_is_no_distance_and_no_release(self):
        def gone(node, _):
            raise RuntimeError("gone")

        strategy = decorated(MetricDP, 1.0)
        arrays, _ = one_round(strategy, grid_of(gone, 2), zeros())
        assert arrays is None and strategy.measured.accepted == 0

    def test_the_ceiling(self):
        strategy = decorated(MetricDP, 1.0, max_distance=0.01)
        released(strategy, random_models(3, 5.0), zeros())
        assert strategy.measured.noise_multiplier == pytest.approx(100.0)


class TestBadUse:
    @pytest.mark.parametrize("fraction", [0.5, 1.0])
    @pytest.mark.parametrize("inner", [FedMedian, FedTrimmedAvg])
    def test_a_rule_over_a_cohort_of_secret_size_is_refused(self, inner, fraction):
        """Its sensitivity is that of the cohort that was asked: its noise would tell how many those were."""
        drawn = inner(train=Sampling(fraction, min_nodes=1, kind="poisson"))
        with pytest.raises(ConfigError, match=r"needs a cohort of public size"):
            GlobalDP(drawn, noise_multiplier=1.0, clipping_norm=1.0, placement="rule")
        fixed = inner(train=Sampling(fraction, min_nodes=1, kind="fixed"))
        assert GlobalDP(fixed, noise_multiplier=1.0, clipping_norm=1.0, placement="rule").is_accounted

    def test_replies_to_a_model_that_was_never_sent(self):
        with pytest.raises(FederationError) as refused:
            decorated(GlobalDP, 1.0).aggregate_train(1, [])
        assert str(refused.value) == (
            "aggregate_train was called before configure_train: there is no model to compare with"
        )

    def test_a_model_with_integers_cannot_carry_noise(self):
        sent = {"steps": np.zeros(3, np.int64)}
        with pytest.raises(FederationError, match="'steps' has dtype int64"):
            one_round(decorated(GlobalDP, 1.0), grid_of(lambda node, sent: content(sent), 1), sent)


@pytest.mark.parametrize("wrap", [lambda s: NoPrivacyStrategy(s), lambda s: decorated(GlobalDP, 0.01, inner=s)])
@pytest.mark.parametrize("inner", [flower.FedAvg, flower.FedAvgM, flower.FedAdam, flower.FedYogi, flower.FedProx])
def test_flowers_own_loop_drives_a_decorator_around_flowers_own_strategy(wrap, inner):
    models = random_models(3, 0.1)
    grid = grid_of(lambda node, _: content(models[node - 1]), 3)
    strategy = wrap(inner(fraction_evaluate=0.0))
    result = strategy.start(grid, to_record(zeros()), num_rounds=2, train_config=ConfigRecord())
    assert np.isfinite(flat(result.arrays)).all()
    assert strategy.measured.accepted == 3


def test_what_a_strategy_inherits_from_elsewhere_is_not_its_state():
    """It would be taken up again without what the subclass adds."""

    class Theirs:
        __module__ = "elsewhere"

        def state_dict(self):
            return {"momentum": np.ones(1)}

        def load_state_dict(self, state):
            pass

    class Sub(Theirs):
        __module__ = "elsewhere"

    assert state_of(Theirs()) == {"momentum": np.ones(1)} and state_of(Sub()) == {}


class TestScreeningAlone:
    MODELS = random_models(3, 0.1)

    def played(self, strategy, answer, nodes=3):
        return one_round(strategy, grid_of(answer, nodes), zeros())

    @pytest.mark.parametrize("least", [0, 2, 3])
    def test_too_few_replies_leave_the_model_as_it_was(self, least):
        strategy = NoPrivacyStrategy(all_nodes())
        strategy.min_replies = least
        arrays, _ = self.played(strategy, lambda node, _: content(self.MODELS[node - 1]) if node < 3 else gone(node, _))
        abandoned = least == 3
        assert (arrays is None) == abandoned
        assert strategy.measured == Measurements(3, 2, strategy.measured.rejected, abandoned=abandoned)
        assert [one.node_id for one in strategy.measured.rejected] == [3]

    @pytest.mark.parametrize("by_examples", [True, False])
    def test_replies_weigh_as_much_as_is_asked_for(self, by_examples):
        strategy = NoPrivacyStrategy(all_nodes(), **({} if by_examples else {"by_examples": False}))
        arrays, _ = self.played(strategy, lambda node, _: content(self.MODELS[node - 1], node))
        rows = [np.concatenate([array.ravel() for array in model.values()]) for model in self.MODELS]
        expected = np.average(rows, axis=0, weights=[1, 2, 3] if by_examples else None)
        np.testing.assert_allclose(flat(arrays), expected, rtol=1e-5, atol=1e-7)

    def test_where_all_count_the_same_each_counts_as_one_example(self):
        told = []

        class Inner(FedAvg):
            def aggregate_train(self, server_round, replies):
                told.extend(reply.content["metrics"]["num-examples"] for reply in replies)
                return super().aggregate_train(server_round, replies)

        strategy = NoPrivacyStrategy(all_nodes(Inner), by_examples=False)
        self.played(strategy, lambda node, _: content(self.MODELS[node - 1], 7 * node))
        assert told == [1.0] * 3

    @pytest.mark.parametrize("lacks", ["nobody", "one", "one that says it twice", "one that says a whole number"])
    def test_the_training_loss_is_the_mean_where_everybody_tells_it(self, lacks):
        def answer(node, _):
            reply = content(self.MODELS[node - 1], node, **{"train-loss": float(node)})
            if node == 1 and lacks == "one":
                reply = content(self.MODELS[0], 1)
            if node == 1 and lacks == "one that says it twice":
                reply["more"] = MetricRecord({"train-loss": 1.0})
            if node == 1 and lacks == "one that says a whole number":
                reply = content(self.MODELS[0], 1, **{"train-loss": 1})
            return reply

        strategy = NoPrivacyStrategy(all_nodes())
        _, metrics = self.played(strategy, answer)
        assert strategy.measured.accepted == 3
        assert metrics.get("train-loss") == (pytest.approx((1 + 4 + 9) / 6) if lacks == "nobody" else None)

    def test_other_arrays_than_were_sent_are_refused(self):
        class Renaming(FlowerFedAvg):
            def aggregate_train(self, server_round, replies):
                arrays, metrics = super().aggregate_train(server_round, replies)
                return ArrayRecord({f"{name}:0": array for name, array in arrays.items()}), metrics

        with pytest.raises(FederationError) as refused:
            self.played(NoPrivacyStrategy(Renaming()), lambda node, _: content(self.MODELS[node - 1]))
        assert str(refused.value) == "the wrapped strategy returned other arrays than it was given"

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_the_model_has_the_order_and_the_types_that_were_sent(self, turned, dtype):
        made = self.MODELS[0]

        class Own(FlowerFedAvg):
            def aggregate_train(self, server_round, replies):
                order = list(reversed(made)) if turned else list(made)
                return to_record({name: made[name].astype(dtype) for name in order}), None

        arrays, _ = self.played(NoPrivacyStrategy(Own()), lambda node, _: content(self.MODELS[node - 1]))
        assert list(arrays) == ["kernel", "bias"] and {array.dtype for array in arrays.values()} == {"float32"}
        assert all(np.array_equal(arrays[name].numpy(), made[name]) for name in made)

    def test_a_strategy_that_does_not_say_what_it_keeps_cannot_go_on(self):
        class Forgetful(FlowerFedAvg):
            """Keeps something, and says nothing of it."""

        assert NoPrivacyStrategy(Forgetful()).state_dict() == {}
        with pytest.raises(ConfigError) as refused:
            NoPrivacyStrategy(Forgetful()).load_state_dict({})
        assert str(refused.value) == (
            "resume: strategy Forgetful does not say what it keeps from round to round, so that a run with it cannot "
            "go on; its class needs state_dict and load_state_dict of its own (docs/extending.md)"
        )

    def test_what_it_keeps_goes_on(self):
        old, new = (NoPrivacyStrategy(all_nodes(FedAvgM, momentum=0.9)) for _ in range(2))
        self.played(old, lambda node, _: content(self.MODELS[node - 1]))
        new.load_state_dict(old.state_dict())
        assert old.state_dict().keys() == new.state_dict().keys() != set()
        for name, array in old.state_dict().items():
            np.testing.assert_array_equal(array, new.state_dict()[name])

    def test_it_claims_nothing(self):
        strategy, layout = NoPrivacyStrategy(all_nodes()), Layout.of(zeros())
        assert strategy.claim() == Claim("none") and strategy.calibrated(layout, 3) is strategy
        assert (strategy.events(layout), strategy.caveats(), strategy.hypotheses) == ((), (), 0)


def test_a_virtual_reply_is_like_that_of_a_node():
    assume_run()
    (model,) = random_models(1)
    layout = Layout.of(model)
    plain = make_reply(layout, layout.rows(model))
    assert dict(plain.content["metrics"]) == {"num-examples": 1.0} and set(plain.content) == {"arrays", "metrics"}
    assert (plain.metadata.message_type, plain.metadata.dst_node_id) == ("train", 0)
    for name, array in from_record(plain.content["arrays"]).items():
        np.testing.assert_array_equal(array, model[name])
    told = make_reply(layout, layout.rows(model), 7.0, 0.5)
    assert dict(told.content["metrics"]) == {"num-examples": 7.0, "train-loss": 0.5}
