"""State of a model beside its weights: averaged by every strategy, and bounded with them by every mechanism."""

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from support import all_nodes, content, every, failures, grid_of, one_round

from cloister.client.node import Node
from cloister.client.noise import add_local_noise
from cloister.client.request import Reply, TrainRequest
from cloister.config.run import parse
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip, clip
from cloister.privacy.mechanisms.distributed.mean import DistributedMean
from cloister.privacy.mechanisms.distributed.plan import encode_client_input
from cloister.privacy.mechanisms.distributed.shares import Parties
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.clustering import LaplaceClustering
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.server.strategy_wrapper import NoPrivacyStrategy
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import FedAvg
from cloister.strategies.fedopt import FedAvgM
from cloister.strategies.robust import FedMedian
from cloister.utils.arrays import Layout, from_record, stacked, unstacked
from cloister.utils.cohort import Cohort
from cloister.utils.state import FLOOR, SHARE, Coordinates, is_state

KERNEL, MEAN, VARIANCE, OTHER = (
    "net/dense/kernel",
    "state//net/norm/moving_mean",
    "state//net/norm/moving_variance",
    "state//net/own/level",
)
C = 2.0


def model(kernel=0.0, mean=0.0, variance=1.0, other=0.0):
    values = {KERNEL: (kernel, (6, 2)), MEAN: (mean, 3), VARIANCE: (variance, 3), OTHER: (other, ())}
    return {name: np.full(shape, value, np.float32) for name, (value, shape) in values.items()}


SENT = model()
LAYOUT = Layout.of(SENT)
STARTS = [SENT, model(variance=0.0), model(0.5, -3e4, 6e4, 1e9), model(variance=-5.0), model(mean=1e38, variance=1e-38)]
ROOM = C * (1 - SHARE) ** 0.5
"""Of the weights, if state takes its whole share of the bound."""
UPDATES = [
    model(kernel, mean, variance, other)
    for kernel in (0.0, 1e-6, ROOM / 12**0.5, 1.0, 1e6, 1e15)
    for mean, variance, other in ((0, 1, 0), (1e-3, 1.001, 0), (1, 0, -1), (-1e6, 1e8, 1e3), (1e15, 1e15, -1e15))
]
"""Of a hostile client: any length of the weights, and of state."""


def moved(start, trained):
    """A client's reply, in the coordinates of the round."""
    coordinates = Coordinates.of(LAYOUT, LAYOUT.rows(start), C)
    return coordinates, coordinates.bounded(LAYOUT.rows(trained))


def contribution(cohort):
    """The norm of the one contribution to the sum, in double precision."""
    pairs = zip(cohort.rows[0], cohort.sent, strict=True)
    return cohort.factors[0] * np.sqrt(sum(np.sum((row.astype(float) - sent) ** 2) for row, sent in pairs))


def released(trained, sent=SENT):
    """The model after a round of two such clients under a clip to C, without noise."""
    strategy = GlobalDP(all_nodes(), noise_multiplier=0.0, clipping_norm=C)
    arrays, _ = one_round(strategy, grid_of(lambda node, _: content(trained), 2), sent)
    return from_record(arrays)


def sent_by_a_client(trained, start=SENT, noise=0.0, client="gaussian"):
    """Return the reply of a client with a mechanism of its own, bounded by C."""
    key = "privacy.gaussian-clipping-norm" if client == "gaussian" else "privacy.radius"
    settings = {"privacy.server": "none", "privacy.client": client, f"privacy.{client}-noise-multiplier": noise, key: C}
    request = TrainRequest(parse(settings), "1", 1, 3, (start,))
    node = Node.of(Context(1, 1, {"partition-id": 0, "num-partitions": 4}, RecordDict(), settings))
    return add_local_noise(Reply(trained), request, node).arrays


