"""`flwr-serverapp` with the task's token from standard input, because `ps` shows arguments to every user.

Flower hands out a task's input once. A supervisor names a folder for the task. There the first process stores the
input, and the app stores the path of its run directory. A later process reads both, and the app resumes the run. To
Flower and its nodes it is the same run.

Run as a file, not as a module: no part of this package may be loaded before the app's bundle, which contains its own.
"""

import os
import runpy
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

Pull = Callable[[Any, Any], Any]


def resumable(pull: Pull, folder: Path, parse: Callable[[bytes], Any]) -> Pull:
    """Return a function that pulls a task's input once and stores it.

    Its later results are the stored input with the run directory to resume.

    Args:
        pull: requests the input from Flower.
        folder: of the task.
        parse: decodes the input from bytes.
    """
    place, directory = folder / "input", folder / "run"

    def again(client: Any, request: Any) -> Any:
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

    runpy.run_path(str(Path(__file__).with_name("handshakes.py")))["install"](http_grid)
    if task := os.environ.get("CLOISTER_TASK"):
        # The client with which an app pulls its input. Only this process sees the change.
        from flwr.proto import runtime_pb2
        from flwr.supercore.runtime import RuntimeHttpClient

        client: Any = RuntimeHttpClient
        decode = runtime_pb2.PullTaskInputResponse.FromString
        client.PullTaskInput = resumable(client.PullTaskInput, Path(task), decode)
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", sys.stdin.readline().strip()]
    distribution("flwr").entry_points.select(group="console_scripts")["flwr-serverapp"].load()()
