"""A malformed reply is rejected by itself, named with a reason, and the round goes on with the others."""

import math
from copy import copy

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from support import all_nodes, content, failures, flat, grid_of, one_round, random_models, zeros

from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.polling_grid import PollingGrid
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.server.screening import MAX_EXAMPLES, REASON_LENGTH, Unfit, fitting, is_count, printable
from cloister.server.strategy_wrapper import NoPrivacyStrategy
from cloister.simulation.grid import LocalGrid
from cloister.strategies.averaging import Sampling
from cloister.utils.arrays import to_record

GOOD = random_models(3, 0.1, seed=5)
NPY = FlowerArray(np.zeros(3, np.float32)).data


def changed(**arrays):
    return content({**GOOD[0], **arrays})


def counted(count):
    return content(GOOD[0], count)


def counted_twice(*counts):
    return RecordDict({**counted(counts[0]), "more": MetricRecord({"num-examples": counts[1]})})


def labelled(dtype, shape, data=NPY):
    """A reply whose array `bias` claims to be something."""
    record = to_record({"kernel": GOOD[0]["kernel"]})
    record["bias"] = FlowerArray(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)
    return RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 10})})


def relabelled(data):
    return labelled("float32", (3,), data)


NOT_FINITE = "the update holds NaN or Inf, or is too large to measure: try a lower client.learning-rate"
NO_COUNT = "num-examples must be one number above 0 and at most 1e+09"
NO_BIAS = "array 'bias' is missing"
MISLABELLED = "array 'bias' is not what it is labelled as"
BAD = {
    "nan": (changed(bias=np.array([0, np.nan, 0], np.float32)), "non-finite", NOT_FINITE),
    "inf": (changed(bias=np.array([0, np.inf, 0], np.float32)), "non-finite", NOT_FINITE),
    "minus inf": (changed(bias=np.array([0, -np.inf, 0], np.float32)), "non-finite", NOT_FINITE),
    "beyond float32 norms": (changed(bias=np.full(3, 3e38, np.float32)), "non-finite", NOT_FINITE),
    "wrong shape": (
        changed(bias=np.zeros((1, 3), np.float32)),
        "shape",
        "array 'bias' must have shape (3,), found (1, 3)",
    ),
    "broadcastable shape": (
        changed(bias=np.zeros(1, np.float32)),
        "shape",
        "array 'bias' must have shape (3,), found (1,)",
    ),
    "missing array": (content({"kernel": GOOD[0]["kernel"]}), "missing-array", NO_BIAS),
    "renamed array": (content({"kernel": GOOD[0]["kernel"], "bais": GOOD[0]["bias"]}), "missing-array", NO_BIAS),
    "extra array": (changed(more=np.zeros(1, np.float32)), "extra-array", "expected 2 arrays, found 3"),
    "integer array": (changed(bias=np.zeros(3, np.int32)), "dtype", "array 'bias' must be float32, found 'int32'"),
    "other float": (changed(bias=np.zeros(3, np.float64)), "dtype", "array 'bias' must be float32, found 'float64'"),
    "negative count": (counted(-5), "weight", NO_COUNT),
    "zero count": (counted(0), "weight", NO_COUNT),
    "huge count": (counted(MAX_EXAMPLES + 1), "weight", NO_COUNT),
    "nan count": (counted(math.nan), "weight", NO_COUNT),
    "infinite count": (counted(math.inf), "weight", NO_COUNT),
    "list of counts": (counted([1, 2]), "weight", NO_COUNT),
    "two records of counts": (counted_twice(10, 10), "weight", NO_COUNT),
    "no arrays": (
        RecordDict({"metrics": MetricRecord({"num-examples": 1})}),
        "record",
        "expected one array record named 'arrays', found 0",
    ),
    "two records": (
        RecordDict({"arrays": to_record(GOOD[0]), "more": to_record(GOOD[0])}),
        "record",
        "expected one array record named 'arrays', found 2",
    ),
    "empty record": (RecordDict({"arrays": ArrayRecord()}), "missing-array", "array 'kernel' is missing"),
    "long dtype": (labelled("f" * 90, (3,)), "dtype", f"array 'bias' must be float32, found '{'f' * 20}'"),
    "many axes": (labelled("float32", (1,) * 9), "shape", f"array 'bias' must have shape (3,), found {(1,) * 8}"),
    "garbage bytes": (relabelled(b"\x00" * len(NPY)), "bytes", MISLABELLED),
    "truncated bytes": (relabelled(NPY[:-1]), "bytes", MISLABELLED),
    "no bytes": (relabelled(b""), "bytes", MISLABELLED),
    "bytes of another shape": (relabelled(FlowerArray(np.zeros(4, np.float32)).data), "bytes", MISLABELLED),
    "bytes of another dtype": (relabelled(FlowerArray(np.zeros(3, np.int32)).data), "bytes", MISLABELLED),
}
DECORATORS = {
    "none": lambda: NoPrivacyStrategy(all_nodes()),
    "global-dp": lambda: GlobalDP(all_nodes(), noise_multiplier=0.0, clipping_norm=9.0, noise=GaussianNoise(1)),
    "metric": lambda: MetricDP(all_nodes(), noise_multiplier=0.0, clipping_norm=9.0, noise=GaussianNoise(1)),
}
every_decorator = pytest.mark.parametrize("decorator", DECORATORS)


