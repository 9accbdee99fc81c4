"""Making Flower messages outside a Flower run: in one process, in audits, in tests."""

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

LOCAL_RUN = 1


def assume_run() -> None:
    """Say which run this process is in, as Flower's own runtimes do: a message cannot be made without.

    A process that Flower has started has said so already and is left alone.
    """
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = LOCAL_RUN, SUPERLINK_NODE_ID, LOCAL_RUN
