"""Replies to a scoring round are read one by one: a node may put into its own what nobody reads."""

import gc
import weakref

import numpy as np
import pytest
from flwr.app import Message, MessageType, MetricRecord, RecordDict

from cloister.flower.messages import assume_run
from cloister.server.round import RoundLoop
from cloister.server.screening import average_metrics
from cloister.utils.arrays import to_record
from cloister.utils.wire import ARRAYS, METRICS

NODES = 20
MODEL = to_record({"kernel": np.zeros(1000, np.float32)})


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


class Grid:
    """Every node replies with scores and with arrays; counts how many of these are there at once."""

    def __init__(self):
        self.made, self.most = [], 0

    def send_and_receive(self, messages, timeout=None):
        for message in messages:
            arrays = to_record({"unread": np.ones(1000, np.float32)})
            self.made.append(weakref.ref(arrays))
            self.most = max(self.most, sum(each() is not None for each in self.made))
            scores = MetricRecord({"num-examples": 2, "loss": float(message.metadata.dst_node_id)})
            reply = Message(RecordDict({METRICS: scores, ARRAYS: arrays}), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            del arrays
            yield reply
            del reply


class Strategy:
    def configure_evaluate(self, number, arrays, config, grid):
        content = RecordDict({ARRAYS: arrays})
        self.asked = [Message(content, node, MessageType.EVALUATE) for node in range(1, NODES + 1)]
        return self.asked

    def aggregate_evaluate(self, number, replies):
        return average_metrics(replies, self.asked)[0]


@pytest.mark.usefixtures("no_collection")
def test_one_is_gone_before_the_next_is_made():
    assume_run()
    grid, kept = Grid(), []
    loop = RoundLoop(
        grid=grid,
        strategy=Strategy(),
        model=MODEL,
        score=None,
        observers=[],
        public={},
        timeout=60.0,
        judged_by_clients=True,
        answered=lambda: kept.append(len(grid.made)),
    )
    assert loop._evaluate_on_clients(1) == {"loss": (NODES + 1) / 2}
    assert len(grid.made) == NODES and grid.most <= 2
    assert kept == [NODES], "the memory of nodes is kept once all have answered"
