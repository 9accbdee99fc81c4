"""Many nodes in one process: each connects, polls, fetches and sends as a SuperNode does, and none trains anything."""

from collections.abc import Callable
from functools import partial
from threading import Event, Thread
from types import TracebackType
from typing import Any, NoReturn

from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_object_contents_from_iterable,
)
from flwr.supernode import fleet_http_connection
from flwr.supernode.fleet_http_connection import http_request_response

from cloister.core.wire import ARRAYS, EXAMPLES, METRICS
from cloister.deploy.warm.polling import Polling

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
    return Polling(0.5, 0.5, sleep=lambda seconds: _slept(stopped, seconds))


def never(stopped: Event) -> Polling:
    """Looking once: what is left are heartbeats."""
    return Polling(sleep=lambda _: _slept(stopped, None))


def as_flower(stopped: Event) -> None:
    """As `flower-supernode` polls."""


class LightNodes:
    """Nodes with keys of their own, a thread and a connection each; on leaving the `with` block they take their leave.

    Args:
        address: of the SuperLink, host:port.
        count: how many.
        authority: path of the certificate that vouches for the SuperLink; None: without TLS.
        polls: how they poll.

    Attributes:
        connected: the ids of those that were let in.
        looks: how often they looked for messages, all of them together; near enough.
        answered: messages that each of them has answered, by its id.
        errors: what ended one of them.
    """

    def __init__(self, address: str, count: int, authority: str | None = None, polls: Polls = adaptive) -> None:
        self.address, self.authority, self.polls = address, authority, polls
        self.connected: list[int] = []
        self.looks = 0
        self.answered: dict[int, int] = {}
        self.errors: list[BaseException] = []
        self._stopped = Event()
        self._names = vars(fleet_http_connection)
        self._exit = self._names["flwr_exit"]
        self._threads = [Thread(target=self._live, daemon=True) for _ in range(count)]

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

    def _live(self) -> None:
        try:
            with http_request_response(self.address, self.authority is None, self.authority) as connection:
                self.connected.append(connection[0])
                self._work(connection)
        except Exception as error:
            self.errors.append(error)

    def _work(self, connection: tuple[Any, ...]) -> None:
        """The loop of Flower's SuperNode. Errors are kept here: its connection only logs them."""
        node, receive = connection[:2]
        polling = self.polls(self._stopped)
        look = polling.looking(receive) if polling else receive
        try:
            while not self._stopped.is_set():
                self.looks += 1
                if (found := look()) is not None:
                    _answer(connection, *found)
                    self.answered[node] = self.answered.get(node, 0) + 1
                elif polling:
                    polling.pause(FLOWERS)
                else:
                    self._stopped.wait(FLOWERS)
        except Exception as error:
            self.errors.append(error)


def _refused(code: int, message: str = "") -> NoReturn:
    raise ConnectionError(message)


def _slept(stopped: Event, seconds: float | None) -> None:
    stopped.wait(seconds)


def _answer(connection: tuple[Any, ...], message: Message, tree: Any) -> None:
    """Fetch a message, and send its model back as if one example had been trained on in vain."""
    _, _, send, _, _, pull_object, push_object, confirm = connection
    run = message.metadata.run_id
    contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], partial(pull_object, run))
    confirm(run, message.metadata.message_id)
    asked: Any = inflate_object_from_contents(tree.object_id, contents)
    content = RecordDict({ARRAYS: asked.content[ARRAYS], METRICS: MetricRecord({EXAMPLES: 1})})
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = get_all_nested_objects(reply)
    missing, session = send(reply, get_object_tree(reply), 0.0)
    push_object_contents_from_iterable(
        ((name, objects[name].deflate()) for name in missing), partial(push_object, run, session)
    )