@every_decorator
def test_it_is_rejected_by_itself(decorator):
    others = sum(np.concatenate([a.ravel() for a in model.values()]) for model in GOOD[1:])

    def check(kind):
        bad, code, detail = BAD[kind]
        strategy = DECORATORS[decorator]()
        grid = grid_of(lambda node, _: bad if node == 1 else content(GOOD[node - 1]), 3)
        arrays, _ = one_round(strategy, grid, zeros())
        (rejection,) = strategy.measured.rejected
        assert (rejection.node_id, rejection.code, rejection.detail) == (1, code, detail)
        assert strategy.measured.accepted == 2
        # Privately the divisor stays the public cohort of three; otherwise it is the two that count.
        np.testing.assert_allclose(flat(arrays), others / (2 if decorator == "none" else 3), atol=1e-6)

    assert failures(BAD, check) == []


@every_decorator
def test_an_error_reply(decorator):
    def answer(node, _):
        if node == 2:
            raise RuntimeError("disk full")
        return content(GOOD[node - 1])

    strategy = DECORATORS[decorator]()
    arrays, _ = one_round(strategy, grid_of(answer, 3), zeros())
    (rejection,) = strategy.measured.rejected
    assert (rejection.node_id, rejection.code, rejection.detail) == (2, "error", "code 2: RuntimeError: disk full")
    assert np.isfinite(flat(arrays)).all()


@every_decorator
def test_an_unchanged_model_is_a_legal_update(decorator):
    strategy = DECORATORS[decorator]()
    arrays, _ = one_round(strategy, grid_of(lambda node, sent: content(sent), 3), GOOD[0])
    assert strategy.measured.accepted == 3 and not strategy.measured.rejected
    np.testing.assert_array_equal(flat(arrays), np.concatenate([a.ravel() for a in GOOD[0].values()]))


class Misdelivering(LocalGrid):
    """Loses, repeats or invents replies on their way."""

    def __init__(self, how, answer=lambda node, _: content(GOOD[node - 1])):
        super().__init__(grid_of(answer, 3)._client_app, {}, [{}] * 3)
        self.how = how

    def send_and_receive(self, messages, *, timeout=None):
        return self.how(list(super().send_and_receive(messages, timeout=timeout)))


@every_decorator
def test_a_reply_that_never_comes(decorator):
    strategy = DECORATORS[decorator]()
    one_round(strategy, Misdelivering(lambda replies: replies[1:]), zeros())
    (rejection,) = strategy.measured.rejected
    assert (rejection.code, rejection.detail) == ("missing", "no reply came before the deadline")
    assert strategy.measured.accepted == 2


@every_decorator
def test_a_second_reply_of_one_node(decorator):
    strategy = DECORATORS[decorator]()
    one_round(strategy, Misdelivering(lambda replies: [*replies, replies[0]]), zeros())
    (rejection,) = strategy.measured.rejected
    assert (rejection.code, rejection.detail) == ("duplicate", "this node has already replied in this round")
    assert strategy.measured.accepted == 3