class TestBound:
    def test_what_one_client_adds_is_within_the_bound(self):
        for start in STARTS:
            for trained in UPDATES:
                coordinates, row = moved(start, trained)
                cohort = Cohort.of(LAYOUT, coordinates.origin, (row,))
                if np.isfinite(cohort.norms).all():  # else screening rejects it
                    assert contribution(clip(cohort, C)) <= C * (1 + 1e-6)

    def test_a_clip_of_the_weights_alone_is_found_out(self):
        coordinates, row = moved(SENT, model(1.0, 1e6))
        cohort = Cohort.of(LAYOUT, coordinates.origin, (row,))
        only = np.linalg.norm(row[0].astype(float) - coordinates.origin[0])
        assert contribution(clip(replace(cohort, norms=np.array([only])), C)) > C * 1.01

    @pytest.mark.parametrize("kind", ["update", "rule", "metric", "adaptive"])
    def test_one_client_moves_a_release_by_its_sensitivity(self, kind):
        """With and without a hostile client, whose place counts as a client without a reply."""
        inner = FedMedian if kind == "rule" else FedAvg
        make, options = (MetricDP if kind == "metric" else GlobalDP), {}
        options["placement"] = "rule" if kind == "rule" else "update"
        bound = AdaptiveClip(C) if kind == "adaptive" else C

        def of(reply):
            def answer(node, _):
                if node == 3 and reply is None:
                    raise RuntimeError("gone")
                return content(reply if node == 3 else model(0.1 * node, 0.2, 1.3))

            noise = GaussianNoise(7)
            strategy = make(all_nodes(inner), noise_multiplier=0.0, clipping_norm=bound, noise=noise, **options)
            seen, before = [], strategy._aggregated
            strategy._aggregated = lambda r, layout, found: seen.append(found) or before(r, layout, found)
            one_round(strategy, grid_of(answer, 3), SENT)
            return seen[0]

        without, distances = of(None), []
        for trained in UPDATES[::4]:
            found = of(trained)
            pairs = zip(found.models[0], without.models[0], strict=True)
            distances.append(np.sqrt(sum(np.sum((one.astype(float) - other) ** 2) for one, other in pairs)))
        least = 0.0 if kind == "rule" else 0.9 * without.sensitivity  # one client hardly moves a median
        assert least < max(distances) <= without.sensitivity * (1 + 1e-4)

    @pytest.mark.parametrize("client", ["gaussian", "laplace"])
    def test_a_client_s_own_release_is_within_its_bound(self, client):
        for start in STARTS[:2]:
            coordinates = Coordinates.of(LAYOUT, LAYOUT.rows(start), C)
            for trained in UPDATES:
                row = coordinates.encoded(LAYOUT.rows(sent_by_a_client(trained, start, client=client)))
                assert contribution(Cohort.of(LAYOUT, coordinates.origin, (row,))) <= C * (1 + 1e-4)

    def test_a_masked_update_is_within_its_steps(self):
        mechanism = DistributedMean(noise_multiplier=1.0, clip=FixedClip(C), parties=Parties(4, 3, 1))
        plan = mechanism.plan(LAYOUT.size)
        for trained in UPDATES:
            coordinates, row = moved(SENT, trained)
            numbers = encode_client_input(Cohort.of(LAYOUT, coordinates.origin, (row,)), plan)
            assert np.sum(numbers.astype(float) ** 2) <= float(plan.steps) ** 2


