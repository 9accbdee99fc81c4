"""What may leave a site, and what an error may say."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from support import content, zeros

from cloister.client.data import local_data
from cloister.client.mods import contain_errors, only_what_is_agreed
from cloister.client.plan import PublicSettings
from cloister.core.arrays import to_record
from cloister.core.config import TaskConfig
from cloister.core.errors import BudgetExhausted, CloisterError, ConfigError, DataError, FederationError
from cloister.core.identity import assume_run

PRIVATE = {"task.model": "softmax"}
OPEN = PRIVATE | {"privacy.server": "none"}


def message_of(kind):
    assume_run()
    return Message(RecordDict({"arrays": to_record(zeros()), "config": ConfigRecord({"server-round": 1})}), 1, kind)


def context_of(settings):
    return Context(1, 1, {}, RecordDict(), settings)


def answered(kind, settings, reply):
    message = message_of(kind)
    return only_what_is_agreed(message, context_of(settings), lambda *_: Message(reply, reply_to=message))


def test_a_private_training_reply_is_arrays_alone():
    leaky = content(zeros(), 17, loss=0.5)
    leaky["notes"] = ConfigRecord({"hospital": "north"})
    left = answered("train", PRIVATE, leaky).content
    assert set(left) == {"arrays", "metrics"} and not dict(left["metrics"])


def test_an_open_training_reply_keeps_its_metrics():
    left = answered("train", OPEN, content(zeros(), 17, loss=0.5)).content
    assert dict(left["metrics"]) == {"num-examples": 17, "loss": 0.5}


def test_scores_leave_only_where_they_were_asked_for():
    scores = RecordDict({"metrics": MetricRecord({"num-examples": 3, "loss": 0.1})})
    assert dict(answered("evaluate", OPEN, scores).content["metrics"])
    refused = contain_errors(
        message_of("evaluate"),
        context_of(PRIVATE),
        lambda message, context: only_what_is_agreed(message, context, lambda *_: Message(scores, reply_to=message)),
    )
    assert refused.has_error() and "may not leave" in refused.error.reason


@pytest.mark.parametrize("kind", ["query.other", "train.other"])
def test_what_cannot_be_classified_does_not_leave(kind):
    with pytest.raises(CloisterError, match="may not leave"):
        answered(kind, OPEN, content(zeros()))


def test_nothing_leaves_in_answer_to_a_query():
    reply = answered("query", OPEN, content(zeros()))
    assert not reply.has_error() and not list(reply.content)


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_an_unexpected_error_leaves_as_its_type_only():
    reply = contain_errors(message_of("train"), context_of(OPEN), raising(KeyError("patient 4711")))
    assert reply.error.reason.startswith("KeyError") and "4711" not in reply.error.reason


@pytest.mark.parametrize("error", [ConfigError("no key"), BudgetExhausted("spent")])
def test_our_own_errors_are_told(error):
    reply = contain_errors(message_of("train"), context_of(OPEN), raising(error))
    assert reply.error.reason == f"{type(error).__name__}: {error}"


def test_what_is_wrong_with_data_stays_with_the_node():
    reply = contain_errors(message_of("train"), context_of(OPEN), raising(DataError("37 rows in /wards/north.npz")))
    assert reply.error.reason == "DataError: details are in the log of the node"


class TestLocalData:
    def test_a_partition(self):
        parts = [
            local_data(TaskConfig(model="softmax"), {"partition-id": i, "num-partitions": 4}, seed=5) for i in range(4)
        ]
        sizes = [len(part.train) + len(part.test) for part in parts]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) > 1400
        assert all(abs(len(part.test) / (len(part.train) + len(part.test)) - 0.2) < 0.03 for part in parts)

    def test_a_file_of_the_nodes_own(self, tmp_path):
        rng = np.random.default_rng(0)
        np.savez(tmp_path / "own.npz", x=rng.random((30, 64), np.float32), y=rng.integers(0, 10, 30))
        data = local_data(TaskConfig(test_fraction=0.0), {"data-path": str(tmp_path / "own.npz")}, seed=5)
        assert len(data.train) == 30 and len(data.test) == 0

    @pytest.mark.parametrize(
        ("arrays", "says"),
        [
            ({"x": np.zeros((3, 63)), "y": np.zeros(3, int)}, r"shape \(64,\), found \(63,\)"),
            ({"x": np.zeros((3, 64)), "y": np.full(3, 10)}, "labels from 0 to 9"),
            ({"x": np.zeros((3, 64)), "y": np.full(3, -1)}, "labels from 0 to 9"),
            ({"x": np.full((3, 64), np.nan), "y": np.zeros(3, int)}, "NaN"),
            ({"x": np.zeros((3, 64)), "y": np.zeros(3)}, "integer labels"),
            ({"x": np.zeros((3, 64)), "y": np.zeros(4, int)}, "3 inputs but 4 targets"),
            ({"x": np.zeros((3, 64))}, "arrays x"),
        ],
    )
    def test_a_file_that_is_not_what_the_task_reads(self, tmp_path, arrays, says):
        np.savez(tmp_path / "own.npz", **arrays)
        with pytest.raises(DataError, match=says):
            local_data(TaskConfig(), {"data-path": str(tmp_path / "own.npz")}, seed=5)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short"])
    def test_a_file_that_is_no_archive(self, tmp_path, content):
        (tmp_path / "own.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"must be an \.npz file"):
            local_data(TaskConfig(), {"data-path": str(tmp_path / "own.npz")}, seed=5)

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(DataError, match="no file at"):
            local_data(TaskConfig(), {"data-path": str(tmp_path / "none.npz")}, seed=5)

    @pytest.mark.parametrize("node", [{}, {"partition-id": 1}, {"num-partitions": 2}])
    def test_a_node_without_data(self, node):
        with pytest.raises(ConfigError, match="must hold 'data-path', or 'partition-id' and 'num-partitions'"):
            local_data(TaskConfig(), node, seed=5)

    def test_a_partition_that_is_none(self):
        with pytest.raises(ConfigError, match="partition-id = 4 must be at least 0 and below num-partitions = 4"):
            local_data(TaskConfig(), {"partition-id": 4, "num-partitions": 4}, seed=5)


@pytest.mark.parametrize(
    "record", [{}, {"server-round": 1}, {"server-round": "1", "seed": 2}, {"server-round": 1, "seed": -2}]
)
def test_a_message_without_the_public_settings(record):
    with pytest.raises(FederationError, match="must carry"):
        PublicSettings.of(ConfigRecord(record))
