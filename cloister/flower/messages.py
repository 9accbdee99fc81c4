"""Messages between nodes and the server's app, and the grid by which the app reaches nodes."""

from collections.abc import Callable, Iterator

from flwr.app import Context, Message

# A message with given metadata: the public class makes new metadata.
from flwr.app.message import make_message as make_message

# The size of the pieces in which Flower stores an array.
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

# The sender of errors that Flower makes.
from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK_NODE_ID

# The codes of errors.
from flwr.common.constant import ErrorCode as ErrorCode

# Messages and objects on the wire.
from flwr.proto import message_pb2 as message_pb2

# Seconds for which a SuperLink knows messages whose objects are still to come.
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS as OBJECT_PUSH_SESSION_TTL_SECONDS

# The error of a grid whose SuperLink declines an object.
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError

# A run: the public class `Grid` has one.
from flwr.supercore.run import Run as Run

# The run of a process, without which no message can be made.
from flwr.supercore.task_identity import TaskIdentity

LOCAL_RUN = 1
CallNext = Callable[[Message, Context], Message]
"""The function that a mod calls for the reply; Flower documents it without a public name."""


def assume_run() -> None:
    """Name a run for this process, so that messages can be made outside Flower: in simulations, audits and tests.

    A process that Flower has started has a run, and keeps it.
    """
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = LOCAL_RUN, SUPERLINK_NODE_ID, LOCAL_RUN


def names_in(tree: message_pb2.ObjectTree) -> Iterator[str]:
    """Return the names of a message's objects, parts before their whole.

    Args:
        tree: of the message.
    """
    for part in tree.children:
        yield from names_in(part)
    yield tree.object_id


def is_over_http(grid: object) -> bool:
    """Return whether a grid reaches its nodes over a SuperLink."""
    return _is_flowers(grid, "HttpGrid")


def is_simulation(grid: object) -> bool:
    """Return whether a grid is that of Flower's simulation."""
    return _is_flowers(grid, "InMemoryGrid")


def _is_flowers(grid: object, name: str) -> bool:
    # By name: no run waits a second for the import of a grid that it does not have.
    return any(cls.__name__ == name and cls.__module__.startswith("flwr.") for cls in type(grid).__mro__)
