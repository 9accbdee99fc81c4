"""One conformance suite for every strategy by name; the robust rules against brute force; and sampling."""

import itertools
import math
import random
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy.multikrum import select_multikrum
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm
from support import content, every, failures, grid_of

from cloister.config.run import parse
from cloister.flower.messages import assume_run
from cloister.server.build import named_strategy
from cloister.server.private_strategy import capabilities_of
from cloister.server.screening import EXAMPLES
from cloister.server.strategy_wrapper import TRAIN_LOSS, make_reply
from cloister.strategies import STRATEGIES, averaging
from cloister.strategies.averaging import FedAvg, FedProx, HeldOut, Sampling
from cloister.strategies.robust import FedMedian, FedTrimmedAvg, Krum
from cloister.utils.arrays import Layout, from_record, to_record
from cloister.utils.errors import ConfigError, FederationError, TooFewNodes

NAMES = STRATEGIES.names()
FALSE_ALARM = 1e-6
"""Chance that a right implementation fails one statistical test under another seed."""


every_strategy = every(NAMES)


def make(name, nodes=5, **options):
    """A strategy that asks all of `nodes` nodes, in a fixed random order."""
    drawn = Sampling(min_nodes=nodes, timeout=0, rng=random.Random(0))
    return STRATEGIES.load(name)(train=drawn, **options)


def mixed_model(seed=0, scale=1.0):
    """Arrays of several ranks and dtypes."""
    rng = np.random.default_rng(seed)
    kinds = {
        "b/kernel": ((4, 3), np.float32),
        "a/bias": ((3,), np.float32),
        "scale": ((), np.float32),
        "a/wide": ((2, 2, 2), np.float64),
    }
    return {name: np.asarray(scale * rng.standard_normal(shape)).astype(kind) for name, (shape, kind) in kinds.items()}


def asked(strategy, sent, nodes=5):
    """Return the messages to the nodes."""
    grid = grid_of(lambda *_: None, nodes)
    return list(strategy.configure_train(1, to_record(sent), ConfigRecord(), grid))


def reply(model, examples=10.0, loss=None):
    assume_run()
    layout = Layout.of(model)
    return make_reply(layout, layout.rows(model), examples, loss)


def aggregated(strategy, sent, models, examples=None):
    """The next global model, from replies with these models."""
    asked(strategy, sent, len(models))
    counts = examples or [10.0] * len(models)
    arrays, _ = strategy.aggregate_train(1, [reply(model, n) for model, n in zip(models, counts, strict=True)])
    return from_record(arrays)


def vector(model):
    return np.concatenate([array.ravel() for array in model.values()], dtype=np.float64)


def error_of(message):
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=message)


# Conformance.


@every_strategy
def test_names_shapes_and_dtypes_are_kept(name):
    sent = mixed_model()
    after = aggregated(make(name), sent, [mixed_model(seed) for seed in range(1, 6)])
    assert list(after) == list(sent)
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {k: (v.shape, v.dtype) for k, v in sent.items()}
    assert all(np.isfinite(array).all() for array in after.values())


@every_strategy
def test_clients_that_send_back_what_they_got_change_nothing(name):
    sent = mixed_model()
    after = aggregated(make(name), sent, [sent] * 5)
    assert all(np.allclose(after[key], sent[key], rtol=1e-6, atol=0) for key in sent)


@every(["fedavg", "fedprox", "fedmedian", "fedtrimmedavg", "krum", "fedopt"])
def test_clients_that_agree_get_what_they_agree_on(name):
    # True of what has no rate or state: the others take a step towards it.
    agreed = mixed_model(7)
    after = aggregated(make(name), mixed_model(), [agreed] * 5)
    assert all(np.allclose(after[key], agreed[key], rtol=1e-5, atol=1e-6) for key in agreed)


@every(["fedavgm", "fedadam", "fedyogi", "fedadagrad"])
def test_a_server_optimizer_moves_towards_what_clients_agree_on(name):
    sent, agreed = mixed_model(), mixed_model(7)
    after = aggregated(make(name), sent, [agreed] * 5)
    moved, wanted = vector(after) - vector(sent), vector(agreed) - vector(sent)
    assert np.all(np.sign(moved) == np.sign(wanted))
    assert not np.allclose(moved, wanted, rtol=0.01)


