"""LaplaceClustering: every cluster to its own copy of the wrapped strategy."""

import itertools

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from support import all_nodes, content, failures, grid_of, one_round, random_models, zeros

from cloister.config.run import parse
from cloister.server import clustering
from cloister.server.build import decorate, named_strategy
from cloister.server.clustering import LaplaceClustering, scattered
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import FedAvg, Sampling
from cloister.strategies.fedopt import FedAvgM, FedYogi
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import from_record, stacked, to_record, unstacked
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.wire import CONFIG, HYPOTHESES

FAR = 50.0
"""Between two populations, in every parameter."""


def everybody(kind, **options):
    return lambda: kind(train=Sampling(min_nodes=1, timeout=0), **options)


def around(make, hypotheses=2):
    return LaplaceClustering(make(), make, hypotheses)


def models_of(record):
    return unstacked(from_record(record))


def shifted(model, by):
    return {name: array + np.float32(by) for name, array in model.items()}


def two_populations(node):
    """Even nodes near the first hypothesis, odd ones near the second; the node decides by how much."""
    return lambda sent: shifted(unstacked(sent)[node % 2], 0.1 * node)


def grid_for(nodes, answer=two_populations):
    return grid_of(
        lambda node, sent: RecordDict({"arrays": to_record(answer(node)(sent)), "metrics": MetricRecord()}), nodes
    )


@pytest.fixture
def sent():
    (model,) = random_models(1)
    return stacked([model, shifted(model, FAR)])


def test_each_cluster_goes_through_a_strategy_of_its_own(sent):
    """Three rounds of both clusters at once are the same as three rounds of each alone: momentum is not shared."""

    def check(make):
        together, alone = around(make), [make(), make()]
        apart = [to_record(model) for model in unstacked(sent)]
        arrays = to_record(sent)
        for number in range(1, 4):
            arrays, _ = one_round(together, grid_for(5), from_record(arrays), number)
            for parity, strategy in enumerate(alone):
                members = [node for node in range(1, 6) if node % 2 == parity]
                grid = grid_of(
                    lambda index, model, members=members: content(shifted(model, 0.1 * members[index - 1]), 1),
                    len(members),
                )
                apart[parity], _ = one_round(strategy, grid, from_record(apart[parity]), number)
            for model, expected in zip(models_of(arrays), apart, strict=True):
                for name, array in model.items():
                    np.testing.assert_allclose(array, expected[name].numpy(), rtol=1e-5, atol=1e-5)
        assert together.measured.cluster_sizes == (2, 3) and together.measured.accepted == 5

    cases = [everybody(FedAvg), everybody(FedAvgM, momentum=0.9), everybody(FedYogi), everybody(FedMedian)]
    assert failures(cases, check) == []


