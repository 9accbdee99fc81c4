"""Executor of server apps that passes a task's token by standard input, so that other users cannot read it.

Flower's own gives it as an argument, which every user of the machine sees in `ps`; who has it can fetch what the run
is given and answer in its name. It replaces two functions of Flower: where these are not, it does not start.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from logging import WARNING
from pathlib import Path

from cloister.deploy.serverapp_supervisor import APP, LOCK, TASK
from cloister.flower import command, log, serverapp
from cloister.flower.executor import ExecutionSpec, LaunchResult, SubprocessExecutor, TaskType, run_superexec
from cloister.utils.errors import ConfigError

SUPERVISOR = Path(__file__).with_name("serverapp_supervisor.py")
"""Program that is started instead if a killed app is to be restarted."""


class QuietExecutor(SubprocessExecutor):
    """Executor of server apps only."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the app of a task, and pass the token by its standard input."""
        if spec.task_type != TaskType.SERVER_APP:
            return LaunchResult.failed(f"{spec.task_type}: this executor runs server apps only")
        self.start(spec)
        return LaunchResult.accepted()

    def start(self, spec: ExecutionSpec) -> None:
        """Start the app.

        Args:
            spec: of its task.
        """
        output = subprocess.DEVNULL if spec.suppress_output else None
        # Isolated from this folder (-P), so that a bundle imports its own modules.
        command = [sys.executable, "-P", str(APP), *arguments_of(spec)]
        if spec.parent_pid is not None:
            command += ["--parent-pid", str(spec.parent_pid)]
        app = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True)
        assert app.stdin is not None
        with app.stdin as pipe:
            pipe.write(f"{spec.token}\n")


class SupervisingExecutor(QuietExecutor):
    """Executor that starts each server app under a supervisor, and restarts killed supervisors.

    A supervisor restarts its app if that is killed. When this process dies, the kernel kills its supervisors and their
    apps, and the next executor continues their tasks.

    Args:
        resumes: largest number of restarts of a killed app, each of which resumes its run.
        tasks: folder for the state of tasks, tokens included, of this executor and its successors.
    """

    def __init__(self, resumes: int, tasks: Path) -> None:
        self.resumes, self.tasks = resumes, tasks
        self._supervisors: dict[Path, subprocess.Popen[bytes]] = {}
        tasks.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in tasks.iterdir():
            if not left.name.startswith("task-"):
                shutil.rmtree(left, ignore_errors=True)

    def start(self, spec: ExecutionSpec) -> None:
        """Start the app under a supervisor.

        Args:
            spec: of its task.
        """
        made = Path(tempfile.mkdtemp(prefix="new-", dir=self.tasks))
        (made / LOCK).touch()
        task = {"arguments": arguments_of(spec), "token": spec.token, "resumes": self.resumes}
        (made / TASK).write_text(json.dumps(task))
        self._supervise(made.rename(self.tasks / made.name.replace("new-", f"task-{spec.task_id}-")))

    def reconcile(self) -> None:
        """Restart dead supervisors of unfinished tasks, and forget the other dead ones."""
        for folder in self.tasks.glob("task-*"):
            supervisor = self._supervisors.get(folder)
            if supervisor is None or supervisor.poll() is not None:
                log(WARNING, "the supervisor of server app %s has died: it is started again", folder.name)
                self._supervise(folder)
        # Polled until they have ended: an unpolled process would stay a zombie.
        self._supervisors = {
            folder: process
            for folder, process in self._supervisors.items()
            if process.poll() is None or folder.exists()
        }

    def _supervise(self, folder: Path) -> None:
        # Flower discards the output of a server app except its log.
        self._supervisors[folder] = subprocess.Popen(
            [sys.executable, "-P", str(SUPERVISOR), str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def arguments_of(spec: ExecutionSpec) -> list[str]:
    """Return the options of an app, without the token.

    Args:
        spec: of its task.
    """
    arguments = ["--runtime-api-address", spec.runtime_api_address]
    if spec.insecure:
        arguments.append("--insecure")
    elif spec.root_certificates_path is not None:
        arguments += ["--root-certificates", spec.root_certificates_path]
    if spec.runtime_dependency_install:
        arguments.append("--allow-runtime-dependency-installation")
    return arguments


def run(arguments: list[str], resumes: int = 0, tasks: Path | None = None) -> None:
    """Run Flower's executor with its own options, and with this module's executors.

    Args:
        arguments: of `flower-superexec`.
        resumes: as in `SupervisingExecutor`; 0: no restarts.
        tasks: as in `SupervisingExecutor`.

    Raises:
        ConfigError: an option selects another executor; `resumes` is set without `tasks`; or this flwr has no such
            name.
    """
    if any(argument.split("=")[0] in ("--executor", "--executor-config") for argument in arguments):
        raise ConfigError("--executor: cloister superexec has one of its own; leave it out")
    names = vars(run_superexec)
    if "get_executor" not in names:
        raise ConfigError("this flwr has its executors elsewhere: a task's token could not be kept out of arguments")
    if resumes and not tasks:
        raise ConfigError("--resume needs --tasks: a folder in which the next executor finds what this one has begun")
    executor = SupervisingExecutor(resumes, tasks.absolute()) if resumes and tasks else QuietExecutor()
    names["get_executor"] = lambda *_, **__: executor
    serverapp.install(run_superexec)
    sys.argv = ["flower-superexec", *arguments]
    command("flower-superexec")()
