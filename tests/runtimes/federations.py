"""Helpers for tests of federations: settings of a run that goes on until it is stopped, and its files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from processes import CONNECTION, Processes, Setting

SECONDS = 240
"""For what takes some ten to sixty on two idle cores."""
SETTINGS: dict[str, Setting] = {
    "task.name": "digits",
    "task.model": "softmax",  # needs no TensorFlow: a client starts in a second
    "num-rounds": 100,  # until it is stopped
    "strategy.min-nodes": 2,
    "round-timeout": 120.0,  # a killed node is missed long before
    "node-timeout": 120.0,
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
}


def node(number: int, of: int, folder: Path, **more: Setting) -> dict[str, Setting]:
    budget = {"ledger-dir": str(folder / f"budget-{number}")}
    return {"partition-id": number, "num-partitions": of} | budget | more


def rounds(directory: Path) -> list[dict[str, Any]]:
    """The finished rounds after the initial model."""
    path = directory / "rounds.jsonl"
    # A line that is being written has no end yet.
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole][1:]


def accepted(directory: Path) -> list[int]:
    return [done["measured"]["accepted"] for done in rounds(directory)]


def assert_left_whole(directory: Path) -> None:
    """The newest model is the last finished round's, and the claim speaks of as many rounds as the ledger."""
    finished = len(rounds(directory))
    newest = directory / "checkpoints" / f"round-{finished:05d}.npz"
    with np.load(directory / "model.npz") as model, np.load(newest) as last:
        for name in last:
            np.testing.assert_array_equal(model[name], last[name])
    assert json.loads((directory / "privacy.json").read_text())["rounds"] == finished
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    assert max(line["round"] for line in ledger if "round" in line) == finished


def assert_fails_in_one_line(processes: Processes, settings: dict[str, Setting], *options: str) -> None:
    """`flwr run` shows one line for an error of the configuration, and Flower lists the run as failed.

    Args:
        processes: a SuperLink.
        settings: of a run with `strategy.momentum` = 0.5.
        options: of `flwr run`.
    """
    processes.folder.joinpath("flwr.log").unlink(missing_ok=True)
    processes.flwr_run(settings, *options, seconds=SECONDS)
    said = processes.log("flwr")
    (line,) = (line for line in said.splitlines() if "strategy.momentum" in line)
    assert "ConfigError: strategy.momentum = 0.5 is not an option of 'fedavg'" in line
    assert "Traceback" not in said and "File " not in said, said
    runs = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
    assert [run["status"] for run in runs].count("finished:failed") == 1
