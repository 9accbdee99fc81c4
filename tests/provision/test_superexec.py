"""The executor of server apps: a task's token reaches the app, and nobody else."""

import ast
import io
import os
import runpy
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import PullTaskInputResponse
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResultStatus
from flwr.supercore.superexec.run_superexec import get_executor
from flwr.superlink import cli
from flwr.superlink.grid import http_grid
from typer.testing import CliRunner

from cloister.cli import app
from cloister.deploy import superexec
from cloister.flower import serverapp
from cloister.flower.serverapp import resumable
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError

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
    deadline = time.monotonic() + 240
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


def test_nothing_else_is_started(monkeypatch):
    monkeypatch.setattr(superexec.subprocess, "Popen", lambda *_, **__: pytest.fail("it was started"))
    for kind in set(TaskType) - {TaskType.SERVER_APP}:
        assert superexec.QuietExecutor().launch(task(kind)).status == LaunchResultStatus.FAILED


def test_flowers_app_is_run_with_the_token_of_the_input(monkeypatch):
    called, names = [], vars(http_grid)
    monkeypatch.setitem(names, serverapp.MAKER, names[serverapp.MAKER])
    monkeypatch.setattr(cli, "flwr_serverapp", lambda: called.append(list(sys.argv)))
    monkeypatch.setattr(sys, "argv", [str(superexec.APP), "--insecure"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TOKEN}\nnothing of it\n"))
    runpy.run_path(str(superexec.APP), run_name="__main__")
    assert called == [["flwr-serverapp", "--insecure", "--token", TOKEN]]


@pytest.mark.runtimes
def test_flower_gets_the_token_and_ps_does_not():
    """The started process is Flower's own for apps: it shows the token to the SuperLink, here one that listens."""
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
        process.communicate(f"{TOKEN}\n", timeout=480)
    finally:
        process.kill()
        server.shutdown()
        server.server_close()
    assert TOKEN in shown[0] and not [line for line in lines if TOKEN in line or "--token" in line]


def test_the_app_process_loads_nothing_of_this_package_but_what_the_bundle_brings():
    tree = ast.parse(superexec.APP.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in imported} <= {"flwr", "httpx", *sys.stdlib_module_names}
    assert "flwr.superlink.grid" in imported, "imports are read"


def test_flowers_executor_runs_with_ours(monkeypatch):
    called = []
    names = vars(superexec.run_superexec)
    monkeypatch.setitem(names, "get_executor", get_executor)
    monkeypatch.setitem(names, serverapp.MAKER, names[serverapp.MAKER])
    flowers = lambda: called.append((sys.argv, names["get_executor"]("any")))  # noqa: E731
    monkeypatch.setattr(superexec, "command", {"flower-superexec": flowers}.get)
    monkeypatch.setattr(sys, "argv", ["cloister"])
    superexec.run(["--insecure", "--runtime-api-address", "127.0.0.1:1"])
    ((arguments, executor),) = called
    assert arguments == ["flower-superexec", "--insecure", "--runtime-api-address", "127.0.0.1:1"]
    assert isinstance(executor, superexec.QuietExecutor)


def test_with_a_flower_that_starts_apps_otherwise_nothing_runs(monkeypatch):
    monkeypatch.delitem(vars(superexec.run_superexec), "get_executor")
    monkeypatch.setattr(superexec, "command", lambda _: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match="could not be kept out of arguments"):
        superexec.run(["--insecure"])


def test_another_executor_is_refused():
    for option in ("--executor=kubernetes", "--executor-config"):
        result = CliRunner().invoke(app, ["superexec", option, "x"])
        assert result.exit_code == 1 and "leave it out" in result.output


DIES = """\
import os, signal, sys
from pathlib import Path
Path(os.environ["SEEN"]).open("a").write(sys.stdin.readline())
deaths = Path(os.environ["CLOISTER_TASK"]) / "deaths"
deaths.write_text(deaths.read_text() + "x" if deaths.exists() else "x")
if len(deaths.read_text()) <= int(os.environ["DEATHS"]):
    os.kill(os.getpid(), getattr(signal, os.environ["BY"]))
sys.exit(7)
"""
SUPERVISOR = "import sys; from pathlib import Path; from cloister.deploy.serverapp_supervisor import Supervisor; "


class TestAKilledApp:
    def resumable(self, tmp_path, monkeypatch, deaths, resumes, by="SIGKILL"):
        """The exit status of an app that dies so many times, and how often it was started and told the token."""
        environment = {"SEEN": str(tmp_path / "seen"), "DEATHS": str(deaths), "BY": by}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        script = tmp_path / "app.py"
        script.write_text(DIES)
        (tmp_path / "task").mkdir()
        source = f"print(Supervisor(sys.argv[1:], {TOKEN!r}, Path({str(tmp_path / 'task')!r})).run({resumes}))"
        command = [sys.executable, "-c", SUPERVISOR + source, sys.executable, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["app.py", "seen"], "its task is over"
        return int(done.stdout.split()[-1]), (tmp_path / "seen").read_text().split()

    @pytest.mark.parametrize(("deaths", "resumes", "status", "starts"), [(2, 2, 7, 3), (9, 1, -9, 2), (1, 0, -9, 1)])
    def test_is_started_again_at_most_so_many_times(self, tmp_path, monkeypatch, deaths, resumes, status, starts):
        assert self.resumable(tmp_path, monkeypatch, deaths, resumes) == (status, [TOKEN] * starts)

    def test_is_left_in_peace_if_it_was_asked_to_end(self, tmp_path, monkeypatch):
        assert self.resumable(tmp_path, monkeypatch, 1, 2, by="SIGTERM") == (-15, [TOKEN])

    def test_ends_with_its_supervisor(self, tmp_path):
        script = tmp_path / "app.py"
        script.write_text(
            "import time, sys\ntry:\n    print('ready', flush=True); time.sleep(600)\n"
            "except KeyboardInterrupt:\n    sys.exit(3)\n"
        )
        (tmp_path / "task").mkdir()
        source = f"sys.exit(Supervisor(sys.argv[1:], {TOKEN!r}, Path({str(tmp_path / 'task')!r})).run(5))"
        supervisor = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR + source, sys.executable, str(script)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert supervisor.stdout.readline() == "ready\n"
            supervisor.terminate()
            assert supervisor.wait(240) == 3
        finally:
            supervisor.kill()

    def test_has_the_input_of_its_task_from_the_one_before_it_and_resumes_its_run(self, tmp_path):
        pulled = []

        def pull(client, request):
            pulled.append(request)
            return PullTaskInputResponse(task_id=7)

        again = resumable(pull, tmp_path, PullTaskInputResponse.FromString)
        assert again(None, "first").task_id == 7 and "resume" not in again(None, "second").run.override_config
        (tmp_path / "run").write_text("/srv/runs/r")
        answer = resumable(pull, tmp_path, PullTaskInputResponse.FromString)(None, "third")
        assert answer.task_id == 7 and run_from_proto(answer.run).override_config == {"resume": "/srv/runs/r"}
        assert pulled == ["first"], "Flower hands it out once"

    def test_the_app_says_which_run_it_has_made(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CLOISTER_RUN_FILE", str(tmp_path / "run"))
        settings = {"task.name": "linear", "task.test-fraction": 0.0, "num-rounds": 1, "run-name": "r"}
        simulate(settings | {"output-dir": str(tmp_path), "tensorboard": False, "report": False}, 2)
        assert (tmp_path / "run").read_text() == str(tmp_path / "r")


LIVES = """\
import os, sys, time
from pathlib import Path
seen = Path(os.environ["SEEN"])
with seen.open("a") as file:
    file.write(f"{os.getpid()} {sys.stdin.readline()}")
while not seen.with_name("end").exists():
    time.sleep(0.02)
"""
EXECUTES = """\
import sys, time
from pathlib import Path
from cloister.deploy import superexec
superexec.SUPERVISOR = Path(sys.argv[2])
kind = superexec.TaskType.SERVER_APP
spec = superexec.ExecutionSpec(kind, "127.0.0.1:1", sys.argv[3], True, None, False, None, True, 1)
superexec.SupervisingExecutor(3, Path(sys.argv[1])).launch(spec)
time.sleep(600)
"""


class TestAnExecutorThatDies:
    """Supervisors and apps are processes here; the app writes its id and what it was told, and waits for a file."""

    @pytest.fixture
    def supervisor(self, tmp_path, monkeypatch):
        """A supervisor of this app."""
        (tmp_path / "app.py").write_text(LIVES)
        supervisor = tmp_path / "supervisor.py"
        supervisor.write_text(
            "import sys\nfrom pathlib import Path\nfrom cloister.deploy import serverapp_supervisor\n"
            f"serverapp_supervisor.APP = Path({str(tmp_path / 'app.py')!r})\n"
            "sys.exit(serverapp_supervisor.main(Path(sys.argv[1]), int(sys.argv[2])))\n"
        )
        monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.setattr(superexec, "SUPERVISOR", supervisor)
        yield supervisor
        (tmp_path / "end").touch()

    def started(self, tmp_path, count):
        """The process ids of the apps so far, once there are so many."""
        deadline = time.monotonic() + 240
        while not (tmp_path / "seen").exists() or len((tmp_path / "seen").read_text().splitlines()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
        assert [token for _, token in lines] == [TOKEN] * count
        return [int(pid) for pid, _ in lines]

    @pytest.mark.runtimes
    def test_takes_its_apps_with_it_and_the_next_one_starts_them_again(self, tmp_path, supervisor):
        command = [sys.executable, "-c", EXECUTES, str(tmp_path / "tasks"), str(supervisor), TOKEN]
        with subprocess.Popen(command) as first:
            (killed,) = self.started(tmp_path, 1)
            (folder,) = (tmp_path / "tasks").iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700, "it holds a token"
            first.kill()
        superexec.SupervisingExecutor(3, tmp_path / "tasks").reconcile()
        assert self.started(tmp_path, 2)[0] == killed and not alive(killed)
        (tmp_path / "end").touch()
        gone(folder)

    def test_starts_a_supervisor_again_that_was_killed(self, tmp_path, supervisor):
        executor = superexec.SupervisingExecutor(3, tmp_path / "tasks")
        executor.launch(task())
        (killed,) = self.started(tmp_path, 1)
        (folder,) = (tmp_path / "tasks").iterdir()
        executor.reconcile()
        parent = int(Path(f"/proc/{killed}/status").read_text().split("PPid:")[1].split()[0])
        os.kill(parent, signal.SIGKILL)
        os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
        executor.reconcile()
        assert self.started(tmp_path, 2)[0] == killed and not alive(killed)
        (tmp_path / "end").touch()
        gone(folder)


ENDS_ITS_TASK = """\
import shutil, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
shutil.rmtree(folder)
while not folder.parent.with_name("end").exists():
    time.sleep(0.02)
"""


def test_a_supervisor_whose_task_is_over_leaves_no_entry_in_the_table_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(superexec, "SUPERVISOR", tmp_path / "supervisor.py")
    superexec.SUPERVISOR.write_text(ENDS_ITS_TASK)
    executor = superexec.SupervisingExecutor(3, tmp_path / "tasks")
    executor.launch(task())
    ((folder, supervisor),) = executor._supervisors.items()
    gone(folder)
    executor.reconcile()
    (tmp_path / "end").touch()
    os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)
    executor.reconcile()
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    assert not executor._supervisors


def test_start_sh_knows_a_supervisor_by_its_name():
    assert "serverapp" in superexec.SUPERVISOR.name


def alive(pid):
    """Return whether a process is there, and not only its entry for a parent that has yet to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*folders):
    deadline = time.monotonic() + 240
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_to_resume_an_executor_needs_a_folder():
    result = CliRunner().invoke(app, ["superexec", "--resume", "3", "--insecure"])
    assert result.exit_code == 1 and "--resume needs --tasks" in result.output
