"""A deployed run whose server app or executor is killed goes on, without a hand or by one command."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from processes import CONNECTION, WARM_NODE, Processes, Setting

from cloister.simulation.simulate import simulate

pytestmark = pytest.mark.runtimes(minutes=1)

SECONDS = 240
"""For what takes some ten to sixty on two idle cores."""
SETTINGS: dict[str, Setting] = {
    "task.name": "linear",
    "task.test-fraction": 0.0,
    "strategy.name": "fedadam",
    "strategy.fraction-evaluate": 0.0,
    "strategy.min-nodes": 2,
    "privacy.server": "none",
    "num-rounds": 4,
    "seed": 1,
    "tensorboard": False,
}


def lines(directory: Path) -> list[int]:
    path = directory / "rounds.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line)["round"] for line in whole]


def resumed_by_flwr_run(processes: Processes, folder: Path) -> None:
    """Resume a run by hand under an executor that starts no app again."""
    run = folder / "by-hand"
    settings = SETTINGS | {"output-dir": str(folder), "run-name": "by-hand", "num-rounds": 5}
    processes.kill("superexec")
    processes.start("executor", "flower-superexec", "--insecure", "--runtime-api-address", processes.address)
    processes.flwr_begin(settings, SECONDS)
    processes.wait(lambda: 1 in lines(run), SECONDS, "round 1")
    (server,) = processes.pids("flwr-serverapp")
    os.kill(server, signal.SIGKILL)
    processes.flwr_run(settings | {"resume": str(run)}, seconds=SECONDS)
    assert lines(run) == [0, 1, 2, 3, 4, 5] and (run / "model.npz").exists()


def test_a_run_whose_server_app_or_executor_is_killed_goes_on_without_a_hand_or_by_flwr_run(tmp_path: Path) -> None:
    """Once each, and it is the same run to Flower. A simulation, which nothing disturbs, ends with the same model."""
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink("--isolation", "process")
        options = ["--resume", "2", "--tasks", "tasks", "--insecure", "--runtime-api-address", processes.address]
        processes.start("superexec", "cloister", "superexec", *options)
        configs: list[dict[str, Setting]] = [{"partition-id": number, "num-partitions": 2} for number in range(2)]
        processes.supernodes(configs, *WARM_NODE)
        processes.flwr_begin(SETTINGS | {"output-dir": str(tmp_path), "run-name": "disturbed"}, SECONDS)
        processes.wait(lambda: 1 in lines(disturbed), SECONDS, "round 1")
        (server,) = processes.pids("serverapp.py")
        os.kill(server, signal.SIGKILL)
        processes.wait(lambda: 2 in lines(disturbed), SECONDS, "round 2")
        processes.kill("superexec")
        processes.wait(lambda: not processes.pids("serverapp.py"), SECONDS, "death of the executor's app")
        processes.restart("superexec")
        processes.wait(lambda: (disturbed / "model.npz").exists(), SECONDS, "model")
        processes.wait(lambda: not processes.pids("serverapp.py"), SECONDS, "end of the server app")
        told = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
        assert [found["status"] for found in told] == ["finished:completed"]
        resumed_by_flwr_run(processes, tmp_path)
    simulate(SETTINGS | {"output-dir": str(tmp_path), "run-name": "whole"}, clients=2)
    assert lines(disturbed) == lines(whole) == [0, 1, 2, 3, 4]
    assert len(json.loads((disturbed / "config.json").read_text())["resumed-after"]) == 2
    with np.load(disturbed / "model.npz") as one, np.load(whole / "model.npz") as other:
        for name in other:
            np.testing.assert_array_equal(one[name], other[name])
