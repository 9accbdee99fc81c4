"""One app, several runtimes: the same seed gives the same model in each of them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from processes import Processes, Setting
from sklearn.datasets import load_digits

CLIENTS = 3  # the sum of two would not depend on their order
SITES = 2
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
IN_PROCESS = "import json, sys; from cloister.local.simulation import simulate; simulate(json.loads(sys.argv[1]), {})"
# Two actors on any machine, so that replies may come in any order.
RAY = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus=2"


def in_process(processes: Processes, settings: dict[str, Setting]) -> None:
    """A fresh process, so that no other test has changed how TensorFlow computes."""
    processes.run("python", sys.executable, "-c", IN_PROCESS.format(CLIENTS), json.dumps(settings), seconds=PATIENCE)


def simulation(processes: Processes, settings: dict[str, Setting]) -> None:
    processes.superlink("--simulation")
    processes.flwr_run(settings, "--federation-config", RAY, seconds=PATIENCE)


def deployment(processes: Processes, settings: dict[str, Setting]) -> None:
    """One node starts a client for each message; the clients of the others are warm."""
    processes.superlink()
    nodes: list[dict[str, Setting]] = [{"partition-id": number, "num-partitions": CLIENTS} for number in range(CLIENTS)]
    processes.supernodes(nodes[:1])
    processes.supernodes(nodes[1:], "cloister", "warm-node", first=1)
    processes.flwr_run(settings, seconds=PATIENCE)


def final_model(
    runtime: Callable[[Processes, dict[str, Setting]], None], folder: Path
) -> dict[str, NDArray[np.float32]]:
    """The model after the last round, as the runtime left it in its run directory."""
    name = runtime.__name__
    with Processes(folder / name, shortened=True) as processes:
        runtime(processes, SETTINGS | {"output-dir": str(folder / "runs"), "run-name": name})
        directory = folder / "runs" / name
        assert directory.joinpath("model.keras").is_file(), "the run did not finish"
        with np.load(directory / "checkpoints" / "round-00002.npz") as archive:
            return dict(archive)


@pytest.mark.runtimes
def test_the_final_model_is_the_same_in_every_runtime(tmp_path: Path) -> None:
    """All are bitwise equal.

    Nothing that differs between the runtimes reaches a number: replies are aggregated in the order of their contents,
    not of their arrival; a client's seed is that of its partition, not of its process; and batches of this size are
    multiplied by one thread, so it does not matter that Ray gives an actor fewer of them (1 and 2 intra-op threads
    give the same bits). What would matter is the instruction set (`TF_ENABLE_ONEDNN_OPTS=0` moves weights by 4e-7),
    and that is the same for all processes of one machine.
    """
    wanted = final_model(in_process, tmp_path)
    for runtime in (simulation, deployment):
        found = final_model(runtime, tmp_path)
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{runtime.__name__}: {name}", strict=True)


@pytest.mark.runtimes
def test_nodes_train_on_files_of_their_own(tmp_path: Path) -> None:
    paths = write_sites(tmp_path)
    settings = SETTINGS | {"num-rounds": 1, "task.model": "softmax", "strategy.min-nodes": SITES}
    with Processes(tmp_path / "deployment", shortened=True) as processes:
        processes.superlink()
        processes.supernodes([{"data-path": str(path)} for path in paths])
        processes.flwr_run(settings | {"output-dir": str(tmp_path), "run-name": "run"}, seconds=PATIENCE)
        first, last = (json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
        bundle = json.loads((tmp_path / "run" / "config.json").read_text())["bundle-sha256"]
        assert len(bundle) == 64 and bundle in (tmp_path / "run" / "report.html").read_text()
    assert (last["round"], last["measured"]["accepted"], last["measured"]["rejected"]) == (1, SITES, [])
    assert last["central"]["accuracy"] > first["central"]["accuracy"] + 0.3


def write_sites(folder: Path) -> list[Path]:
    """A file for each site, with its own part of the digits."""
    pixels, labels = load_digits(return_X_y=True)
    paths = [folder / f"site-{number}.npz" for number in range(SITES)]
    for number, path in enumerate(paths):
        np.savez(path, x=(pixels[number::SITES] / 16).astype(np.float32), y=labels[number::SITES])
    return paths
