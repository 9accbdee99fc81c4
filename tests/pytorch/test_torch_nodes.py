"""Two warm nodes that train a task in PyTorch, on a machine without TensorFlow."""

import json
import os
import sys
from pathlib import Path

import pytest
from test_new import installed

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtimes"))
from processes import Processes  # noqa: E402

SECONDS = 240
ABSENT = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)\n"
SETTINGS = {
    "task.name": "ward",
    "num-rounds": 2,
    "strategy.min-nodes": 2,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 1.0,
    "client.batch-size": 32,
    "run-name": "r",
}


def test_two_sites_train_with_dp_sgd_and_claim_it(tmp_path, monkeypatch):
    made, absent = installed(tmp_path, "task", "csv", "torch", name="ward"), tmp_path / "absent"
    absent.mkdir()
    for package in ("tensorflow", "keras"):
        (absent / f"{package}.py").write_text(ABSENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent), str(made), os.environ.get("PYTHONPATH", "")]))
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink("--disable-runtime-dependency-installation")
        sites = [{"data-path": str(made / f"site-{name}.csv"), "public-size": 200} for name in "ab"]
        processes.supernodes(sites, "cloister", "warm-node")
        processes.flwr_run(SETTINGS | {"output-dir": str(tmp_path / "runs")}, seconds=SECONDS)
        run = tmp_path / "runs" / "r"
        rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        assert rounds[-1]["round"] == 2 and (run / "model.safetensors").is_file()
        claim = json.loads((run / "privacy.json").read_text())["clients"]
        assert claim["by-examples"][0]["claims"][0]["unit"] == "example"
