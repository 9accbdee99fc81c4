"""Messages of a server, requests as the door makes them, and nodes with data and a policy of their own."""

import json
from pathlib import Path
from uuid import uuid4

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from cloister.client.app import app
from cloister.client.node import Node
from cloister.client.request import TrainRequest, promised
from cloister.config.run import parse
from cloister.flower.messages import assume_run
from cloister.privacy.accounting.ledger import Ledger
from cloister.utils.arrays import from_record, to_record

SOFTMAX = {"softmax/kernel": np.zeros((64, 10), np.float32), "softmax/bias": np.zeros(10, np.float32)}
"""A server's settings for softmax regression on digits."""
P = sum(array.size for array in SOFTMAX.values())
BASE = {"task.model": "softmax", "task.test-fraction": 0.0, "client.local-epochs": 1, "client.batch-size": 10}
OPEN = BASE | {"privacy.server": "none"}
GLOBAL = BASE | {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
METRIC = BASE
LAPLACE = OPEN | {"privacy.client": "laplace", "privacy.laplace-noise-multiplier": 5.0}
BALL = LAPLACE | {"privacy.radius": 2.0}
GAUSSIAN = OPEN | {"privacy.client": "gaussian", "privacy.gaussian-noise-multiplier": 2.0}
DP_SGD = OPEN | {"privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 1.0}
CLUSTERED = BASE | {"privacy.server": "laplace-clustering"}
CHOICE = {"privacy.server": "laplace-clustering", "privacy.clusters": 2, "privacy.choice-epsilon": 0.5}
SIZED = {"partition-id": 0, "num-partitions": 4}
"""A simulated client whose share of the data is known."""
MECHANISMS = {"dp-sgd": DP_SGD, "gaussian": GAUSSIAN, "laplace": LAPLACE | {"privacy.radius": 1.0}}
"""Runs that a node protects itself in, with a bounded update."""


def message_of(arrays=SOFTMAX, kind="train", record=None, ttl=None, **fields):
    """A message as the server would send it; `record` replaces its settings."""
    assume_run()
    settings = {"server-round": 1, "seed": 3} if record is None else record
    more = {name.replace("_", "-"): value for name, value in fields.items()}
    content = RecordDict({"arrays": to_record(arrays), "config": ConfigRecord(settings | more)})
    message = Message(content, 1, kind, ttl=ttl)
    message.metadata.__dict__["_message_id"] = str(uuid4())
    return message


def gaussians(*multipliers):
    """Gaussian releases as a server says them, whatever the numbers."""
    return [json.dumps({"kind": "gaussian", "noise_multiplier": z}) for z in multipliers]


def context_of(settings=OPEN, node=None, node_id=1):
    """Of a node in a run with these settings; `node` is its configuration, by default a simulated client's."""
    configured = {"partition-id": 0, "num-partitions": 4} if node is None else node
    return Context(1, node_id, dict(configured), RecordDict(), dict(settings))


def node_at(settings=OPEN, node=None, node_id=1):
    """The node as the door finds it, with its configuration and its policy read."""
    return Node.of(context_of(settings, node, node_id))


def request_of_kind(kind=TrainRequest, settings=OPEN, models=(SOFTMAX,), number=1, run="1", **more):
    """Return the request that a node parses from a message."""
    if kind is TrainRequest:
        more = {"promise": promised({})} | more
    return kind(parse(settings).for_clients, run, number, 3, tuple(models), **more)


def answer(settings, node, message=None, node_id=1):
    """The reply of the whole app."""
    return app(message or message_of(), context_of(settings, node, node_id))


def arrays_of(reply):
    """The model in a reply."""
    assert not reply.has_error(), reply.error.reason
    return from_record(reply.content.array_records["arrays"])


def write_data(folder, count=40, seed=0, name="data.npz", **changes):
    """A node's own file of digits; `changes` replace arrays."""
    rng = np.random.default_rng(seed)
    arrays = {"x": rng.random((count, 64), np.float32), "y": rng.integers(0, 10, count)}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, **(arrays | changes))
    return folder / name


def own_node(folder, data=None, **configured):
    """The configuration of a node with data of its own, which states a size of 40."""
    folder.mkdir(parents=True, exist_ok=True)
    node = {"data-path": str(data or write_data(folder)), "ledger-dir": str(folder / "ledgers"), "public-size": 40}
    return node | {name.replace("_", "-"): value for name, value in configured.items()}


def policy_file(folder, **changes):
    """A policy that allows digits under server-side noise, with changes; None removes a key."""
    keys = {"mechanisms": ["global-dp", "metric"], "tasks": ["digits"], "min_server_noise_multiplier": 1e-6}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "policy.toml"
    lines = [
        f"{key.replace('_', '-')} = {_toml(value)}" for key, value in (keys | changes).items() if value is not None
    ]
    path.write_text("\n".join(lines))
    return path


def _toml(value):
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def ledger_of_node(node):
    """The one ledger in a node's folder, read anew from the disk."""
    (path,) = Path(node["ledger-dir"]).glob("*.jsonl")
    return Ledger(path)


def entries_of(node, unit):
    """Return a unit's entries in a node's ledger."""
    return [entry for entry in ledger_of_node(node).entries if entry.unit == unit]
