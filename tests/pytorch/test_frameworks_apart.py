"""A run imports the framework of its task and no other one, and a warm node forks before a framework computes."""

import json
import sys
from pathlib import Path

import pytest
from test_extras import WITHOUT
from test_new import installed, within

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LOADED = """
import json, sys
print(json.dumps(sorted({"tensorflow", "keras", "torch"} & set(sys.modules))))
"""
SETTINGS = "num-rounds=1 strategy.min-nodes=2 output-dir='runs'"
DP_SGD = "privacy.server='none' privacy.client='dp-sgd' client.batch-size=32"


@pytest.fixture
def ward(tmp_path):
    """The package of a task in PyTorch."""
    return installed(tmp_path, "task", "csv", "torch", name="ward")


def ended(ward, commands, absent=()):
    """Return the exit code and the output of each command, and which frameworks their process has imported."""
    done = within(ward, sys.executable, "-c", WITHOUT + LOADED, json.dumps(absent), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    *lines, loaded = map(json.loads, done.stdout.splitlines())
    return [line[1:] for line in lines], loaded


@pytest.mark.parametrize(
    ("task", "frameworks"),
    [
        ("task.model='softmax'", []),
        ("task.model='mlp'", ["keras", "tensorflow"]),
        ("task.name='ward'", ["torch"]),
    ],
    ids=["numpy", "keras", "torch"],
)
@pytest.mark.parametrize(
    "privacy", ["privacy.server='global-dp' privacy.noise-multiplier=1.0", DP_SGD], ids=["server", "client"]
)
def test_a_run_imports_no_framework_of_another_task(ward, task, frameworks, privacy):
    settings = ["-n", "2", "-c", f"{SETTINGS} {task} {privacy}"]
    found, loaded = ended(ward, [["run", *settings], ["plan", *settings]])
    assert [code for code, _ in found] == [0, 0], found
    assert loaded == frameworks


def test_a_task_in_pytorch_needs_no_tensorflow(ward):
    settings = f"{SETTINGS} task.name='ward'"
    commands = [
        ["run", "-n", "2", "-c", f"{settings} run-name='one'"],
        ["check", "task", "ward"],
        ["predict", "runs/one", "site-a.csv"],
    ]
    found, loaded = ended(ward, commands, ["tensorflow", "keras", "h5py"])
    assert [code for code, _ in found] == [0, 0, 0], found
    assert (ward / "runs" / "one" / "model.safetensors").is_file() and loaded == ["torch"]


WARM = """
import json, os, sys
from cloister.deploy.warm import executor
executor.warm_up([])
threads = len(os.listdir("/proc/self/task"))
executor.warm_up(["torch"])
import torch
started = len(os.listdir("/proc/self/task")) - threads
executor.warm_up(["keras", "torch"])
end, begin = os.pipe()
if not os.fork():
    weights = torch.ones(300, 300, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.01)
    (weights @ weights).sum().backward()
    optimizer.step()
    os.write(begin, json.dumps(float(weights[0, 0])).encode())
    os._exit(0)
os.close(begin)
print(json.dumps([started, torch.cuda.is_initialized(), "tensorflow" in sys.modules, json.loads(os.read(end, 100))]))
"""


def test_a_warm_node_starts_no_thread_and_no_cuda_of_pytorch_before_the_fork(tmp_path):
    root = Path(__file__).parents[2]
    done = within(root, sys.executable, "-c", WARM)
    assert json.loads(done.stdout) == [0, False, True, -5.0], done.stderr[-2000:]
