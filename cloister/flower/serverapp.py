"""Be `flwr-serverapp`, with the task's token from the standard input: an argument is shown to every user by `ps`.

Flower hands a task's input out once. Under a supervisor, which names a folder for the task, the first process keeps the
input there, and the app notes there which run directory it has made. A later process takes both from there, and the app
resumes the run. To Flower and its nodes it is the same run.

Run as a file, not as a module: nothing of this package may be loaded before the app's bundle, which brings its own.
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
    """A function that pulls a task's input once, and whose later answers name the run directory to resume.

    Args:
        pull: asks Flower.
        folder: of the task.
        parse: the input from its bytes.
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


def _resume_from(folder: Path) -> None:
    """Have Flower's app take its input from the folder, once it is there. Only this process sees the change."""
    # The client with which an app pulls its input.
    from flwr.proto import runtime_pb2
    from flwr.supercore.runtime import RuntimeHttpClient

    client: Any = RuntimeHttpClient
    client.PullTaskInput = resumable(client.PullTaskInput, folder, runtime_pb2.PullTaskInputResponse.FromString)


if __name__ == "__main__":
    # The module that connects to the SuperLink.
    from flwr.superlink.grid import http_grid

    runpy.run_path(str(Path(__file__).with_name("handshakes.py")))["install"](http_grid)
    if task := os.environ.get("CLOISTER_TASK"):
        _resume_from(Path(task))
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", sys.stdin.readline().strip()]
    distribution("flwr").entry_points.select(group="console_scripts")["flwr-serverapp"].load()()
