"""Many nodes in one process: each connects, polls, fetches, trains and sends as a SuperNode and its client do.

A node is a thread. Flower's connection, which real nodes use, waits where it asks: an event loop would need another
one, and that would be what is measured.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, NoReturn

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.common.config import get_fused_config_from_fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supernode import fleet_http_connection
from flwr.supernode.fleet_http_connection import http_request_response

from cloister.client.app import app
from cloister.deploy.warm.supernode import Polling

FLOWERS = 3.0
"""Seconds between two looks of Flower's SuperNode."""
JOINED = 30
"""Seconds for a node to take its leave."""
Polls = Callable[[Event], Polling | None]


def adaptive(stopped: Event) -> Polling:
    """As `cloister warm-node` polls."""
    return Polling(sleep=lambda seconds: _slept(stopped, seconds))


def often(stopped: Event) -> Polling:
    """As it polls just after a message, all the time."""
    return Polling(0.1, 0.1, sleep=lambda seconds: _slept(stopped, seconds))


def never(stopped: Event) -> Polling:
    """Looking once: what is left are heartbeats."""
    return Polling(sleep=lambda _: _slept(stopped, None))


def as_flower(stopped: Event) -> None:
    """As `flower-supernode` polls."""


class LightNodes:
    """Nodes with keys of their own, a thread and a connection each; on leaving the `with` block they take their leave.

    Args:
        address: of the SuperLink, host:port.
        keys: files of their private keys; each node has its part of the task's benchmark data.
        authority: path of the certificate that vouches for the SuperLink.
        polls: how they poll.

    Attributes:
        connected: the ids of those that were let in.
        looks: how often they looked for messages, all of them together; near enough.
        answered: messages that each of them has answered, by its id.
        errors: what ended one of them.
    """

    def __init__(self, address: str, keys: Sequence[Path], authority: str, polls: Polls = adaptive) -> None:
        self.address, self.authority, self.polls = address, authority, polls
        self.connected: list[int] = []
        self.looks = 0
        self.answered: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self._turn, self._stopped = Lock(), Event()
        self._names = vars(fleet_http_connection)
        self._exit = self._names["flwr_exit"]
        configs = [{"partition-id": number, "num-partitions": len(keys)} for number in range(len(keys))]
        lives = zip(keys, configs, strict=True)
        self._threads = [Thread(target=self._live, args=life, daemon=True) for life in lives]

    def __enter__(self) -> "LightNodes":
        # A node that is not let in would end the process, and all others with it.
        self._names["flwr_exit"] = _refused
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOINED)
        self._names["flwr_exit"] = self._exit

    def _live(self, key: Path, config: dict[str, int]) -> None:
        try:
            private: Any = load_ssh_private_key(key.read_bytes(), None)
            pair = private, private.public_key()
            with http_request_response(self.address, False, self.authority, pair) as connection:
                self.connected.append(connection[0])
                self._work(LightNode(connection, config))
        except Exception as error:
            self.errors.append(error)

    def _work(self, node: "LightNode") -> None:
        """The loop of Flower's SuperNode. Errors are kept here: its connection only logs them."""
        polling = self.polls(self._stopped)
        look = polling.looking(node.receive) if polling else node.receive
        try:
            while not self._stopped.is_set():
                self.looks += 1
                if (found := look()) is not None:
                    node.answer(*found, self._answer)
                    self.answered[node.id] = self.answered.get(node.id, 0) + 1
                elif polling:
                    polling.pause(FLOWERS)
                else:
                    self._stopped.wait(FLOWERS)
        except Exception as error:
            self.errors.append(error)

    def _answer(self, message: Message, context: Context) -> Message:
        """The app's answer; one at a time, as an app expects a process of its own."""
        with self._turn:
            return app(message, context)


class LightNode:
    """One node's requests and replies, and its memory of each run.

    Args:
        connection: of Flower's SuperNode.
        config: the node configuration.
    """

    def __init__(self, connection: tuple[Any, ...], config: dict[str, int]) -> None:
        self.id, self.receive, self.send, self.get_run, self.get_fab = connection[:5]
        self.pull_object, self.push_object, self.confirm = connection[5:]
        self.config = config
        self.contexts: dict[int, Context] = {}

    def answer(self, message: Message, tree: Any, work: Callable[[Message, Context], Message]) -> None:
        """Fetch a message, and send what `work` makes of it."""
        run = message.metadata.run_id
        context = self.contexts.get(run) or self._joined(run)
        contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], partial(self.pull_object, run))
        self.confirm(run, message.metadata.message_id)
        asked: Any = inflate_object_from_contents(tree.object_id, contents)
        asked.metadata.__dict__["_message_id"] = message.metadata.message_id
        self._push(work(asked, context))

    def _joined(self, run: int) -> Context:
        """Return an app's view of a run, whose settings and bundle are fetched for it."""
        about = self.get_run(run)
        settings = get_fused_config_from_fab(self.get_fab(about.fab_hash, run).content, about)
        self.contexts[run] = Context(run, self.id, dict(self.config), RecordDict(), settings)
        return self.contexts[run]

    def _push(self, reply: Message) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        missing, session = self.send(reply, get_object_tree(reply), 0.0)
        push_object_contents_from_iterable(
            ((name, objects[name].deflate()) for name in missing),
            partial(self.push_object, reply.metadata.run_id, session),
        )


def _refused(code: int, message: str = "") -> NoReturn:
    raise ConnectionError(message)


def _slept(stopped: Event, seconds: float | None) -> None:
    stopped.wait(seconds)
