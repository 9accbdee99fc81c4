"""`flwr-serverapp` with the task's token from standard input, because `ps` shows arguments to every user.

Flower hands out a task's input once. A supervisor names a folder for the task. There the first process stores the
input, and the app stores the path of its run directory. A later process reads both, and the app resumes the run. To
Flower and its nodes it is the same run.

Run as a file, not as a module: no part of this package may be loaded before the app's bundle, which contains its own.

A killed SuperLink interrupts TLS handshakes. OpenSSL's message about it contains SSL, and Flower gives up after any SSL
error. `install` makes a module of Flower retry; processes of servers and sites that connect to a SuperLink call it.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import httpx

if TYPE_CHECKING:
    # The type of a task's input.
    from flwr.proto import runtime_pb2

Pull = Callable[[object, object], "runtime_pb2.PullTaskInputResponse"]
CUT = "UNEXPECTED_EOF"
"""Text in OpenSSL's error about a connection that closes during the handshake."""
MAKER = "make_simple_http_retry_invoker"
"""Flower's name for the factory of retry invokers, in each module that uses it."""


class RetryInvoker(Protocol):
    """The part of Flower's retry invoker that is replaced here."""

    should_giveup: Callable[[Exception], bool] | None


def retrying(make: Callable[[], RetryInvoker]) -> Callable[[], RetryInvoker]:
    """Return Flower's factory of retry invokers, which retry after a cut or a slow handshake too.

    Args:
        make: Flower's factory.
    """

    def made() -> RetryInvoker:
        invoker = make()
        gives_up = invoker.should_giveup

        def should_giveup(error: Exception) -> bool:
            is_cut = isinstance(error, httpx.TransportError) and CUT in str(error)
            is_cut = is_cut or isinstance(error, httpx.TimeoutException)
            return not is_cut and gives_up is not None and gives_up(error)

        invoker.should_giveup = should_giveup
        return invoker

    return made


def install(module: ModuleType) -> None:
    """Make a module of Flower retry after interrupted handshakes, in this process.

    Args:
        module: that connects to the SuperLink.
    """
    vars(module)[MAKER] = retrying(vars(module)[MAKER])


def resumable(pull: Pull, folder: Path, parse: Callable[[bytes], "runtime_pb2.PullTaskInputResponse"]) -> Pull:
    """Return a function that pulls a task's input once and stores it.

    Its later results are the stored input with the run directory to resume.

    Args:
        pull: requests the input from Flower.
        folder: of the task.
        parse: decodes the input from bytes.
    """
    place, directory = folder / "input", folder / "run"

    def again(client: object, request: object) -> "runtime_pb2.PullTaskInputResponse":
        if not place.exists():
            answer = pull(client, request)
            partial = place.with_suffix(".partial")
            partial.write_bytes(answer.SerializeToString())
            partial.replace(place)
            return answer
        answer = parse(place.read_bytes())
        if directory.exists():
            answer.run.override_config["resume"].string = directory.read_text()
        return answer

    return again


if __name__ == "__main__":
    # The module that connects to the SuperLink.
    from flwr.superlink.grid import http_grid

    install(http_grid)
    if task := os.environ.get("CLOISTER_TASK"):
        # The client with which an app pulls its input. Only this process sees the change.
        from flwr.proto import runtime_pb2
        from flwr.supercore.runtime import RuntimeHttpClient

        client: Any = RuntimeHttpClient
        decode = runtime_pb2.PullTaskInputResponse.FromString
        client.PullTaskInput = resumable(client.PullTaskInput, Path(task), decode)
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", sys.stdin.readline().strip()]
    distribution("flwr").entry_points.select(group="console_scripts")["flwr-serverapp"].load()()
