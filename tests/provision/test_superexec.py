"""The executor of server apps: a task's token reaches the app, and nobody else."""

import ast
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus
from flwr.supercore.superexec.run_superexec import get_executor
from typer.testing import CliRunner

from cloister.cli import app
from cloister.core.errors import ConfigError
from cloister.deploy import superexec

TOKEN = "a-task-token-that-is-long-enough-to-be-found"
WRITES_WHAT_IT_SEES = """\
import sys
from pathlib import Path
out = Path(__file__).with_suffix(".out")
part = out.with_suffix(".part")
part.write_text(repr([Path("/proc/self/cmdline").read_text().split("\\0"), Path("/proc/self/environ").read_text(),
                      sys.stdin.read()]))
part.rename(out)
"""


def task(kind=TaskType.SERVER_APP, **others):
    given = {"insecure": False, "root_certificates_path": "/ca.crt", "parent_pid": 1, "suppress_output": True}
    return ExecutionSpec(
        task_type=kind,
        runtime_api_address="127.0.0.1:1",
        token=TOKEN,
        runtime_dependency_install=False,
        task_id=1,
        **given | others,
    )


def test_the_app_is_told_by_its_input_and_not_by_an_argument_or_the_environment(tmp_path, monkeypatch):
    script = tmp_path / "serverapp.py"
    script.write_text(WRITES_WHAT_IT_SEES)
    monkeypatch.setattr(superexec, "APP", script)
    assert superexec.QuietExecutor().launch(task()).status == LaunchResultStatus.ACCEPTED
    deadline = time.monotonic() + 30
    while not (tmp_path / "serverapp.out").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    arguments, environment, given = ast.literal_eval((tmp_path / "serverapp.out").read_text())
    assert given == f"{TOKEN}\n"
    assert TOKEN not in environment and not [argument for argument in arguments if TOKEN in argument]
    assert arguments[3:9] == [
        "--runtime-api-address",
        "127.0.0.1:1",
        "--root-certificates",
        "/ca.crt",
        "--parent-pid",
        "1",
    ]


@pytest.mark.parametrize("kind", set(TaskType) - {TaskType.SERVER_APP})
def test_nothing_else_is_started(kind, monkeypatch):
    monkeypatch.setattr(superexec.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    assert superexec.QuietExecutor().launch(task(kind)).status == LaunchResultStatus.FAILED


def test_flower_gets_the_token_and_ps_does_not():
    """What is started is Flower's own app process: it shows the token to the SuperLink, here one that listens."""
    shown, lines = [], []

    class Listening(BaseHTTPRequestHandler):
        def do_POST(self):
            shown.append("".join(self.headers.values()))
            lines.append(Path(f"/proc/{process.pid}/cmdline").read_text())
            self.send_error(400)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Listening)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    process = subprocess.Popen(
        [sys.executable, "-P", str(superexec.APP), "--runtime-api-address", address, "--insecure"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        process.communicate(f"{TOKEN}\n", timeout=120)
    finally:
        process.kill()
        server.shutdown()
        server.server_close()
    assert TOKEN in shown[0] and not [line for line in lines if TOKEN in line or "--token" in line]


def test_the_app_process_loads_nothing_of_this_package_but_what_the_bundle_brings():
    tree = ast.parse(superexec.APP.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"sys", "flwr.superlink.cli.flwr_serverapp"}


def test_flowers_executor_runs_with_ours(monkeypatch):
    called = []
    names = vars(superexec.run_superexec)
    monkeypatch.setitem(names, "get_executor", get_executor)
    monkeypatch.setattr(superexec, "flower_superexec", lambda: called.append((sys.argv, names["get_executor"]("any"))))
    monkeypatch.setattr(sys, "argv", ["cloister"])
    superexec.run(["--insecure", "--runtime-api-address", "127.0.0.1:1"])
    ((arguments, executor),) = called
    assert arguments == ["flower-superexec", "--insecure", "--runtime-api-address", "127.0.0.1:1"]
    assert isinstance(executor, superexec.QuietExecutor)


def test_with_a_flower_that_starts_apps_otherwise_nothing_runs(monkeypatch):
    monkeypatch.delitem(vars(superexec.run_superexec), "get_executor")
    monkeypatch.setattr(superexec, "flower_superexec", lambda: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match="could not be kept out of arguments"):
        superexec.run(["--insecure"])


@pytest.mark.parametrize("option", ["--executor=kubernetes", "--executor-config"])
def test_another_executor_is_refused(option):
    result = CliRunner().invoke(app, ["superexec", option, "x"])
    assert result.exit_code == 1 and "leave it out" in result.output
