"""What a message to one node, and its reply, cost a SuperLink: processor time by request, on Flower's way and on ours.

python benchmarks/exchange.py [messages]

Flower's own clients call the SuperLink as its web server would, in this process and one request after the other; its
database is on disk, and the message has a softmax model of digits. The web server, TLS, and what is lost when requests
wait for each other come on top.
"""

import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, quiet, table
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.protobuf import client as protobuf_client
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode.fleet_http_connection import http_request_response
from starlette.testclient import TestClient

from cloister.core.arrays import to_record
from cloister.core.wire import ARRAYS
from cloister.deploy.superlink import database
from cloister.deploy.superlink.app import closed_app

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "provision"))
from light_nodes import LightNode
from test_superlink import configuration

ADDRESS = "superlink:1"
MODEL = {"0": np.zeros((64, 10), np.float32), "1": np.zeros(10, np.float32)}


@dataclass
class Timed:
    """An ASGI application that notes what each request costs.

    Args:
        app: answers.
        count: requests, by path.
        seconds: processor seconds in them, by path.
    """

    app: Any
    count: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        began = time.process_time()
        await self.app(scope, receive, send)
        self.count[scope["path"]] += 1
        self.seconds[scope["path"]] += time.process_time() - began


def exchange(app: Any, state: Any, messages: int) -> Timed:
    """Send messages to one node, and fetch its replies."""
    timed, clients = Timed(app), vars(protobuf_client)["httpx"]
    plain, clients.Client = clients.Client, lambda **_: TestClient(timed, base_url=f"http://{ADDRESS}")
    try:
        grid, run = _grid(state)
        with http_request_response(ADDRESS, True) as connection:
            node = LightNode(connection, {})
            node.contexts[run] = Context(run, node.id, {}, RecordDict(), {})
            for number in range(messages + 1):
                if number == 1:  # what is made on first use is no cost of a message
                    timed.count.clear()
                    timed.seconds.clear()
                state.acknowledge_task_heartbeat(TaskIdentity.task_id)
                _one(grid, node, number)
    finally:
        clients.Client = plain
    return timed


def _grid(state: Any) -> tuple[HttpGrid, int]:
    """The grid of a server app whose run is there, and the run."""
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    (found,) = state.get_run_info(run_ids=[run])
    token = state.claim_task(found.primary_task_id)
    state.activate_task(found.primary_task_id)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, found.primary_task_id
    grid = HttpGrid(ADDRESS, insecure=True, token=token)
    grid.set_run(found)
    return grid, run


def _one(grid: HttpGrid, node: LightNode, number: int) -> None:
    model = {name: array + number for name, array in MODEL.items()}
    content = RecordDict({ARRAYS: to_record(model), "config": ConfigRecord({"round": number})})
    ids = list(grid.push_messages([Message(content, node.id, "train")]))
    node.answer(*node.receive(), lambda message, _: Message(_trained(message), reply_to=message))
    (reply,) = grid.pull_messages(ids)
    assert reply.has_content()


def _trained(message: Message) -> RecordDict:
    return RecordDict({ARRAYS: to_record({name: array + 0.5 for name, array in MODEL.items()})})


def main() -> None:
    """Print the table."""
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    machine()
    quiet()
    # One request after the other, so that none counts the time of another.
    vars(inflatable_utils)["get_num_workers"] = lambda _: 1
    plain = dict(vars(fleet_handlers))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloister-")))
        database.set_up(10**9)
        short: Any = closed_app(configuration(folder / "state.db")).app  # within the door, which reads no message
        flower, ours = short.app, dict(vars(fleet_handlers))
        found = []
        for app, handlers in 2 * [(flower, plain), (short, ours)]:
            vars(fleet_handlers).update(handlers)
            found.append(exchange(app, flower.state.linkstate_factory.state(), messages))
    paths = [path for path, count in found[0].count.items() if count >= messages]
    lines = [
        [path.removeprefix("/v1/"), f"{found[0].count[path] / messages:.0f}", *_cost(found, [path], messages)]
        for path in paths
    ]
    lines.append(
        ["all", f"{sum(found[0].count[path] for path in paths) / messages:.0f}", *_cost(found, paths, messages)]
    )
    table(["request", "a message", "ms of them, Flower's way", "ours"], lines)


def _cost(found: list[Timed], paths: list[str], messages: int) -> list[str]:
    """Milliseconds of a message's requests on each way, of two measurements the lesser."""
    spent = [sum(way.seconds[path] for path in paths) for way in found]
    return [f"{1e3 * min(spent[at::2]) / messages:.0f}" for at in (0, 1)]


if __name__ == "__main__":
    main()