class PlusOne(FlowerFedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return to_record(shifted(from_record(arrays), 1)), metrics


def test_any_flower_strategy_is_called_once_for_each_cluster(sent):
    make = lambda: PlusOne(min_available_nodes=4, min_train_nodes=4)  # noqa: E731
    arrays, _ = one_round(around(make), grid_for(4, lambda node: lambda sent: unstacked(sent)[node % 2]), sent)
    for model, before in zip(models_of(arrays), unstacked(sent), strict=True):
        for name, array in model.items():
            np.testing.assert_allclose(array, before[name] + 1, rtol=1e-6)


def test_clients_of_a_cluster_count_the_same_whatever_they_say_of_themselves(sent):
    """A count that came along, from a client that was not asked for one, has no weight."""
    grid = grid_of(lambda node, sent: content(shifted(unstacked(sent)[0], node), 10**node), 3)
    arrays, _ = one_round(around(everybody(FedAvg)), grid, sent)
    np.testing.assert_allclose(models_of(arrays)[0]["bias"], unstacked(sent)[0]["bias"] + 2, rtol=1e-5)


def test_an_empty_cluster_keeps_its_hypothesis_to_the_bit(sent):
    strategy = around(everybody(FedAvgM, momentum=0.9))
    grid = grid_for(3, lambda node: lambda sent: shifted(unstacked(sent)[0], 1))
    arrays, _ = one_round(strategy, grid, sent)
    for name, array in models_of(arrays)[1].items():
        np.testing.assert_array_equal(array, unstacked(sent)[1][name])
    assert strategy.measured.cluster_sizes == (3, 0)
    assert not np.array_equal(models_of(arrays)[0]["bias"], unstacked(sent)[0]["bias"])


def test_nobody_replies(sent):
    def fails(node, sent):
        raise RuntimeError("no")

    strategy = around(everybody(FedAvg))
    arrays, _ = one_round(strategy, grid_of(fails, 3), sent)
    for name, array in from_record(arrays).items():
        np.testing.assert_array_equal(array, sent[name])
    assert strategy.measured.accepted == 0 and len(strategy.measured.rejected) == 3


def test_fewer_replies_than_hypotheses(sent):
    (model,) = random_models(1)
    many = stacked([shifted(model, FAR * number) for number in range(5)])
    strategy = around(everybody(FedAvg), 5)
    arrays, _ = one_round(strategy, grid_for(1, lambda node: lambda sent: shifted(unstacked(sent)[3], 1)), many)
    assert strategy.measured.cluster_sizes == (0, 0, 0, 1, 0)
    np.testing.assert_allclose(models_of(arrays)[3]["bias"], model["bias"] + 3 * FAR + 1, rtol=1e-5)


def test_one_hypothesis_is_the_mean_of_all_clients():
    grid = grid_for(2, lambda node: lambda sent: shifted(unstacked(sent)[0], node))
    arrays, _ = one_round(around(everybody(FedAvg), 1), grid, stacked([zeros()]))
    (found,) = models_of(arrays)
    np.testing.assert_allclose(found["bias"], np.full_like(found["bias"], 1.5))


def test_every_strategy_survives_clusters_of_one_and_of_none(sent):
    def check(name):
        config = parse({"strategy.name": name, "strategy.min-nodes": 1, "privacy.server": "laplace-clustering"})
        strategy = decorate(named_strategy(config), config, None, lambda: named_strategy(config, draws=False))
        for nodes in (1, 2):
            arrays, _ = one_round(strategy, grid_for(nodes), sent)
            assert sum(strategy.measured.cluster_sizes) == nodes
            assert all(np.isfinite(array).all() for array in from_record(arrays).values())

    assert failures(STRATEGIES.names(), check) == []


def test_hypotheses_that_lie_on_each_other_are_reported():
    model = zeros()
    strategy = around(everybody(FedAvg))
    one_round(
        strategy,
        grid_for(20, lambda node: lambda sent: shifted(unstacked(sent)[0], 2 * node - 21)),
        stacked([model, model]),
    )
    assert strategy.measured.collapsed == ((0, 1),)


class TestHypothesesThatBeginAlike:
    """The releases of a round tell them apart; here those of odd nodes lie far from those of even ones."""

    model = random_models(1)[0]

    def release(self, node):
        return lambda sent: shifted(self.model, node % 2 * FAR)

    def told_apart(self, hypotheses, *grids, split_round=1, make=None):
        """Return the movement of the hypotheses after a round with each grid, and the last round's measurements."""
        make = make or everybody(FedAvg)
        strategy = LaplaceClustering(make(), make, hypotheses, split_round)
        arrays = to_record(stacked([self.model] * hypotheses))
        for number, grid in enumerate(grids, start=1):
            arrays, _ = one_round(strategy, grid, from_record(arrays), number)
        return [float((each["bias"] - self.model["bias"]).mean()) for each in models_of(arrays)], strategy.measured

    def test_each_population_gets_one(self):
        moved, measured = self.told_apart(2, grid_for(9, self.release))
        assert sorted(measured.cluster_sizes) == [4, 5] and not measured.collapsed
        assert sorted(moved) == pytest.approx([0, FAR], abs=1e-3)

    @pytest.mark.parametrize(("split_round", "times"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 0)])
    def test_once_and_where_it_is_asked_for(self, split_round, times, monkeypatch):
        """Afterwards k-means starts from the hypotheses."""
        asked = []
        monkeypatch.setattr(clustering, "scattered", lambda *given: asked.append(given) or scattered(*given))
        self.told_apart(2, *[grid_for(9, self.release)] * 3, split_round=split_round)
        assert len(asked) == times

    def test_before_the_split_they_are_one_model_of_all_clients(self):
        moved, measured = self.told_apart(2, grid_for(9, self.release), split_round=2)
        assert moved == pytest.approx([FAR * 5 / 9] * 2, rel=1e-5)
        assert measured.cluster_sizes == (9,) and not measured.collapsed

    def test_each_has_the_state_of_the_one_model_after_the_split(self):
        """A server's momentum of the rounds before goes on in every one of them."""
        make = everybody(FedAvgM, server_learning_rate=1.0, momentum=0.5)
        rounds = [grid_for(9, lambda node: lambda sent: shifted(unstacked(sent)[0], 1)), grid_for(9, self.release)]
        moved, _ = self.told_apart(2, *rounds, split_round=2, make=make)
        assert sorted(moved) == pytest.approx([0.5, FAR + 0.5], abs=1e-3)

    def test_a_strategy_that_draws_leaves_them_one_model_before_the_split(self):
        class Drawing(FedAvg):
            drawn = itertools.count()

            def aggregate_train(self, server_round, replies):
                arrays, metrics = super().aggregate_train(server_round, replies)
                return to_record(shifted(from_record(arrays), next(self.drawn))), metrics

        moved, _ = self.told_apart(2, grid_for(9, self.release), split_round=2, make=everybody(Drawing))
        assert moved[0] == moved[1]

    def test_a_round_without_replies_before_the_split_leaves_the_model(self):
        def fails(node, sent):
            raise RuntimeError("no")

        moved, _ = self.told_apart(2, grid_of(fails, 3), split_round=2)
        assert moved == [0, 0]

    def test_a_round_without_replies_leaves_it_to_the_next(self):
        def fails(node, sent):
            raise RuntimeError("no")

        moved, _ = self.told_apart(2, grid_of(fails, 3), grid_for(9, self.release))
        assert sorted(moved) == pytest.approx([0, FAR], abs=1e-3)

    def test_fewer_releases_than_hypotheses_leave_the_others_where_they_are(self):
        moved, measured = self.told_apart(4, grid_for(2, self.release))
        assert sum(measured.cluster_sizes) == 2 and sorted(moved) == pytest.approx([0, 0, 0, FAR], abs=1e-3)


