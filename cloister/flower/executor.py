"""Flower's executors: that of server apps, and one of client apps as a SuperNode knows it."""

from collections.abc import Callable
from typing import Any

from flwr.common.constant import SubStatus as SubStatus
from flwr.proto import runtime_pb2 as runtime_pb2
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.constant import TaskType as TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor as RuntimeVersionHttpInterceptor
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor as SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
from flwr.supercore.superexec import run_superexec as run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor as SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec as ExecutionSpec
from flwr.supercore.superexec.executor.types import LaunchResult as LaunchResult
from flwr.supernode.runtime import run_clientapp as run_clientapp
from httpx import Response

# The kind of app of a task.

# The module whose function for an executor is replaced: options choose only among Flower's own.

# The base of an executor, its task and its answer.


# The outcome of a task.

# Requests of an executor.

# The header for the token of a task, and the kind of app of one.

# The headers for an executor's release, and for the secret that it shares with its SuperNode.

# The connection of an executor to its SuperNode.

# The module of `flwr-clientapp`, whose functions that load an app are replaced.


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
