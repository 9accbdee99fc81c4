"""Two warm nodes that train a task in PyTorch with DP-SGD, on a machine without TensorFlow."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_new import installed

torch = pytest.importorskip("torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtimes"))
from processes import Processes  # noqa: E402

from cloister.privacy.accounting.account import Account  # noqa: E402
from cloister.privacy.accounting.ledger import Ledger  # noqa: E402

SECONDS = 240
BUDGET = 10.0
"""Epsilon of each example, enough for three rounds."""
ABSENT = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)\n"
POLICY = 'mechanisms = ["dp-sgd"]\ntasks = ["ward"]\nmin-dp-sgd-noise-multiplier = 0.9\n'
SETTINGS = {
    "task.name": "ward",
    "strategy.min-nodes": 2,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "client.batch-size": 32,
    "client.local-epochs": 2,
}


def lines(path):
    """Return the finished lines of a file of JSON lines."""
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole]


def rounds(run):
    """Return the lines of the rounds after the initial model."""
    return lines(run / "rounds.jsonl")[1:]


def refusals(line):
    return [each["detail"] for each in line["measured"]["rejected"]]


def wait_for_end(processes, run):
    """Wait until the model is saved, and the server app has ended."""
    processes.wait(lambda: (run / "model.safetensors").exists(), SECONDS, "model")
    processes.wait(lambda: not processes.pids("serverapp.py"), SECONDS, "end of the server app")


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """A run below the sites' minimum of noise, then one whose server app is killed, until the budgets are spent."""
    folder = tmp_path_factory.mktemp("sites")
    made, absent = installed(folder, "task", "csv", "torch", name="ward"), folder / "absent"
    absent.mkdir()
    for package in ("tensorflow", "keras"):
        (absent / f"{package}.py").write_text(ABSENT)
    (folder / "policy.toml").write_text(POLICY)
    path = os.pathsep.join([str(absent), str(made), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch, Processes(folder / "processes", shortened=True) as processes:
        patch.setenv("PYTHONPATH", path)
        processes.superlink("--isolation", "process", "--disable-runtime-dependency-installation")
        options = ["--resume", "1", "--tasks", "tasks", "--insecure", "--runtime-api-address", processes.address]
        processes.start("superexec", "cloister", "superexec", *options)
        site = {"public-size": 200, "max-example-epsilon": BUDGET, "policy": str(folder / "policy.toml")}
        ledgers = [folder / f"ledgers-{name}" for name in "ab"]
        configs = [
            site | {"data-path": str(made / f"site-{name}.csv"), "ledger-dir": str(ledger)}
            for name, ledger in zip("ab", ledgers, strict=True)
        ]
        processes.supernodes(configs, "cloister", "warm-node")
        nodes = [f"supernode-{number}" for number in range(2)]
        processes.wait(lambda: all("warm:" in processes.log(name) for name in nodes), SECONDS, "warm nodes")
        memory = [Path(f"/proc/{processes.services[name].pid}/maps").read_text() for name in nodes]
        weak, killed = folder / "weak", folder / "killed"
        processes.flwr_begin(settings_of(weak, 0.5), SECONDS)
        wait_for_end(processes, weak)
        untouched = not any(ledger.exists() for ledger in ledgers)
        processes.flwr_begin(settings_of(killed, 1.0), SECONDS)
        processes.wait(lambda: bool(rounds(killed)), SECONDS, "round 1")
        (server,) = processes.pids("serverapp.py")
        os.kill(server, signal.SIGKILL)
        wait_for_end(processes, killed)
    found = [Ledger(path).entries for ledger in ledgers for path in ledger.glob("*.jsonl")]
    entries = [[entry for entry in each if entry.unit == "example"] for each in found]
    return SimpleNamespace(weak=weak, killed=killed, untouched=untouched, entries=entries, memory=memory)


def settings_of(run, noise):
    """Return the settings of a run of more rounds than the budgets last."""
    own = {"privacy.dp-sgd-noise-multiplier": noise, "num-rounds": 30}
    return SETTINGS | own | {"output-dir": str(run.parent), "run-name": run.name}


def test_a_site_refuses_a_run_that_its_policy_does_not_allow(sites):
    (first, *_) = rounds(sites.weak)
    reason = "privacy.dp-sgd-noise-multiplier = 0.5, demanded: at least 0.9"
    assert [reason in each for each in refusals(first)] == [True, True]
    assert sites.untouched, "a refused round was charged"


def test_a_killed_run_goes_on_and_claims_every_round(sites):
    config = json.loads((sites.killed / "config.json").read_text())
    assert len(config["resumed-after"]) == 1
    numbers = [line["round"] for line in rounds(sites.killed)]
    assert numbers == list(range(1, len(numbers) + 1))
    claim = json.loads((sites.killed / "privacy.json").read_text())["clients"]
    assert claim["by-examples"][0]["claims"][0]["unit"] == "example"


def test_budgets_end_the_run_with_its_model_saved(sites):
    first, *_, last = rounds(sites.killed)
    assert first["measured"]["accepted"] == 2
    assert ["BudgetExhausted" in each for each in refusals(last)] == [True, True]
    model = safetensors_numpy.load_file(sites.killed / "model.safetensors")
    with np.load(max((sites.killed / "checkpoints").glob("*.npz"))) as checkpoint:
        np.testing.assert_equal(model, dict(checkpoint))


def test_a_nodes_ledger_goes_on_after_the_kill_and_stays_within_the_budget(sites):
    for entries in sites.entries:
        charged = [entry.round for entry in entries]
        assert charged == sorted(charged) and charged[0] == 1 and charged[-1] >= 2, charged
        assert Account(entry.event for entry in entries).epsilon(1e-5) <= BUDGET


def test_a_nodes_process_holds_pytorch_and_no_tensorflow(sites):
    assert [("libtorch" in maps, "tensorflow" in maps) for maps in sites.memory] == [(True, False)] * 2
