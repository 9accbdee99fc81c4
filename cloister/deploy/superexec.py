"""Flower's executor of server apps, which hands a task's token over where nobody else can read it.

Flower's own gives it as an argument, which every user of the machine sees in `ps`; who has it can fetch what the run
is given and answer in its name. It relies on two names inside flwr 1.41.0: without them it does not start.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from cloister.core.errors import ConfigError

APP = Path(__file__).with_name("serverapp.py")
"""What is started for each task; `start.sh` knows its processes by this name."""


KEEPER = Path(__file__).with_name("serverapp_keeper.py")
"""What is started in its place where an app that is killed is to be started again."""


class QuietExecutor(SubprocessExecutor):
    """Starts server apps, and nothing else that Flower has.

    Args:
        resumes: how often an app that was killed is started again, to resume its run.
    """

    def __init__(self, resumes: int = 0) -> None:
        self.resumes = resumes

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the app of a task, and give it the token by its standard input."""
        if spec.task_type != TaskType.SERVER_APP:
            return LaunchResult.failed(f"{spec.task_type}: this executor runs server apps only")
        output = subprocess.DEVNULL if spec.suppress_output else None
        app = subprocess.Popen(
            arguments_of(spec, self.resumes), stdin=subprocess.PIPE, stdout=output, stderr=output, text=True
        )
        assert app.stdin is not None
        with app.stdin as pipe:
            pipe.write(f"{spec.token}\n")
        return LaunchResult.accepted()


def arguments_of(spec: ExecutionSpec, resumes: int = 0) -> list[str]:
    """The command line of an app: all that it is told but the token.

    Args:
        spec: of its task.
        resumes: how often it is started again if it is killed.
    """
    program = [str(KEEPER), str(resumes)] if resumes else [str(APP)]
    # Isolated from this folder (-P), so that what a bundle imports is the bundle's.
    arguments = [sys.executable, "-P", *program, "--runtime-api-address", spec.runtime_api_address]
    if spec.insecure:
        arguments.append("--insecure")
    elif spec.root_certificates_path is not None:
        arguments += ["--root-certificates", spec.root_certificates_path]
    if spec.parent_pid is not None:
        arguments += ["--parent-pid", str(spec.parent_pid)]
    if spec.runtime_dependency_install:
        arguments.append("--allow-runtime-dependency-installation")
    return arguments


def run(arguments: list[str], resumes: int = 0) -> None:
    """Run Flower's executor with its own options, and ours in the place of what starts processes.

    Args:
        arguments: of `flower-superexec`.
        resumes: as in `QuietExecutor`.

    Raises:
        ConfigError: an option asks for another executor, or this flwr has none in the place that is known.
    """
    if any(argument.split("=")[0] in ("--executor", "--executor-config") for argument in arguments):
        raise ConfigError("--executor: cloister superexec has one of its own; leave it out")
    names: dict[str, Any] = vars(run_superexec)
    if "get_executor" not in names:
        raise ConfigError("this flwr has its executors elsewhere: a task's token could not be kept out of arguments")
    names["get_executor"] = lambda *_, **__: QuietExecutor(resumes)
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()
