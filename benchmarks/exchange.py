"""Cost of a message to one node and its reply: requests and time of a SuperLink, on Flower's way and on ours.

python benchmarks/exchange.py [messages] [arrays] [numbers]

The model has so many arrays, of so many numbers together; by default two and 650, as softmax regression of digits. On
Flower's way each array is an object, and its SuperLink has nothing in front of it. On ours messages and replies are
packed, behind the gate and the shortcut of `cloister superlink`. The clients call the SuperLink as its web server
would, in this process and one request after the other; its database is on disk. The web server, TLS, and what is lost
when requests wait for each other come on top.
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
from numpy.typing import NDArray
from starlette.testclient import TestClient

from cloister.client.mods import open_and_pack
from cloister.deploy.superlink.serve import closed_app, set_up_databases
from cloister.server.packed_grid import PackedGrid
from cloister.server.polling_grid import MAXIMUM
from cloister.utils.arrays import from_record, to_record
from cloister.utils.wire import ARRAYS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtimes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "provision"))
from light_nodes import LightNode
from test_superlink import configuration

ADDRESS = "superlink:1"
Model = dict[str, NDArray]


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


def exchange(app: Any, state: Any, model: Model, messages: int, packs: bool) -> Timed:
    """Send messages to one node, and fetch its replies; packed, or as Flower sends them."""
    timed, clients = Timed(app), vars(protobuf_client)["httpx"]
    plain, clients.Client = clients.Client, lambda **_: TestClient(timed, base_url=f"http://{ADDRESS}")
    try:
        flower, run = _grid(state)
        grid = PackedGrid.over(flower) if packs else flower
        with http_request_response(ADDRESS, True) as connection:
            node = LightNode(connection, {})
            node.contexts[run] = Context(run, node.id, {}, RecordDict(), {})
            for number in range(messages + 1):
                if number == 1:  # what is made on first use is no cost of a message
                    timed.count.clear()
                    timed.seconds.clear()
                state.acknowledge_task_heartbeat(TaskIdentity.task_id)
                _one(grid, node, {name: array + number for name, array in model.items()})
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


def _one(grid: HttpGrid, node: LightNode, model: Model) -> None:
    content = RecordDict({ARRAYS: to_record(model), "config": ConfigRecord({"round": 1})})
    ids = list(grid.push_messages([Message(content, node.id, "train")]))
    node.answer(*node.receive(), lambda message, context: open_and_pack(message, context, _trained))
    (reply,) = grid.pull_messages(ids)
    assert reply.has_content()


def _trained(message: Message, _: Context) -> Message:
    arrays = {name: array + np.float32(0.5) for name, array in from_record(message.content[ARRAYS]).items()}
    return Message(RecordDict({ARRAYS: to_record(arrays)}), reply_to=message)


def main() -> None:
    """Print the table."""
    messages, arrays, numbers = [*map(int, sys.argv[1:]), *(30, 2, 650)[len(sys.argv) - 1 :]]
    rng = np.random.default_rng(0)
    model = {str(number): rng.random(numbers // arrays, np.float32) for number in range(arrays)}
    MAXIMUM.follow(to_record(model))
    machine()
    quiet()
    # One request after the other, so that none counts the time of another.
    vars(inflatable_utils)["get_num_workers"] = lambda _: 1
    plain = dict(vars(fleet_handlers))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cloister-")))
        set_up_databases(10**9)
        short: Any = closed_app(configuration(folder / "state.db"))
        flower, ours = short.app, dict(vars(fleet_handlers))
        found = []
        for app, handlers, packs in 2 * [(flower, plain, False), (short, ours, True)]:
            vars(fleet_handlers).update(handlers)
            found.append(exchange(app, flower.state.linkstate_factory.state(), model, messages, packs))
    paths = [path for path, count in found[0].count.items() if count >= messages]
    lines = [[path.removeprefix("/v1/"), *_cost(found, [path], messages)] for path in paths]
    lines.append(["all", *_cost(found, paths, messages)])
    table(["request", "Flower's way", "ms of them", "ours", "ms of them"], lines)


def _cost(found: list[Timed], paths: list[str], messages: int) -> list[str]:
    """Requests of a message on each way, and their milliseconds, of two measurements the lesser."""
    cells = []
    for way in (found[0::2], found[1::2]):
        cells.append(f"{sum(way[0].count[path] for path in paths) / messages:.0f}")
        cells.append(f"{1e3 * min(sum(each.seconds[path] for path in paths) for each in way) / messages:.0f}")
    return cells


if __name__ == "__main__":
    main()
