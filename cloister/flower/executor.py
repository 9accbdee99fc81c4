"""Flower's executors: that of server apps, and one of client apps as a SuperNode knows it."""

from collections.abc import Callable
from typing import Any

# The outcome of a task.
from flwr.common.constant import SubStatus as SubStatus

# Requests of an executor.
from flwr.proto import runtime_pb2 as runtime_pb2

# The header for the token of a task, and the kind of app of one.
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.constant import TaskType as TaskType

# The headers for an executor's release, and for the secret that it shares with its SuperNode.
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor as RuntimeVersionHttpInterceptor
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor as SuperExecAuthHttpInterceptor

# The connection of an executor to its SuperNode.
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient

# The module whose function for an executor is replaced: options choose only among those of Flower.
from flwr.supercore.superexec import run_superexec as run_superexec

# The base of an executor, its task and its answer.
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor as SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec as ExecutionSpec
from flwr.supercore.superexec.executor.types import LaunchResult as LaunchResult

# The module of `flwr-clientapp`, whose functions that load an app are replaced.
from flwr.supernode.runtime import run_clientapp as run_clientapp
from httpx import Response


class ShowsToken:
    """Shows the token of a task with each request.

    Args:
        token: of the task.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: Any, call_next: Callable[[object], Response]) -> Response:
        """Send a request with the token."""
        context.request.headers[TASK_TOKEN_HEADER] = self._token
        return call_next(context)