@every_decorator
def test_a_reply_of_a_node_that_was_not_asked(decorator):
    def invent(replies):
        stranger = Message(replies[0].content, reply_to=replies[0])
        stranger.metadata.__dict__["_src_node_id"] = 77
        return [*replies, stranger]

    strategy = DECORATORS[decorator]()
    one_round(strategy, Misdelivering(invent), zeros())
    (rejection,) = strategy.measured.rejected
    found = (rejection.node_id, rejection.code, rejection.detail)
    assert found == (77, "unsolicited", "this node was not asked in this round")


@every_decorator
@pytest.mark.parametrize("message_id", ["as it is", "another"])
def test_a_reply_in_the_name_of_another_node_leaves_that_one_its_own(decorator, message_id):
    def pose(replies):
        first, *others = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        first.metadata.__dict__["_src_node_id"] = 2
        if message_id == "another":
            first.metadata.__dict__["_reply_to_message_id"] = "0" * 64
        return [first, *others]

    strategy = DECORATORS[decorator]()
    one_round(strategy, Misdelivering(pose), zeros())
    assert {(r.node_id, r.code) for r in strategy.measured.rejected} == {(1, "missing"), (2, "sender")}
    assert strategy.measured.accepted == 2


class Posing(LocalGrid):
    """Its second node replies in the name of the third."""

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            yield self.posed(reply) if reply.metadata.src_node_id == 2 else reply

    def posed(self, reply):
        reply.metadata.__dict__["_src_node_id"] = 3
        return reply


class Gone(Posing):
    """Its second node has gone, and Flower replies for it."""

    def posed(self, reply):
        expired = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE), reply_to=reply)
        own = {"_src_node_id": SUPERLINK_NODE_ID, "_reply_to_message_id": reply.metadata.reply_to_message_id}
        expired.metadata.__dict__.update(own)
        return expired


@every_decorator
@pytest.mark.parametrize(
    ("grid", "verdicts"), [(Posing, {(2, "missing"), (3, "sender")}), (Gone, {(2, "unavailable")})]
)
def test_senders_are_known_on_a_grid_that_sends_when_it_is_asked_for_replies(decorator, grid, verdicts):
    """As the server's own does: messages have no number before."""
    strategy = DECORATORS[decorator]()
    good = grid_of(lambda node, _: content(GOOD[node - 1]), 3)
    one_round(strategy, PollingGrid(grid(good._client_app, {}, [{}] * 3)), zeros())
    assert {(r.node_id, r.code) for r in strategy.measured.rejected} == verdicts
    assert strategy.measured.accepted == 2


def test_replies_may_come_in_any_order_and_as_a_generator():
    strategy = NoPrivacyStrategy(all_nodes())
    straight, _ = one_round(strategy, Misdelivering(lambda replies: replies), zeros())
    turned, _ = one_round(strategy, Misdelivering(lambda replies: (reply for reply in reversed(replies))), zeros())
    np.testing.assert_array_equal(flat(straight), flat(turned))


def test_their_order_follows_from_what_they_say():
    """Of long arrays from the first numbers, or the last: float addition in another order is another model."""

    def check(place):
        long = zeros(40)
        models = [{**long, "kernel": long["kernel"].copy()} for _ in range(3)]
        for number, model in enumerate(models, start=1):
            model["kernel"].ravel()[place] = number
        grid = grid_of(lambda node, _: content(models[node - 1], node), 3)
        strategy = NoPrivacyStrategy(all_nodes())
        messages = list(strategy.configure_train(1, to_record(long), ConfigRecord(), grid))
        replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
        orders = [strategy.receive(replies[turn:] + replies[:turn]).examples for turn in range(3)]
        assert orders[0] == orders[1] == orders[2]

    assert failures([0, 15, -16, -1], check) == []


def test_rejections_are_in_the_order_of_nodes():
    strategy = NoPrivacyStrategy(all_nodes())
    bad = BAD["nan"][0]
    turned = Misdelivering(
        lambda replies: sorted(replies, key=lambda reply: -reply.metadata.src_node_id), lambda *_: bad
    )
    one_round(strategy, turned, zeros())
    assert [rejection.node_id for rejection in strategy.measured.rejected] == [1, 2, 3]