@every_strategy
def test_the_order_of_replies_does_not_matter(name):
    sent, models = mixed_model(), [mixed_model(seed) for seed in range(1, 6)]
    examples = [10.0, 20.0, 5.0, 1.0, 100.0]
    first = vector(aggregated(make(name), sent, models, examples))
    for order in itertools.islice(itertools.permutations(range(5)), 1, 120, 17):
        after = aggregated(make(name), sent, [models[i] for i in order], [examples[i] for i in order])
        assert np.allclose(vector(after), first, rtol=1e-5, atol=1e-6)


@every_strategy
def test_two_strategies_share_nothing(name):
    sent, models = mixed_model(), [mixed_model(seed) for seed in range(1, 6)]
    one, other = make(name), make(name)
    first = aggregated(one, sent, models)
    aggregated(one, sent, models)
    assert np.array_equal(vector(aggregated(other, sent, models)), vector(first))


@every_strategy
def test_the_replies_and_the_model_sent_are_left_as_they_are(name):
    sent, models = mixed_model(), [mixed_model(seed) for seed in range(1, 6)]
    aggregated(make(name), sent, models)
    assert np.array_equal(vector(sent), vector(mixed_model()))
    assert all(np.array_equal(vector(model), vector(mixed_model(seed))) for seed, model in enumerate(models, start=1))


def test_no_replies_give_no_model():
    def check(name, kind):
        strategy = make(name)
        asked(strategy, mixed_model())
        assert strategy.aggregate_train(1, kind([])) == (None, None)

    assert failures(itertools.product(NAMES, [list, iter, tuple]), check) == []


@every_strategy
def test_replies_may_come_as_an_iterator(name):
    sent, models = mixed_model(), [mixed_model(seed) for seed in range(1, 6)]
    strategy = make(name)
    asked(strategy, sent)
    arrays, _ = strategy.aggregate_train(1, (reply(model) for model in models))
    assert np.array_equal(vector(from_record(arrays)), vector(aggregated(make(name), sent, models)))


@every_strategy
def test_an_error_reply_does_not_stop_the_others(name):
    sent, models = mixed_model(), [mixed_model(seed) for seed in range(1, 5)]
    strategy = make(name)
    messages = asked(strategy, sent)
    replies = [error_of(messages[0]), *(reply(model) for model in models)]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert np.array_equal(vector(from_record(arrays)), vector(aggregated(make(name, 4), sent, models)))


@every_strategy
def test_only_error_replies_are_as_good_as_none(name):
    strategy = make(name)
    replies = [error_of(message) for message in asked(strategy, mixed_model())]
    assert strategy.aggregate_train(1, replies) == (None, None)


@every_strategy
def test_training_losses_are_averaged_over_the_replies_used(name):
    strategy = make(name, 2)
    asked(strategy, mixed_model(), 2)
    replies = [reply(mixed_model(1), 10.0, 1.0), reply(mixed_model(2), 30.0, 2.0)]
    _, metrics = strategy.aggregate_train(1, replies)
    assert EXAMPLES not in metrics
    assert metrics[TRAIN_LOSS] == pytest.approx(1.0 if name == "krum" else 1.75)


@every_strategy
def test_every_node_is_asked_once_and_told_the_round(name):
    strategy = make(name)
    record = to_record(mixed_model())
    messages = list(strategy.configure_train(3, record, ConfigRecord({"seed": 9}), grid_of(lambda *_: None, 5)))
    assert sorted(message.metadata.dst_node_id for message in messages) == [1, 2, 3, 4, 5]
    for message in messages:
        assert message.metadata.message_type == "train"
        assert message.content["arrays"] is record
        assert dict(message.content["config"]).items() >= {"server-round": 3, "seed": 9}.items()
    assert strategy.last_draw.expected == 5


@every_strategy
def test_evaluation_is_off_until_it_has_a_sampling(name):
    grid, arrays = grid_of(lambda *_: None, 4), to_record(mixed_model())
    assert list(make(name, 4).configure_evaluate(1, arrays, ConfigRecord(), grid)) == []
    drawn = Sampling(fraction=0.5, min_nodes=1, timeout=0)
    strategy = STRATEGIES.load(name)(train=Sampling(min_nodes=1), evaluate=drawn)
    messages = list(strategy.configure_evaluate(2, arrays, ConfigRecord(), grid))
    assert len(messages) == 2
    assert {message.metadata.message_type for message in messages} == {"evaluate"}
    assert {message.content["config"]["server-round"] for message in messages} == {2}


