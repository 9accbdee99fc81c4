"""Rounds of secure aggregation on a grid in this process; its nodes run the app, with updates of the test's choice."""

import numpy as np
from flwr.app import ConfigRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

from cloister.client.app import answered_by
from cloister.client.request import ProtocolRequest, Reply, TrainRequest
from cloister.client.secure import take_part
from cloister.config.run import parse
from cloister.server.build import build
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import to_record
from cloister.utils.wire import CONFIG, SECURE_STEP

MODEL = {"softmax/kernel": np.zeros((64, 10), np.float32), "softmax/bias": np.zeros(10, np.float32)}
"""Of softmax regression on digits."""
PHASES = ("advertise", "share", "mask", "sign", "unmask")


def settings(folder, clients=5, threshold=4, colluding=0, z=1.0, **more):
    """The settings of a run with secure aggregation."""
    return {
        "output-dir": str(folder),
        "task.model": "softmax",
        "num-rounds": 1,
        "strategy.min-nodes": clients,
        "privacy.server": "global-dp",
        "privacy.noise-multiplier": z,
        "privacy.clipping-norm": 1.0,
        "secure-aggregation.enabled": True,
        "secure-aggregation.threshold": threshold,
        "secure-aggregation.colluding": colluding,
        **more,
    }


def phase_of(message):
    """Return the step of a round that a message asks for."""
    return message.content.config_records[CONFIG].get(SECURE_STEP, "mask")


def app_with(updates, gone=None):
    """The app, whose node number i has `updates[i - 1]` to give; `gone` says before which phase a node is lost."""

    def train(request, node):
        update = updates[node.id - 1]
        return Reply({name: array + update[name] for name, array in request.models[0].items()})

    inner = ClientApp()
    inner.train()(answered_by(TrainRequest, train))
    inner.query("secure")(answered_by(ProtocolRequest, take_part))
    last = {node: PHASES.index(phase) for node, phase in (gone or {}).items()}

    def app(message, context):
        if PHASES.index(phase_of(message)) >= last.get(context.node_id, len(PHASES)):
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=message)
        return inner(message, context)

    return app


def random_updates(clients, seed=0, scale=0.05):
    rng = np.random.default_rng(seed)
    return [{name: rng.normal(0, scale, a.shape).astype(a.dtype) for name, a in MODEL.items()} for _ in range(clients)]


class SecureRun:
    """A run whose rounds are driven one by one.

    Attributes:
        strategy: decorated.
        asked, answered: every message and reply, in their order.
    """

    def __init__(self, keys, updates, gone=None, nodes=None, app=None):
        clients = len(updates)
        self.config = parse(keys)
        self.plan = build(self.config)
        self.strategy = self.plan.strategy
        self.plan.budget.begin("test")
        nodes = nodes or [{"partition-id": number, "num-partitions": clients} for number in range(clients)]
        self.grid = LocalGrid(app or app_with(updates, gone), self.config.flat(), nodes)
        self.asked, self.answered = [], []

    def messages(self, number=1):
        return self.strategy.configure_train(number, to_record(MODEL), ConfigRecord({"seed": 3}), self.grid)

    def send(self, asked):
        asked = list(asked)
        self.asked += asked
        for reply in self.grid.send_and_receive(asked):
            self.answered.append(reply)
            yield reply

    def collect(self, number=1):
        return self.strategy.collect(number, self.messages(number), self.send)

    def spent(self):
        """The events in the server's ledger."""
        return [entry.event for entry in self.plan.budget.ledger.entries]
