"""Flower grid whose nodes are function calls, in a process that reuses its memory between models."""

import ctypes
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from uuid import uuid4

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from cloister.config.io import Scalar
from cloister.config.run import RunConfig
from cloister.flower.messages import LOCAL_RUN, ErrorCode, Run, assume_run
from cloister.server.polling_grid import WatchedGrid, answered, asked_to, noop
from cloister.utils.crash import WITHHELD, Failure, for_owner
from cloister.utils.errors import FederationError, NodeConfigError
from cloister.utils.files import Json, JsonTable
from cloister.utils.wire import LEAKAGE, NOISED_LEAKAGE, number

MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD = -3, 32 << 20
"""Key of the array size in bytes from which glibc maps each array separately, and its largest value."""
TRIM_THRESHOLD, KEPT = -1, 512 << 20
"""Key of the number of free bytes that glibc keeps at the end of its heap, and its value."""


@cache
def keep_memory() -> None:
    """Let glibc reuse freed memory for later arrays. Without glibc this has no effect.

    The models of a round are freed together. By default, glibc returns their pages, and the kernel clears each page for
    the next round. Arrays of more than 32 MB are still mapped separately. The setting applies to the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
    mallopt(TRIM_THRESHOLD, KEPT)


class LocalGrid(WatchedGrid):
    """Grid that calls a ClientApp once per message, node after node, and keeps each node's context between calls.

    The process keeps the memory of a round's models for the next round (`keep_memory`).

    Args:
        client_app: that every node runs.
        run_config: in every node's context.
        nodes: the configuration of each node; node ids count from 1.
    """

    def __init__(
        self,
        client_app: Callable[[Message, Context], Message],
        run_config: Mapping[str, Scalar],
        nodes: Iterable[Mapping[str, Scalar]],
    ) -> None:
        self.watch = noop
        self._client_app = client_app
        self._contexts = {
            node_id: Context(LOCAL_RUN, node_id, dict(node), RecordDict(), dict(run_config))
            for node_id, node in enumerate(nodes, start=1)
        }
        self._run = Run.create_empty(LOCAL_RUN)
        self._waiting: dict[str, Message] = {}
        assume_run()
        keep_memory()

    @classmethod
    def simulated(
        cls, client_app: Callable[[Message, Context], Message], run_config: Mapping[str, Scalar], clients: int
    ) -> "LocalGrid":
        """Return a grid of simulated clients, each with its part of the benchmark data."""
        nodes = [{"partition-id": index, "num-partitions": clients} for index in range(clients)]
        return cls(client_app, run_config, nodes)

    keeps_memory = True
    """A node's memory persists until its next message."""

    @property
    def is_simulated(self) -> bool:
        """Return whether every node has a part of the benchmark data.

        A node with data of its own makes it False.
        """
        nodes = [context.node_config for context in self._contexts.values()]
        return all("partition-id" in node and "data-path" not in node for node in nodes)

    def set_run(self, run: Run) -> None:
        """Set the run that `run` returns."""
        self._run = run

    @property
    def run(self) -> Run:
        """Return the run of this grid."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store the messages; nodes answer them when their replies are pulled."""
        ids, messages = [], list(messages)
        for message in messages:
            self.watch(message.metadata.dst_node_id, "waiting")
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self._waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have not been pulled yet.

        Each reply is computed when it is iterated over.
        """
        waiting = (self._waiting.pop(message_id, None) for message_id in message_ids)
        return (self._watched(message) for message in waiting if message is not None)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies to these messages, for one iteration.

        Each reply is computed when it is iterated over. A function call cannot be interrupted, so the timeout has no
        effect.
        """
        return self.pull_messages(self.push_messages(messages))

    def memories(self) -> JsonTable:
        """Return the records of the nodes that have some: their releases and their roles."""
        states = {str(node): context.state for node, context in self._contexts.items()}
        found = {
            node: {
                "config": {name: dict(item) for name, item in state.config_records.items()},
                "metrics": {name: dict(item) for name, item in state.metric_records.items()},
            }
            for node, state in states.items()
        }
        return {node: records for node, records in found.items() if any(records.values())}

    def remember(self, memories: Json) -> None:
        """Restore the records of the nodes.

        Args:
            memories: as `memories` returned them.
        """
        for node, records in memories.items():
            state = self._contexts[int(node)].state
            for name, values in records["config"].items():
                state.config_records[name] = ConfigRecord(values)
            for name, values in records["metrics"].items():
                state.metric_records[name] = MetricRecord(values)

    def leakages(self) -> list[float]:
        """Return the leakage (d-privacy) of each simulated client's noised models.

        It excludes the clients' choices.
        """
        records = (context.state.metric_records.get(LEAKAGE) for context in self._contexts.values())
        return [number(record, NOISED_LEAKAGE) if record else 0.0 for record in records]

    def units(self, config: RunConfig, seed: int) -> list[NDArray]:
        """Return the examples, or groups, of each simulated client.

        It is empty if any node has data of its own.

        Args:
            config: of the run.
            seed: in force, which determines the partition.
        """
        from cloister.client.data import units_dealt
        from cloister.client.node import node_of

        found: list[NDArray] = []
        for context in self._contexts.values() if self.is_simulated else ():
            with suppress(NodeConfigError):  # such a node takes no part
                found.append(units_dealt(config.for_clients.task, node_of(context.node_config), seed))
        return found

    def _watched(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        self.watch(node, asked_to(message))
        reply = self._answer(message)
        self.watch(node, answered(reply))
        return reply

    def _answer(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


@contextmanager
def explaining_failures() -> Iterator[list[Failure]]:
    """Show this user what failed in clients of this process, with the texts of exceptions.

    The replies of clients contain no such text. It is added to the error that ends the block, which only the terminal
    shows.

    Yields:
        The failures of clients in the block.

    Raises:
        FederationError: in place of another one, with the texts of its clients' failures.
    """
    with for_owner() as failures:
        try:
            yield failures
        except FederationError as error:
            text = str(error)
            for failure in failures:
                text = text.replace(f"{failure.error}: {WITHHELD}", failure.text)
            if failures and not any(failure.text in text for failure in failures):
                text += f"; {failures[0].text}"
            raise type(error)(text) from error


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Disable this logger during the block."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