@every_strategy
def test_evaluation_scores_are_averaged_by_examples(name):
    grid = grid_of(lambda node, _: content({}, 10 * node, accuracy=float(node)), 3)
    strategy = STRATEGIES.load(name)(train=Sampling(min_nodes=1), evaluate=Sampling(min_nodes=3, timeout=0))
    messages = strategy.configure_evaluate(1, to_record(mixed_model()), ConfigRecord(), grid)
    replies = [
        Message(content({}, 10 * i, accuracy=float(i)), reply_to=message) for i, message in enumerate(messages, 1)
    ]
    for item in replies:
        del item.content["arrays"]
    metrics = strategy.aggregate_evaluate(1, replies)
    assert metrics["accuracy"] == pytest.approx((1 + 4 + 9) / 6)


@every_strategy
def test_the_sampling_of_the_configuration_is_the_strategys(name):
    config = parse(
        {
            "strategy.name": name,
            "strategy.fraction-train": 0.5,
            "strategy.fraction-evaluate": 0.25,
            "strategy.min-nodes": 3,
            "strategy.sampling": "poisson",
            "evaluation.federated": "on",
            "node-timeout": 7.0,
            "seed": 4,
        }
    )
    strategy = named_strategy(config)
    train, evaluate = strategy.train_sampling, strategy.evaluate_sampling
    assert (train.fraction, train.min_nodes, train.kind, train.timeout) == (0.5, 3, "poisson", 7.0)
    assert (evaluate.fraction, evaluate.min_nodes, evaluate.kind, evaluate.timeout) == (0.25, 3, "fixed", 7.0)
    # A Poisson draw is a secret that amplification relies on; a seed decides only over the others.
    assert isinstance(train.rng, random.SystemRandom)
    assert not isinstance(evaluate.rng, random.SystemRandom)
    unseeded = named_strategy(parse({"strategy.name": name}))
    assert isinstance(unseeded.train_sampling.rng, random.SystemRandom)


# Averaging.


@every(["fedavg", "fedprox"])
def test_the_mean_is_weighted_by_examples(name):
    models, examples = [mixed_model(seed) for seed in range(1, 6)], [1.0, 10.0, 100.0, 7.0, 0.5]
    after = aggregated(make(name), mixed_model(), models, examples)
    expected = np.average([vector(model) for model in models], axis=0, weights=examples)
    assert np.allclose(vector(after), expected, rtol=1e-6, atol=1e-6)
    assert not np.allclose(vector(after), np.mean([vector(model) for model in models], axis=0), atol=0.01)


def test_models_that_nearly_agree_are_averaged_without_losing_what_they_differ_in():
    base = {"a": np.full(1000, 1000.0, np.float32)}
    models = [{"a": base["a"] + np.float32(step)} for step in (0.0, 2.0**-13, 2.0**-12)]
    after = aggregated(make("fedavg", 3), base, models)
    assert np.array_equal(after["a"] - base["a"], np.full(1000, 2.0**-13, np.float32))


def test_one_reply_is_passed_on_untouched():
    strategy, only = make("fedavg", 1), reply(mixed_model(3), 5.0)
    asked(strategy, mixed_model(), 1)
    arrays, _ = strategy.aggregate_train(1, [only])
    assert arrays is only.content["arrays"]


@every([0.0, 0.1, 2])
def test_fedprox_tells_its_clients_mu(mu):
    for message in asked(make("fedprox", proximal_mu=mu), mixed_model()):
        assert message.content["config"]["proximal-mu"] == mu


def test_only_fedprox_speaks_of_mu():
    for name in set(NAMES) - {"fedprox"}:
        assert all("proximal-mu" not in message.content["config"] for message in asked(make(name), mixed_model()))


@every([-0.1, math.nan, math.inf])
def test_a_mu_out_of_range_is_refused(mu):
    with pytest.raises(ConfigError, match=r"strategy\.proximal-mu must be >= 0"):
        FedProx(proximal_mu=mu)


def test_only_plain_means_say_that_they_are():
    uniform = {name for name in NAMES if capabilities_of(STRATEGIES.load(name)()).is_uniform_mean}
    assert uniform == {"fedavg", "fedprox"}


def test_only_robust_rules_say_that_they_need_every_reply():
    needy = {name for name in NAMES if capabilities_of(STRATEGIES.load(name)()).needs_every_reply}
    assert needy == {"fedmedian", "fedtrimmedavg", "krum"}


# Robust rules against brute force.


