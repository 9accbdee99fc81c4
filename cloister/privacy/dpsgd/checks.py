"""Refuse models that DP-SGD cannot train, and choose how the gradients of units are computed.

A few kinds of layers are refused by name, for their remedy (`refusals`). A model whose graph provably takes several
examples together is refused (`isolation`). A model that cannot be looked at layer by layer is computed unit by unit.
"""

import re

import keras
import tensorflow as tf

from cloister.core.errors import UnsupportedModel
from cloister.core.model_state import is_seed
from cloister.core.tensors import Network, Tensor
from cloister.privacy.dpsgd.capture import NotCapturable
from cloister.privacy.dpsgd.draws import seeded, seeds_of
from cloister.privacy.dpsgd.gradients import Gradients
from cloister.privacy.dpsgd.graph_state import refuse_state
from cloister.privacy.dpsgd.isolation import Mixes, Unproved, prove
from cloister.privacy.dpsgd.losses import Loss, losses_of
from cloister.privacy.dpsgd.probe import Probe, check_probe
from cloister.privacy.dpsgd.reductions import chained_sums
from cloister.privacy.dpsgd.refusals import LEARNT, refuse_by_name, refusing_what_cannot_be_computed

CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
LARGE = 1 << 16
"""Weights of matrices from which on rows are faster than turns for a network with convolutions, measured."""
UNITS = 11
"""Examples in a trace: a number that other axes of a model rarely have."""
PENALTY = (
    "a layer adds a loss of its own (add_loss or a regularizer), which is not an example's; add it to the loss "
    "function, or use weight_decay of the optimizer"
)


def checked(model: Network, loss: Loss, probe: Probe, group_cap: int) -> Gradients | None:
    """Return the model's gradients layer by layer; None: they are to be computed one unit in turn.

    Nothing is computed of the probe: its shapes and types are what counts.

    Args:
        model: built, of one input and one output.
        loss: (labels, outputs) -> (batch,), each of its own example alone.
        probe: x and y of a few examples, of which the shapes and types count.
        group_cap: the most examples of a unit.

    Raises:
        UnsupportedModel: the model cannot be trained with DP-SGD, with the reason and what to use in its place.
        ConfigError: the probe has another number of examples, or the loss does not give a number for each.
    """
    check_probe(probe)
    refuse_by_name(model)
    with refusing_what_cannot_be_computed():
        _refuse_mixed_losses(model, loss, probe)
        if _is_faster_in_turn(model, group_cap):
            return None
        try:
            gradients = Gradients(model, loss)
        except NotCapturable:
            return None
        return gradients if _reach_all(gradients, probe) else None


def _is_faster_in_turn(model: Network, group_cap: int) -> bool:
    """Return whether units are cheap one by one: an example keeps the processor busy, and its gradient is small.

    In turn a unit's gradient is made as a whole, but for that of a dense layer, if a unit is one example. That is
    little beside convolutions, and much for a large matrix.
    """
    leaves = [layer for layer in model._flatten_layers() if layer.trainable_variables and not list(layer._layers)]
    made = keras.layers.Embedding if group_cap == 1 else (keras.layers.Embedding, keras.layers.Dense)
    large = sum(layer.count_params() for layer in leaves if isinstance(layer, made))
    return large < LARGE and any(isinstance(layer, CONVOLUTIONS) for layer in leaves)


def _refuse_mixed_losses(model: Network, loss: Loss, probe: Probe) -> None:
    """Refuse a model whose losses provably depend on several examples, or that changes its state.

    Raises:
        UnsupportedModel: names the layer, and what to use in its place.
    """
    scopes: list[keras.StatelessScope] = []

    def losses(x: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
        with keras.StatelessScope(seeded(model, seeds), collect_losses=True) as scope, chained_sums():
            scopes.append(scope)
            return losses_of(model, loss, x, y)

    specs = _specs(probe)
    specs.append(tf.TensorSpec([len(seeds_of(model)), 2], tf.int64))
    graph = tf.function(losses, autograph=False).get_concrete_function(*specs).graph
    _refuse_changes(model, scopes[-1])
    refuse_state(graph, model)
    try:
        prove(graph, UNITS, graph.inputs[:2], graph.outputs)
    except Mixes as found:
        _refuse_mixing(model, found)
    except Unproved:
        pass  # units in turn do not meet


def _refuse_mixing(model: Network, found: Mixes) -> None:
    """Refuse a model of which an operation takes several examples together.

    Raises:
        UnsupportedModel: names the layer, if the operation is a layer's.
    """
    # TensorFlow numbers the scopes of a layer that is called more than once.
    names = {part for scope in found.operation.split("/") for part in (scope, re.sub(r"_\d+$", "", scope))}
    layer = next((each for each in model._flatten_layers(include_self=False) if each.name in names), None)
    place = f"layer {layer.name!r} ({type(layer).__name__})" if layer else "the model or its loss"
    raise UnsupportedModel(
        f"{place} takes the examples of a batch together ({found.kind}: {found.reason}), so that none has a gradient "
        "of its own; use a layer that works on each example alone, as GroupNormalization does for BatchNormalization"
    )


def _refuse_changes(model: Network, scope: keras.StatelessScope) -> None:
    if model.losses or scope.losses:
        raise UnsupportedModel(PENALTY)
    state = [variable for variable in model.non_trainable_variables if not is_seed(variable)]
    changed = [variable.path for variable in state if scope.get_current_value(variable) is not None]
    if changed:
        raise UnsupportedModel(f"{changed[0]} changes {LEARNT}")


def _reach_all(gradients: Gradients, probe: Probe) -> bool:
    """Return whether a trace of the model shows no way from weights to losses past their layers."""
    found: list[bool] = []

    def trace(x: Tensor, y: Tensor) -> None:
        found.append(gradients.reach_all(x, y))

    tf.function(trace, autograph=False).get_concrete_function(*_specs(probe))
    return found[0]


def _specs(probe: Probe) -> list[tf.TensorSpec]:
    """Return what a trace of `UNITS` examples takes."""
    return [tf.TensorSpec([UNITS, *array.shape[1:]], array.dtype) for array in probe]