class TestUse:
    """State needs a part of the bound of its own; otherwise it leaves little of it to the weights, or the reverse."""

    def test_state_of_any_length_leaves_the_weights_their_room(self):
        trained = model(0.9 * ROOM / 12**0.5, 1e6, 1e9, 50.0)
        found = released(trained)
        np.testing.assert_allclose(found[KERNEL], trained[KERNEL], rtol=1e-4)

    def test_weights_of_any_length_leave_state_its_room(self):
        trained = model(1e6, 0.1, 1.1, 0.2)
        found = released(trained)
        for name in (MEAN, VARIANCE, OTHER):
            np.testing.assert_allclose(found[name], trained[name], rtol=1e-3)
        assert np.linalg.norm(found[KERNEL]) == pytest.approx(np.sqrt(C**2 - 0.1), rel=0.03)

    def test_a_client_s_own_noise_leaves_both_their_room(self):
        found = sent_by_a_client(model(1e6, 0.1, 1.1))
        np.testing.assert_allclose(found[MEAN], 0.1, rtol=1e-3)
        assert np.linalg.norm(found[KERNEL]) > 0.99 * ROOM

    def test_state_moves_by_one_in_its_own_units(self):
        start = model(variance=4.0)
        moved = released(model(0, 1e3, 4.0), start)
        assert np.linalg.norm(moved[MEAN]) == pytest.approx((4 + FLOOR) ** 0.5, rel=1e-3)
        moved = released(model(0, 0, 1e9), start)
        assert np.linalg.norm(np.log((moved[VARIANCE] + FLOOR) / (4 + FLOOR))) == pytest.approx(1, rel=1e-3)

    @staticmethod
    @every([model(0.3, 7, 60000), model(-1, 1e-3, 0.0), model(2.0, -1e4, 1e9, 5)])
    def test_no_update_releases_the_model_that_came(start):
        found = released(start, start)
        for name, array in start.items():
            np.testing.assert_array_equal(found[name], array)


class TestStrategies:
    def test_every_strategy_averages_state_and_steps_the_weights_alone(self):
        values, counts = [1.0, 2.0, 6.0, 1.5, 7.0], [10, 10, 20, 10, 50]
        clients = [model(0.1 * value, value, value, value) for value in values]
        mean, median = np.average(values, weights=counts), np.median(values)
        expected = {"fedmedian": median, "krum": median, "fedtrimmedavg": np.mean(sorted(values)[1:-1])}
        grid = grid_of(lambda node, _: content(clients[node - 1], counts[node - 1]), len(clients))

        def check(name):
            arrays, _ = one_round(NoPrivacyStrategy(all_nodes(STRATEGIES.load(name))), grid, SENT)
            found = from_record(arrays)
            assert list(found) == list(SENT)
            for state in filter(is_state, SENT):
                np.testing.assert_allclose(found[state], expected.get(name, mean), rtol=1e-6)

        assert failures(STRATEGIES.names(), check) == []

    @staticmethod
    @every(["fedmedian", "fedtrimmedavg", "krum"])
    def test_one_client_does_not_decide_state_where_it_decides_no_weight(name):
        clients = [model(0.1, 1.0, 2.0), model(0.12, 1.1, 2.1), model(0.11, 1.2, 2.2), model(0.1, 1.0, 2.0)]
        clients = [*clients, model(0.1, 1e15, 1e15, -1e15)]
        grid = grid_of(lambda node, _: content(clients[node - 1]), 5)
        arrays, _ = one_round(NoPrivacyStrategy(all_nodes(STRATEGIES.load(name))), grid, SENT)
        assert 1 <= from_record(arrays)[MEAN].min() <= from_record(arrays)[MEAN].max() <= 1.2

    @staticmethod
    @every([NoPrivacyStrategy, lambda inner: GlobalDP(inner, noise_multiplier=1.0, clipping_norm=C)])
    def test_a_strategy_sees_no_state(wrap):
        class Seeing(FedAvgM):
            def configure_train(self, server_round, arrays, config, grid):
                assert list(arrays) == [KERNEL]
                return super().configure_train(server_round, arrays, config, grid)

            def aggregate_train(self, server_round, replies):
                replies = list(replies)
                assert {name for reply in replies for name in reply.content["arrays"]} == {KERNEL}
                return super().aggregate_train(server_round, replies)

            capabilities = FedAvgM.capabilities

        arrays, _ = one_round(wrap(all_nodes(Seeing)), grid_of(lambda node, sent: content(sent), 2), SENT)
        assert list(arrays) == list(SENT)

    def test_clusters_are_of_weights_and_each_averages_its_own_state(self):
        near, far = (model(0, mean, 4e4 * mean) for mean in (1.0, 2.0)), (model(9, mean, mean) for mean in (5.0, 6.0))
        clients = [model for pair in zip(near, far, strict=True) for model in pair]
        strategy = LaplaceClustering(all_nodes(), all_nodes, 2)
        sent = stacked([model(0), model(9, 0, 4e4)])
        arrays, _ = one_round(strategy, grid_of(lambda node, _: content(clients[node - 1]), 4), sent)
        assert [found[MEAN][0] for found in unstacked(from_record(arrays))] == [1.5, 5.5]

    def test_a_round_moves_state_no_further_than_a_client_does(self):
        """So noise is cut that is longer than anything that it could hide."""
        strategy = GlobalDP(all_nodes(), noise_multiplier=1e3, clipping_norm=C, noise=GaussianNoise(3))
        arrays, _ = one_round(strategy, grid_of(lambda node, sent: content(sent), 2), SENT)
        coordinates = Coordinates.of(LAYOUT, LAYOUT.rows(SENT), C)
        row = coordinates.encoded(LAYOUT.rows(from_record(arrays)))
        state = [row[place] for place in coordinates.spreads]
        assert np.linalg.norm(np.concatenate(state, axis=None)) == pytest.approx(coordinates.unit, rel=1e-4)
        assert np.linalg.norm(row[0]) > 1e3


