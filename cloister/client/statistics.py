"""Statistics that stay at a site: the state of its model, kept from round to round in Flower's state of the node."""

from cloister.client.node import Node
from cloister.tasks.base import KeepsState, Model
from cloister.utils.arrays import from_record, to_record

STATISTICS = "statistics"
"""Name of the record in the node's state."""


def restore_statistics(model: Model, node: Node) -> None:
    """Give a model the statistics that this node keeps, or those of a new model before its first training.

    Args:
        model: of the run. All simulated nodes share it.
        node: that replies.
    """
    if not isinstance(model, KeepsState) or not model.kept():
        return
    found = node.state.array_records.get(STATISTICS)
    model.assign_kept(None if found is None else from_record(found))


def keep_statistics(model: Model, node: Node) -> None:
    """Store the statistics of a trained model in the state of the node; do nothing if they are sent, or there are none.

    Args:
        model: after training.
        node: that replies.
    """
    if isinstance(model, KeepsState) and (own := model.kept()):
        node.state[STATISTICS] = to_record(own)
