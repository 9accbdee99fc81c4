"""Cloister without its extras: what needs no framework works, and what needs one names the extra that has it."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cloister.config.run import parse
from cloister.scaffold.package import FRAMEWORKS
from cloister.tasks import TASKS
from cloister.tasks.making import model_of, named_task
from cloister.utils.crash import EXTRA_OF
from cloister.utils.errors import ConfigError, PluginError

ROOT = Path(__file__).parents[1]
WITHOUT = """
import json, sys
absent, commands = map(json.loads, sys.argv[1:])

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *more):
        return None if name in absent else self.finder.find_spec(name, *more)

sys.meta_path[:] = map(Without, sys.meta_path)
from typer.testing import CliRunner
from cloister.cli import app
for words in commands:
    ended = CliRunner().invoke(app, words)
    print(json.dumps([words, ended.exit_code, ended.output]), flush=True)
"""
"""Commands in one process, where some packages are not installed."""
NUMPY = "task.model='softmax' num-rounds=1 output-dir='runs'"
COMMANDS = [
    ["run", "--clients", "2", "-c", f"{NUMPY} run-name='one' strategy.min-nodes=2"],
    ["run", "-c", f"{NUMPY} run-name='two' privacy.server='none' privacy.client='dp-sgd' client.batch-size=32"],
    ["plan", "-c", NUMPY],
    ["check", "task", "digits", "-c", "task.model='softmax'"],
    ["report", "runs/one"],
    ["compare", "runs/one", "runs/two"],
    ["status"],
    ["audit", "--help"],
    ["new", "task", "ward", "--framework", "numpy"],
    ["provision", str(ROOT / "docker" / "federation.toml"), "--output", "kits"],
    ["policy", "kits/sites/site-1/policy.toml"],
]


def ended(folder, commands, absent=tuple(EXTRA_OF)):
    """Return the exit code and the output of each command."""
    words = [json.dumps(list(absent)), json.dumps(commands)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [json.loads(line)[1:] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_commands_for_models_in_numpy_need_no_framework(tmp_path):
    found = ended(tmp_path, COMMANDS)
    assert [words for words, (code, output) in zip(COMMANDS, found, strict=True) if code] == [], found
    assert (tmp_path / "runs" / "one" / "report.html").is_file() and list(
        (tmp_path / "runs" / "one").glob("tensorb*/*")
    )
    assert "privacy.client='dp-sgd'" in found[3][1]


def test_a_task_in_keras_ends_in_one_sentence_with_the_remedy(tmp_path):
    remedy = "tensorflow is not installed here: pip install 'cloister-fl[keras]'"
    run, checked, kernels = ended(
        tmp_path, [["run"], ["check", "task", "digits"], ["check", "kernels", "--seconds", "1"]]
    )
    assert run == [1, f"ConfigError: task 'digits', model 'mlp': {remedy}\n"]
    assert checked[0] == 1 and remedy in checked[1]
    assert kernels == [1, remedy.replace("tensorflow", "keras") + "\n"]


def test_a_module_of_a_task_that_imports_a_framework_does_too(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(TASKS._table, "mine", "of_mine:Mine")
    told = (
        r"task 'mine' \(of_mine:Mine\) does not load: torch is not installed here: pip install 'cloister-fl\[torch\]'"
    )
    with pytest.raises(PluginError, match=f"^{told}$"):
        TASKS.load("mine")


def test_a_node_tells_the_server_which_extra_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    task = named_task(parse({}).task)
    with pytest.raises(ConfigError, match=r"keras is not installed here: pip install 'cloister-fl\[keras\]'"):
        model_of(task)


def test_another_missing_module_of_a_task_is_not_taken_for_a_framework(monkeypatch):
    task = named_task(parse({}).task)
    for name in ("torch.nosuch", "nosuch"):
        monkeypatch.setattr(task, "build", lambda name=name: __import__(name, fromlist=["x"]))
        monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            model_of(task)


def test_the_extras_have_these_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {Requirement(each).name: extra for extra in ("keras", "torch") for each in extras[extra]}
    assert listed == EXTRA_OF
    assert all(EXTRA_OF[package] == name for name, packages in FRAMEWORKS.items() for package in packages)