@every([1, 2, 3, 4, 7])
def test_the_median_is_that_of_every_coordinate(clients):
    models = [mixed_model(seed) for seed in range(clients)]
    after = vector(aggregated(make("fedmedian", clients), mixed_model(99), models))
    expected = [statistics.median(column) for column in zip(*(vector(model) for model in models), strict=True)]
    assert np.allclose(after, expected, rtol=1e-6, atol=1e-7)


@every([(0.0, 4), (0.2, 3), (0.2, 5), (0.2, 11), (0.3, 10), (0.49, 9)])
def test_the_trimmed_mean_leaves_out_both_ends_of_every_coordinate(fraction, clients):
    models = [mixed_model(seed) for seed in range(clients)]
    after = vector(aggregated(make("fedtrimmedavg", clients, trim_fraction=fraction), mixed_model(99), models))
    cut = int(fraction * clients)
    columns = zip(*(vector(model) for model in models), strict=True)
    expected = [statistics.fmean(sorted(column)[cut : clients - cut]) for column in columns]
    assert np.allclose(after, expected, rtol=1e-5, atol=1e-6)


def krum_by_hand(models, hostile):
    """Index of the model with the least sum of squared distances to its n - f - 2 nearest others."""
    points = [vector(model) for model in models]
    scores = []
    for i, point in enumerate(points):
        distances = sorted(float(((point - other) ** 2).sum()) for j, other in enumerate(points) if j != i)
        scores.append(sum(distances[: max(1, len(points) - hostile - 2)]))
    return scores.index(min(scores))


def test_krum_is_that_of_brute_force():
    def check(clients, hostile, seed):
        models = [mixed_model(100 * seed + i, scale=1 + 0.1 * i) for i in range(clients)]
        after = aggregated(make("krum", clients, num_malicious=hostile), mixed_model(99), models)
        chosen = models[krum_by_hand(models, hostile)]
        assert all(np.array_equal(after[key], chosen[key]) for key in chosen)

    counts = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (7, 1), (7, 2), (9, 3)]
    assert failures([(*each, seed) for each in counts for seed in range(4)], check) == []


def nearly_agreeing(seed, clients=6):
    """Models that differ in their fourth digit, as they do late in training."""
    rng = np.random.default_rng(seed)
    base = rng.standard_normal(20_000)
    steps = [5e-4 * (1 + 0.1 * i) * rng.standard_normal(base.size) for i in rng.permutation(clients)]
    return [{"a": (base + step).astype(np.float32)} for step in steps]


def test_krum_tells_models_apart_that_nearly_agree():
    for seed in range(6):
        models = nearly_agreeing(seed)
        after = aggregated(make("krum", 6, num_malicious=1), models[0], models)
        assert np.array_equal(after["a"], models[krum_by_hand(models, 1)]["a"])


def test_flowers_krum_does_not_and_this_comparison_shows_it():
    wrong = 0
    for seed in range(6):
        models = nearly_agreeing(seed)
        (chosen,) = select_multikrum([reply(model).content for model in models], 1, 1)
        wrong += not np.array_equal(from_record(chosen["arrays"])["a"], models[krum_by_hand(models, 1)]["a"])
    assert wrong > 0


@every([FedMedian, FedTrimmedAvg, Krum])
def test_one_hostile_client_in_five_moves_a_robust_rule_no_further_than_the_others_reach(strategy):
    honest = [mixed_model(seed) for seed in range(1, 5)]
    hostile = {name: np.full_like(array, 1e6) for name, array in mixed_model().items()}
    options = {"num_malicious": 1} if strategy is Krum else {}
    name = {FedMedian: "fedmedian", FedTrimmedAvg: "fedtrimmedavg", Krum: "krum"}[strategy]
    for place in range(5):
        models = [*honest[:place], hostile, *honest[place:]]
        after = vector(aggregated(make(name, **options), mixed_model(), models))
        low, high = np.min([vector(m) for m in honest], axis=0), np.max([vector(m) for m in honest], axis=0)
        assert np.all(low <= after) and np.all(after <= high)
    assert np.abs(vector(aggregated(make("fedavg"), mixed_model(), [*honest, hostile]))).max() > 1e5


@every([-0.1, 0.5, 0.9, math.nan])
def test_a_trim_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=rf"strategy\.trim-fraction must be .* below 0.5, got {fraction}"):
        FedTrimmedAvg(trim_fraction=fraction)


def test_a_negative_number_of_hostile_clients_is_refused():
    with pytest.raises(ConfigError, match=r"strategy\.num-malicious must be >= 0, got -1"):
        Krum(num_malicious=-1)