def test_a_reply_of_all_hypotheses_is_rejected(sent):
    """One model comes back, not k: which one a client began with would show."""
    strategy = around(everybody(FedAvg))
    one_round(strategy, grid_for(2, lambda node: lambda sent: sent), sent)
    assert strategy.measured.accepted == 0


def test_clients_are_told_how_many_hypotheses_there_are(sent):
    strategy, config = around(everybody(FedAvg)), ConfigRecord()
    messages = strategy.configure_train(1, to_record(sent), config, grid_for(3))
    assert len(list(messages)) == 3
    assert all(message.content[CONFIG][HYPOTHESES] == 2 for message in messages)


def test_a_record_of_another_number_of_hypotheses_is_refused(sent):
    with pytest.raises(FederationError, match="2 hypotheses were found where 3"):
        around(everybody(FedAvg), 3).configure_train(1, to_record(sent), ConfigRecord(), grid_for(3))
    with pytest.raises(ConfigError, match="clusters must be > 0"):
        around(all_nodes, 0)


def test_momentum_of_every_cluster_is_in_its_state(sent):
    """One that takes up the state of another goes on as that one does."""
    first, second = (around(everybody(FedAvgM, momentum=0.9)) for _ in range(2))
    one_round(first, grid_for(4), sent)
    second.load_state_dict(first.state_dict())
    for one, other in zip(first.copies, second.copies, strict=True):
        assert one.state_dict().keys() == other.state_dict().keys() != set()
        for name, array in one.state_dict().items():
            np.testing.assert_array_equal(array, other.state_dict()[name])