def test_a_reply_without_a_count_counts_as_one_example():
    """A record of other metrics is none."""
    uncounted = RecordDict({"arrays": to_record(GOOD[0]), "metrics": MetricRecord({"train-loss": 1.0})})
    beside = RecordDict({**counted(3), "more": MetricRecord({"train-loss": 1.0})})
    grid = grid_of(lambda node, _: (uncounted, beside)[node - 1], 2)
    strategy = NoPrivacyStrategy(all_nodes())
    messages = strategy.configure_train(1, to_record(zeros()), ConfigRecord(), grid)
    received = strategy.receive(grid.send_and_receive(messages))
    assert sorted(received.examples) == [1, 3] and not received.rejected


def test_what_can_be_a_count_of_examples():
    def check(value, is_one):
        assert is_count(value) == is_one

    cases = [
        *[(value, True) for value in (1, 0.5, MAX_EXAMPLES)],
        *[(value, False) for value in (0, -1, MAX_EXAMPLES + 1, math.nan, math.inf, "3", None, [3])],
    ]
    assert failures(cases, check) == []


def test_reasons_never_quote_values():
    secret = 1234567.0
    strategy = NoPrivacyStrategy(all_nodes())
    bad = content({**GOOD[0], "bias": np.array([secret, np.nan, 0], np.float32)}, secret)
    one_round(strategy, grid_of(lambda node, _: bad if node == 1 else content(GOOD[node - 1]), 3), zeros())
    assert "1234567" not in str(strategy.measured)


def test_without_any_good_reply_nothing_is_aggregated():
    arrays, metrics = one_round(NoPrivacyStrategy(all_nodes()), grid_of(lambda node, _: BAD["nan"][0], 2), zeros())
    assert arrays is None and metrics is None


UNCOUNTED = "expected one metric record with num-examples above 0 and at most 1e+09"
UNNAMED = "a metric's name must be letters, digits, spaces and . _ - ( )"
ENDLESS = "metric 'loss' must be one finite number, of at most 1e+100"