@every([(1, 5), (2, 7), (10, 23)])
def test_krum_needs_enough_nodes_for_its_promise(hostile, least):
    with pytest.raises(ConfigError) as caught:
        Krum(num_malicious=hostile, train=Sampling(min_nodes=least - 1))
    assert str(caught.value) == (
        f"strategy.num-malicious = {hostile} needs strategy.min-nodes of at least {least} (2f + 3), found {least - 1}"
    )
    assert Krum(num_malicious=hostile, train=Sampling(min_nodes=least))


def test_krum_without_hostile_clients_needs_no_more_than_any_other():
    assert Krum(train=Sampling(min_nodes=1)).train_sampling.min_nodes == 1


# Sampling.


def roster(*nodes):
    """A grid that knows who is connected."""
    return SimpleNamespace(get_node_ids=lambda: list(nodes))


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(1, 60), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_fixed_draws_a_cohort_of_one_size_without_replacement(nodes, fraction, least, seed):
    least = min(least, nodes)
    drawn = Sampling(fraction, least, "fixed", 0, random.Random(seed))
    for _ in range(3):
        draw = drawn.draw(roster(*range(1, nodes + 1)))
        assert len(draw.nodes) == len(set(draw.nodes)) == draw.expected == max(int(fraction * nodes), least)
        assert set(draw.nodes) <= set(range(1, nodes + 1))


def indicators(kind, rounds=4000, nodes=12, fraction=0.25, seed=5):
    """Return the participation in each round: shape (rounds, nodes), 0 or 1."""
    drawn, grid = Sampling(fraction, 1, kind, 0, random.Random(seed)), roster(*range(nodes))
    taken = np.zeros((rounds, nodes))
    for line in taken:
        line[drawn.draw(grid).nodes] = 1
    return taken


def dependence(taken):
    """Σ over pairs of R·corr², which is chi-square with one degree of freedom a pair if nodes are independent."""
    corr = np.corrcoef(taken, rowvar=False)
    pairs = corr[np.triu_indices(len(corr), k=1)]
    return len(taken) * float((pairs**2).sum()), len(pairs)


def within(value, spread):
    """Return whether a standard normal figure is where it should be, two-sided."""
    return abs(value) < norm.isf(FALSE_ALARM / 2) * spread


@pytest.mark.parametrize("kind", ["fixed", "poisson"])
def test_every_node_is_as_likely_as_any_other(kind):
    share = indicators(kind).mean(axis=0)
    assert all(within(value - 0.25, math.sqrt(0.25 * 0.75 / 4000)) for value in share)


def test_poisson_cohorts_have_the_mean_and_the_variance_of_a_binomial():
    sizes = indicators("poisson").sum(axis=1)
    variance = 12 * 0.25 * 0.75
    assert within(sizes.mean() - 3, math.sqrt(variance / 4000))
    # A binomial of 12 has an excess kurtosis of (1 - 6·q(1-q)) / variance: almost none.
    excess = (1 - 6 * 0.25 * 0.75) / variance
    assert within(sizes.var(ddof=1) / variance - 1, math.sqrt((2 + excess) / 4000))
    assert indicators("fixed").sum(axis=1).var() == 0


def test_poisson_draws_every_node_by_itself():
    statistic, pairs = dependence(indicators("poisson"))
    assert chi2.isf(1 - FALSE_ALARM / 2, pairs) < statistic < chi2.isf(FALSE_ALARM / 2, pairs)


def test_the_test_of_independence_catches_fixed_sampling():
    statistic, pairs = dependence(indicators("fixed"))
    assert statistic > chi2.isf(FALSE_ALARM / 2, pairs)


@pytest.mark.parametrize("kind", ["fixed", "poisson"])
def test_rounds_are_drawn_by_themselves(kind):
    taken = indicators(kind)
    centred = taken - taken.mean(axis=0)
    lagged = (centred[1:] * centred[:-1]).mean(axis=0) / centred.var(axis=0)
    assert all(within(value, 1 / math.sqrt(3999)) for value in lagged)


def test_a_poisson_cohort_may_be_empty_and_its_expected_size_is_public():
    drawn = Sampling(0.1, 1, "poisson", 0, random.Random(0))
    draws = [drawn.draw(roster(1, 2, 3)) for _ in range(50)]
    assert {len(draw.nodes) for draw in draws} >= {0, 1}
    assert all(draw.expected == pytest.approx(0.3) for draw in draws)


