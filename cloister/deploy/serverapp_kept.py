"""Be `flwr-serverapp`, as `serverapp.py` is, for a task that an earlier process may have died of.

Flower hands a task's input out once. The first process keeps it in a folder of its keeper's, and the app notes there
which run directory it has made; a later process takes both from there, and the app resumes the run. To Flower and its
nodes it is the same run. Run as a file, not as a module: nothing of this package may be loaded before the app's bundle.
"""

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Pull = Callable[[Any, Any], Any]


def kept(pull: Pull, folder: Path, parse: Callable[[bytes], Any]) -> Pull:
    """A function that pulls a task's input once, and whose later answers name the run directory to resume.

    Args:
        pull: asks Flower.
        folder: of the keeper.
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


if __name__ == "__main__":
    from flwr.proto.runtime_pb2 import PullTaskInputResponse
    from flwr.supercore.runtime.runtime_http_client import RuntimeHttpClient
    from flwr.superlink.cli.flwr_serverapp import flwr_serverapp
    from flwr.superlink.grid import http_grid

    # Only this process sees what it changes here.
    runpy.run_path(str(Path(__file__).with_name("handshakes.py")))["install"](http_grid)
    client: Any = RuntimeHttpClient
    client.PullTaskInput = kept(
        client.PullTaskInput, Path(os.environ["CLOISTER_TASK"]), PullTaskInputResponse.FromString
    )
    sys.argv = ["flwr-serverapp", *sys.argv[1:], "--token", sys.stdin.readline().strip()]
    flwr_serverapp()