class TestEvaluationReplies:
    @staticmethod
    def aggregate(*metrics):
        strategy = NoPrivacyStrategy(all_nodes(evaluate=Sampling(min_nodes=1, timeout=0)))
        grid = grid_of(lambda node, _: RecordDict({"metrics": MetricRecord(metrics[node - 1])}), len(metrics))
        messages = strategy.configure_evaluate(1, to_record(zeros()), ConfigRecord(), grid)
        means = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
        return means, [rejection.node_id for rejection in strategy.unscored]

    def test_a_rejection_says_what_is_wrong(self):
        def check(odd, code, detail):
            strategy = NoPrivacyStrategy(all_nodes(evaluate=Sampling(min_nodes=1, timeout=0)))
            grid = grid_of(lambda *_: RecordDict({"metrics": MetricRecord(odd)}), 1)
            messages = strategy.configure_evaluate(1, to_record(zeros()), ConfigRecord(), grid)
            assert strategy.aggregate_evaluate(1, grid.send_and_receive(messages)) is None
            (rejection,) = strategy.unscored
            assert (rejection.node_id, rejection.code, rejection.detail) == (1, code, detail)

        cases = (
            [({"num-examples": count}, "weight", UNCOUNTED) for count in (-1, 0, MAX_EXAMPLES + 1)]
            + [({"loss": 1.0}, "weight", UNCOUNTED)]
            + [({"num-examples": 1, name: 9.0}, "metric", UNNAMED) for name in ("[/red]", "a" * 41)]
            + [
                ({"num-examples": 1, "loss": value}, "metric", ENDLESS)
                for value in (math.nan, math.inf, 1.1e100, -1.1e100, [9.0])
            ]
        )
        assert failures(cases, check) == []

    def test_what_is_just_allowed_counts(self):
        best = {"num-examples": MAX_EXAMPLES, "loss": 1e100, "a" * 40: -1e100}
        found, rejected = self.aggregate(best)
        assert dict(found) == {"a" * 40: -1e100, "loss": 1e100} and not rejected

    def test_metrics_are_in_the_order_of_their_names(self):
        found, _ = self.aggregate({"num-examples": 1, "loss": 1.0, "auc": 0.5, "b": 2.0})
        assert list(found) == ["auc", "b", "loss"]

    def test_a_metric_of_half_of_the_clients_is_left_out(self):
        found, _ = self.aggregate({"num-examples": 1, "loss": 1.0, "auc": 0.5}, {"num-examples": 1, "loss": 2.0})
        assert dict(found) == {"loss": 1.5}

    def test_rejections_are_in_the_order_of_nodes(self):
        strategy = NoPrivacyStrategy(all_nodes(evaluate=Sampling(min_nodes=3, timeout=0)))
        grid = grid_of(lambda *_: RecordDict({"metrics": MetricRecord({"num-examples": -1})}), 3)
        messages = strategy.configure_evaluate(1, to_record(zeros()), ConfigRecord(), grid)
        replies = sorted(grid.send_and_receive(messages), key=lambda reply: -reply.metadata.src_node_id)
        strategy.aggregate_evaluate(1, replies)
        assert [rejection.node_id for rejection in strategy.unscored] == [1, 2, 3]

    def test_the_weighted_mean(self):
        found, rejected = self.aggregate(
            {"num-examples": 1, "loss": 1.0}, {"num-examples": 1, "loss": 2.0}, {"num-examples": 2, "loss": 4.0}
        )
        assert found["loss"] == pytest.approx(2.75) and not rejected

    def test_a_metric_that_one_client_lacks_costs_it_nothing_else(self):
        found, rejected = self.aggregate(
            {"num-examples": 1, "loss": 1.0, "auc": 0.5},
            {"num-examples": 1, "loss": 2.0},
            {"num-examples": 1, "auc": 0.7},
        )
        assert dict(found) == {"loss": pytest.approx(1.5), "auc": pytest.approx(0.6)} and not rejected

    def test_no_reply_that_counts(self):
        assert self.aggregate({"loss": 1.0}) == (None, [1])

    def test_nobody_counts_before_anybody_was_asked(self):
        strategy = NoPrivacyStrategy(all_nodes(evaluate=Sampling(min_nodes=1, timeout=0)))
        assert strategy.aggregate_evaluate(1, []) is None and strategy.unscored == ()

    def test_a_metric_that_one_client_invents_is_left_out(self):
        odd = {"num-examples": 1, "loss": 3.0, "mine": 1.0}
        found, _ = self.aggregate(odd, {"num-examples": 1, "loss": 2.0}, {"num-examples": 1, "loss": 4.0})
        assert dict(found) == {"loss": pytest.approx(3.0)}

    def test_one_odd_reply_does_not_kill_the_run(self):
        def check(odd):
            found, rejected = self.aggregate(odd, {"num-examples": 1, "loss": 2.0}, {"num-examples": 1, "loss": 4.0})
            assert dict(found) == {"loss": pytest.approx(3.0)} and rejected == [1]

        cases = [
            {"num-examples": -1, "loss": 9.0},
            {"num-examples": 10**400, "loss": 9.0},
            {"num-examples": 1, "loss": math.nan},
            {"num-examples": 1, "loss": [9.0]},
            {"num-examples": 1, "[/red]": 9.0},
            {"loss": 9.0},
        ]
        assert failures(cases, check) == []


@every_decorator
def test_a_node_that_flower_answers_for(decorator):
    """Flower's reply for a node that is not there comes in the name of the SuperLink; it is charged to the node."""

    def answered_for(replies):
        (lost,) = (reply for reply in replies if reply.metadata.src_node_id == 3)
        error = Error(ErrorCode.NODE_UNAVAILABLE, "node is gone")
        metadata = copy(lost.metadata)
        metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return [reply for reply in replies if reply is not lost] + [Message(error=error, metadata=metadata)]

    strategy = DECORATORS[decorator]()
    one_round(strategy, Misdelivering(answered_for), zeros())
    (rejection,) = strategy.measured.rejected
    found = (rejection.node_id, rejection.code, rejection.detail)
    assert found == (3, "unavailable", "the node is not connected, or its message expired")
    assert strategy.measured.accepted == 2


