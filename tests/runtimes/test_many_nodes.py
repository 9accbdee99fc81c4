"""Fifty nodes train on one SuperLink, whose state is one SQLite database: all of them fetch and send at once."""

import json
from pathlib import Path

import numpy as np
import pytest
from light_nodes import LightNodes
from open_server import open_server
from processes import SUPERLINK, Setting

from cloister.simulation.simulate import simulate

pytestmark = pytest.mark.runtimes(minutes=1)

NODES, ROUNDS = 50, 2
SECONDS = 600
"""For what takes half a minute on two idle cores."""
SETTINGS: dict[str, Setting] = {
    "task.name": "digits",
    "task.model": "softmax",
    "num-rounds": ROUNDS,
    "seed": 3,
    "round-timeout": 300.0,
    "node-timeout": 300.0,
    "strategy.min-nodes": NODES,
    "evaluation.federated": "off",
    "privacy.server": "none",
    "tensorboard": False,
}


def test_many_nodes_train_as_in_one_process(tmp_path: Path) -> None:
    """No locked database ends anything, every reply counts, and the model is that of a simulation, bit for bit."""
    run, simulated = (SETTINGS | {"output-dir": str(tmp_path), "run-name": name} for name in ("run", "simulated"))
    with open_server(tmp_path, SECONDS) as server:
        with LightNodes(server.address, server.let_in(NODES), server.authority) as nodes:
            server.processes.wait(lambda: len(nodes.connected) == NODES or bool(nodes.errors), SECONDS, "nodes")
            assert not nodes.errors
            server.train(run, SECONDS)
        assert not nodes.errors
        assert "Internal Server Error" not in server.processes.log(SUPERLINK)
    assert list(nodes.answered.values()) == [ROUNDS] * NODES
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()][1:]
    assert [done["measured"]["accepted"] for done in rounds] == [NODES] * ROUNDS
    simulate(simulated, clients=NODES)
    with np.load(tmp_path / "run" / "model.npz") as found, np.load(tmp_path / "simulated" / "model.npz") as wanted:
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name, strict=True)
