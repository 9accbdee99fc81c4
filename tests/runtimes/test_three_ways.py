"""One app, several runtimes: the same seed gives the same model in each of them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from federations import assert_fails_in_one_line
from numpy.typing import NDArray
from processes import Processes, Setting

pytestmark = pytest.mark.runtimes(minutes=1)

CLIENTS = 3  # the sum of two would not depend on their order
PATIENCE = 400
"""Seconds a runtime may take. In the deployment some messages import TensorFlow."""
SETTINGS: dict[str, Setting] = {
    "num-rounds": 2,
    "seed": 7,
    "task.name": "digits",
    "task.model": "mlp",
    "strategy.name": "fedavg",
    "strategy.min-nodes": CLIENTS,  # SuperNodes connect when they are ready: the first round waits for the last one
    "privacy.server": "none",
    "evaluation.federated": "off",
}
IN_PROCESS = (
    "import json, sys; from cloister.simulation.simulate import simulate; simulate(json.loads(sys.argv[1]), {})"
)
# Two actors on any machine, so that replies may come in any order.
RAY = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"


def in_process(processes: Processes, settings: dict[str, Setting]) -> None:
    """A fresh process, so that no other test has changed how TensorFlow computes."""
    processes.run("python", sys.executable, "-c", IN_PROCESS.format(CLIENTS), json.dumps(settings), seconds=PATIENCE)


def simulation(processes: Processes, settings: dict[str, Setting]) -> None:
    processes.flwr_run(settings, "--federation-config", RAY, seconds=PATIENCE)


def deployment(processes: Processes, settings: dict[str, Setting]) -> None:
    """One node starts a client for each message; the clients of the others are warm."""
    processes.superlink()
    nodes: list[dict[str, Setting]] = [{"partition-id": number, "num-partitions": CLIENTS} for number in range(CLIENTS)]
    processes.supernodes(nodes[:1])
    processes.supernodes(nodes[1:], "cloister", "warm-node", first=1)
    processes.flwr_run(settings, seconds=PATIENCE)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """A SuperLink that simulates its nodes."""
    with Processes(tmp_path_factory.mktemp("simulation"), shortened=True) as processes:
        processes.superlink("--simulation")
        yield processes


def final_model(
    runtime: Callable[[Processes, dict[str, Setting]], None], folder: Path, processes: Processes
) -> dict[str, NDArray[np.float32]]:
    """The model after the last round, as the runtime left it in its run directory."""
    name = runtime.__name__
    runtime(processes, SETTINGS | {"output-dir": str(folder / "runs"), "run-name": name})
    directory = folder / "runs" / name
    assert directory.joinpath("model.keras").is_file(), "the run did not finish"
    with np.load(directory / "checkpoints" / "round-00002.npz") as archive:
        return dict(archive)


def test_the_final_model_is_the_same_in_every_runtime(simulated: Processes, tmp_path: Path) -> None:
    """All are bitwise equal.

    Nothing that differs between the runtimes reaches a number: replies are aggregated in the order of their contents,
    not of their arrival; a client's seed is that of its partition, not of its process; and batches of this size are
    multiplied by one thread, so it does not matter that Ray gives an actor fewer of them (1 and 2 intra-op threads
    give the same bits). What would matter is the instruction set (`TF_ENABLE_ONEDNN_OPTS=0` moves weights by 4e-7),
    and that is the same for all processes of one machine.
    """
    with Processes(tmp_path / "processes", shortened=True) as processes:
        wanted = final_model(in_process, tmp_path, processes)
        deployed = final_model(deployment, tmp_path, processes)
    for runtime, found in (("deployment", deployed), ("simulation", final_model(simulation, tmp_path, simulated))):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{runtime}: {name}", strict=True)
    directory = tmp_path / "runs" / "deployment"
    bundle = json.loads((directory / "config.json").read_text())["bundle-sha256"]
    assert len(bundle) == 64 and bundle in (directory / "report.html").read_text()


def test_an_error_of_configuration_is_one_line_and_the_simulation_has_failed(
    simulated: Processes, tmp_path: Path
) -> None:
    settings: dict[str, Setting] = {"strategy.momentum": 0.5, "output-dir": str(tmp_path / "runs")}
    federation = "num-supernodes=2 init-args-log-to-driver=false"
    assert_fails_in_one_line(simulated, settings, "--federation-config", federation)
    assert not (tmp_path / "runs").exists()
