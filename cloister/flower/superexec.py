"""Flower's executor of server apps."""

# The kind of app of a task.
from flwr.supercore.constant import TaskType as TaskType

# The module whose function for an executor is replaced: options choose only among Flower's own.
from flwr.supercore.superexec import run_superexec as run_superexec

# The base of an executor, its task and its answer.
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor as SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec as ExecutionSpec
from flwr.supercore.superexec.executor.types import LaunchResult as LaunchResult