class TestVariances:
    @staticmethod
    @every(
        [
            *((kind, placement) for kind in (GlobalDP, MetricDP) for placement in ("update", "model")),
            (GlobalDP, "rule"),
        ]
    )
    def test_no_noise_makes_a_variance_negative(kind, placement):
        inner = all_nodes(FedMedian if placement == "rule" else FedAvg)
        strategy = kind(inner, noise_multiplier=50.0, clipping_norm=C, placement=placement, noise=GaussianNoise(3))
        sent = model()
        for number in range(1, 4):
            arrays, _ = one_round(strategy, grid_of(lambda node, sent: content(sent), 2), sent, number)
            sent = from_record(arrays)
            assert sent[VARIANCE].min() >= 0 and np.isfinite(sent[MEAN]).all()
        assert sent[MEAN].min() < 0 and sent[OTHER] != 0, "other state has a sign, and moves"

    def test_noise_of_clients_makes_none_negative_either(self):
        def noised(node, _):
            return content(sent_by_a_client(model(0.1), noise=50.0))

        arrays, _ = one_round(NoPrivacyStrategy(all_nodes()), grid_of(noised, 3), SENT)
        assert from_record(arrays)[VARIANCE].min() >= 0

    @staticmethod
    @every([{KERNEL: np.zeros(5)}, {MEAN: np.zeros((3, 3))}, {VARIANCE: np.ones(())}, {OTHER: np.array("x")}])
    def test_other_arrays_send_noise_on_the_model_that_came(other):
        found = sent_by_a_client(model(0.1) | other, noise=1.0)
        assert {name: array.shape for name, array in found.items()} == {
            name: array.shape for name, array in SENT.items()
        }
        assert all(np.isfinite(array).all() for array in found.values()) and found[KERNEL].any()

    def test_a_server_optimizer_that_overshoots_makes_none_negative(self):
        strategy = NoPrivacyStrategy(all_nodes(FedAvgM, server_learning_rate=50.0, momentum=0.9))
        arrays, _ = one_round(strategy, grid_of(lambda node, _: content(model(1, 0, 0.5)), 2), SENT)
        np.testing.assert_array_equal(from_record(arrays)[VARIANCE], np.float32(0.5))
        assert from_record(arrays)[KERNEL][0, 0] == pytest.approx(50)
