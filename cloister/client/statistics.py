"""Statistics that stay at a site: the state of its model, kept from round to round in Flower's state of the node."""

import numpy as np
from flwr.app import ConfigRecord

from cloister.client.node import Node
from cloister.tasks.base import KeepsState, Model

STATISTICS = "statistics"
"""Name of the record in the node's state."""


def restore_statistics(model: Model, node: Node) -> None:
    """Give a model the statistics that this node keeps, or those of a new model before its first training.

    Args:
        model: of the run. All simulated nodes share it.
        node: that replies.
    """
    if not isinstance(model, KeepsState) or not (own := model.kept()):
        return
    found = node.state.config_records.get(STATISTICS)
    if found is None:
        model.assign_kept(None)
        return
    # A node's state holds flat lists of floats.
    model.assign_kept({name: np.array(found[name], one.dtype).reshape(one.shape) for name, one in own.items()})


def keep_statistics(model: Model, node: Node) -> None:
    """Store the statistics of a trained model in the state of the node; do nothing if they are sent, or there are none.

    Args:
        model: after training.
        node: that replies.
    """
    if isinstance(model, KeepsState) and (own := model.kept()):
        node.state[STATISTICS] = ConfigRecord({name: array.ravel().tolist() for name, array in own.items()})