def test_an_error_in_the_name_of_the_superlink_about_nothing_that_was_asked_is_its_own():
    def about_nothing(replies):
        (last,) = (reply for reply in replies if reply.metadata.src_node_id == 3)
        metadata = copy(last.metadata)
        metadata.__dict__.update(_src_node_id=SUPERLINK_NODE_ID, _reply_to_message_id="another")
        return [*replies, Message(error=Error(ErrorCode.NODE_UNAVAILABLE, "node is gone"), metadata=metadata)]

    strategy = NoPrivacyStrategy(all_nodes())
    one_round(strategy, Misdelivering(about_nothing), zeros())
    (rejection,) = strategy.measured.rejected
    assert rejection.node_id == SUPERLINK_NODE_ID, "which is the number of a node of this grid, too"


def test_nobody_replies_in_the_name_of_the_superlink():
    """Flower answers so for a node that is gone, by an error; a model in that name is nobody's."""

    def renamed(replies):
        (of_three,) = (reply for reply in replies if reply.metadata.src_node_id == 3)
        metadata = copy(of_three.metadata)
        metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        return [*(reply for reply in replies if reply is not of_three), Message(of_three.content, metadata=metadata)]

    strategy = NoPrivacyStrategy(all_nodes())
    one_round(strategy, Misdelivering(renamed), zeros())
    assert strategy.measured.accepted == 2
    assert {rejection.code: rejection.detail for rejection in strategy.measured.rejected} == {
        "sender": "the reply is to no message that this node was sent",
        "missing": "no reply came before the deadline",
    }


def test_a_training_loss_that_is_not_finite_is_left_out():
    def check(loss):
        def lost(loss):
            _, metrics = one_round(
                NoPrivacyStrategy(all_nodes()), grid_of(lambda *_: content(GOOD[0], **{"train-loss": loss}), 2), zeros()
            )
            return metrics

        assert "train-loss" not in lost(loss) and lost(2.0)["train-loss"] == 2.0

    assert failures([math.inf, -math.inf, math.nan], check) == []


def test_what_an_error_says_cannot_steer_a_terminal():
    def answer(node, _):
        raise RuntimeError("\x1b[31mred\x07 and\nmore")

    strategy = NoPrivacyStrategy(all_nodes())
    one_round(strategy, grid_of(answer, 1), zeros())
    detail = strategy.measured.rejected[0].detail
    assert detail.isprintable() and "red" in detail


def test_means_of_scores_are_finite():
    scores = iter([1e100, -1e100, 1e100])
    strategy = NoPrivacyStrategy(all_nodes(evaluate=Sampling(min_nodes=3, timeout=0)))
    grid = grid_of(lambda *_: RecordDict({"metrics": MetricRecord({"num-examples": 10**9, "loss": next(scores)})}), 3)
    messages = strategy.configure_evaluate(1, to_record(zeros()), ConfigRecord(), grid)
    means = strategy.aggregate_evaluate(1, grid.send_and_receive(messages))
    assert not strategy.unscored and all(math.isfinite(value) for value in dict(means).values())


def test_nor_can_any_other_reason():
    """A step of a secure aggregation quoted names that the node had made up, millions of characters of them."""
    grid, rejected = grid_of(lambda *_: content(zeros()), 1), []
    asked = all_nodes().configure_train(1, to_record(zeros()), ConfigRecord(), grid)

    def refuse(_):
        raise Unfit("protocol", "\x1b[2Jround 3: done\n" * 10**5)

    assert list(fitting(grid.send_and_receive(asked), asked, refuse, rejected)) == []
    (found,) = rejected
    assert found.code == "protocol" and len(found.detail) == REASON_LENGTH and found.detail.isprintable()


def test_text_from_elsewhere_is_one_short_line():
    def check(text, shown):
        assert printable(text) == shown

    cases = [
        (" disk\tfull\r\n of logs ", "disk full of logs"),
        ("\x1b[31mred\x07", "?[31mred?"),
        ("a" * (REASON_LENGTH + 1), "a" * REASON_LENGTH),
        (" " * (4 * REASON_LENGTH - 1) + "ab", "a"),
        ("", ""),
    ]
    assert failures(cases, check) == []