def test_an_empty_cohort_is_asked_nothing_and_changes_nothing():
    strategy = FedAvg(train=Sampling(1e-9, 1, "poisson", 0, random.Random(0)))
    assert asked(strategy, mixed_model(), 3) == []
    assert strategy.last_draw.expected == pytest.approx(3e-9)
    assert strategy.aggregate_train(1, []) == (None, None)


def test_poisson_takes_everybody_where_the_fraction_is_one():
    assert Sampling(1.0, 1, "poisson", 0).draw(roster(3, 1, 2)).nodes == [1, 2, 3]


@pytest.mark.parametrize("kind", ["fixed", "poisson"])
def test_a_seeded_draw_does_not_depend_on_the_order_nodes_are_listed_in(kind):
    grids = [roster(*range(20)), roster(*reversed(range(20)))]
    one, other = (
        [drawn.draw(grid).nodes for _ in range(5)]
        for grid, drawn in ((grid, Sampling(0.4, 2, kind, 0, random.Random(3))) for grid in grids)
    )
    assert one == other
    assert len({tuple(nodes) for nodes in one}) > 1


def test_nodes_are_drawn_from_the_operating_systems_entropy_unless_seeded():
    assert isinstance(Sampling().rng, random.SystemRandom)


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self):
        self.now = 100.0
        self.slept = 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(averaging, "time", clock)
    return clock


@pytest.mark.parametrize(("timeout", "kind"), [(0.0, "fixed"), (2.0, "poisson")])
def test_too_few_nodes_are_an_error_when_the_time_is_up(clock, timeout, kind):
    with pytest.raises(FederationError) as caught:
        Sampling(1.0, 3, kind, timeout).draw(roster(1, 2))
    said = str(caught.value)
    assert said.startswith(f"2 nodes are connected after {timeout:g} s, strategy.min-nodes = 3; ")
    assert "node-timeout" in said
    assert timeout <= clock.now - 100 < timeout + 0.3


def test_a_round_starts_as_soon_as_enough_nodes_are_connected(clock):
    grid = SimpleNamespace(get_node_ids=lambda: range(1, 2 + clock.slept))
    assert sorted(Sampling(1.0, 4, timeout=60).draw(grid).nodes) == [1, 2, 3, 4]
    assert clock.slept == 3


def test_nobody_waits_where_enough_are_connected(clock):
    Sampling(1.0, 2, timeout=60).draw(roster(1, 2))
    assert clock.slept == 0


def test_registered_nodes_are_these_and_not_as_many_others(clock):
    """A node that takes the place of another is drawn from another population, for which nothing is claimed."""
    drawn = Sampling(0.5, 1, timeout=0, population=3)
    drawn.draw(roster(1, 2, 3))
    drawn.draw(roster(3, 2, 1))
    with pytest.raises(FederationError, match="registers the nodes of the first round"):
        drawn.draw(roster(1, 2, 4))


def test_after_the_first_round_the_quorum_counts(clock):
    assert len(Sampling(1.0, 3, timeout=0, quorum=2).draw(roster(1, 2)).nodes) == 2
    with pytest.raises(TooFewNodes, match=r"strategy\.quorum = 3"):
        Sampling(1.0, 1, timeout=0, quorum=3).draw(roster(1, 2))
    config = parse({"strategy.min-nodes": 4, "strategy.quorum": 3, "evaluation.federated": "on"})
    strategy = named_strategy(config)
    assert strategy.train_sampling.quorum == 3
    assert strategy.evaluate_sampling.quorum == 0, "scores are worth no pause"


def test_who_is_given_a_role_after_the_first_round_is_counted():
    held = HeldOut(0.3, random.Random(0))
    held.split(list(range(10)))
    assert held.newcomers == 0
    held.split(list(range(5)))
    held.split(list(range(10)))
    assert held.newcomers == 0
    held.split(list(range(12)))
    assert held.newcomers == 2


def test_held_out_nodes_may_be_gone_for_a_while_and_training_ones_may_not():
    held = HeldOut(0.34, random.Random(0))
    train, score = held.split([1, 2, 3])
    assert len(score) == 1
    scoring = Sampling(min_nodes=1, timeout=0, held_out=held, from_held_out=True, quorum=0)
    assert scoring.draw(roster(*train)).nodes == []
    with pytest.raises(TooFewNodes, match="none trains"):
        Sampling(min_nodes=1, timeout=0, held_out=held, quorum=1).draw(roster(*score))
