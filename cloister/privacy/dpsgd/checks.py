"""Checks that refuse models and processors without a guarantee for DP-SGD, with the reason and a remedy.

A few kinds of layers are refused by name, for their remedy. A model is also refused if its graph provably combines
several examples (`isolation`), adds a loss of its own or changes its state.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from cloister.privacy.dpsgd.descent import refuse_coarse_modes
from cloister.privacy.dpsgd.isolation import prove
from cloister.privacy.dpsgd.labels import Mixes, NotIsolated, Unproved
from cloister.privacy.dpsgd.nested import Probe, check_probe
from cloister.privacy.dpsgd.tracing import (
    LEARNT,
    Loss,
    chained_sums,
    layer_at,
    layer_in,
    losses_of,
    named,
    refuse_effects,
    seeded,
    seeds_of,
    specs_of,
)
from cloister.utils.arrays import Layer, Network, Tensor, is_seed
from cloister.utils.crash import explained
from cloister.utils.errors import CloisterError, ConfigError, UnsupportedModel

DTYPES = ("float32", "float64")
ACTIVITY = "activity_regularizer"
GIVEN = ("input_mean", "input_vocabulary", "bin_boundaries")
"""Attributes of a preprocessing layer that hold given values, not values learnt from data."""
PENALTIES = ("kernel_regularizer", "bias_regularizer", ACTIVITY)
"""Attributes of a layer that add to the loss of the batch; those on the weights of a frozen layer add nothing."""
UNITS = 11
"""Number of examples in a trace: a length that other axes of a model rarely have."""
DECAY = "client.optimizer-options = 'weight_decay={:g}', which decays every weight"
"""Remedy for a penalty on weights. In plain SGD, decay by d is a step along the gradient of d/2 times their squares; in
Adam it is decoupled from the gradient.
"""
SOME_DECAY = 0.01
"""Decay in place of a penalty that is no multiple of the squares."""


@contextmanager
def as_unsupported_model(model: Network) -> Iterator[None]:
    """Convert third-party exceptions to UnsupportedModel, with the layer, the type and the place.

    The message is omitted, except for the owner of the data (`crash.for_owner`).
    """
    try:
        yield
    except CloisterError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{layer_at(error, model, 'the model or its loss')} fails while its training is traced, with "
            f"{explained(error)}; it must work inside tf.function without autograph, such as with keras.ops"
        ) from error


def why_in_turn(error: Exception, model: Network) -> str:
    """Return why a model is not computed in rows, with the layer where it is known.

    Args:
        error: raised by `InRows`.
        model: that is computed in turn.
    """
    if isinstance(error, NotIsolated):
        place = layer_in(error.operation, model, "the model or its loss")
        return f"{place} is not proved to keep examples apart: {error.kind} {error.reason}"
    if isinstance(error, CloisterError):
        return str(error)
    return f"{layer_at(error, model, 'the model or its loss')} fails with several examples: {explained(error)}"


def refuse(model: Network, loss: Loss, probe: Probe) -> tuple[tf.Graph, Unproved | None]:
    """Refuse a model that DP-SGD cannot train.

    Args:
        model, loss, probe: as in `step.DpSgd`.

    Returns:
        The graph of the losses of several examples, and why it is not proved to keep them apart; None if it is.

    Raises:
        UnsupportedModel: the model cannot be trained with DP-SGD, with the reason and the replacement.
        ConfigError: the probe has another number of examples, or the loss does not return a number for each.
    """
    check_probe(probe)
    for layer in model._flatten_layers():
        for reason in _reasons(layer):
            raise UnsupportedModel(f"{named(layer)} {reason}")
    if not model.trainable_variables:
        remedy = "set trainable = True on a layer" if model.built else "build it, such as by model.build((None, 13))"
        raise UnsupportedModel(f"the model has no trainable weights; {remedy}")
    scopes: list[keras.StatelessScope] = []

    def losses(x: Tensor, y: Tensor, seeds: Tensor) -> Tensor:
        values = [(variable, tf.convert_to_tensor(variable.value)) for variable in model.trainable_variables]
        with keras.StatelessScope([*values, *seeded(model, seeds)], collect_losses=True) as scope, chained_sums():
            scopes.append(scope)
            return losses_of(model, loss, x, y)

    specs = [specs_of([UNITS], examples) for examples in probe]
    seeds = tf.TensorSpec([len(seeds_of(model)), 2], tf.int64)
    graph = tf.function(losses, autograph=False).get_concrete_function(*specs, seeds).graph
    if model.losses or scopes[-1].losses:
        penalised = [variable for variable in model.trainable_variables if variable.regularizer is not None]
        if penalised:
            decay = _decay(penalised[0].regularizer)
            raise UnsupportedModel(f"weight {penalised[0].path!r} adds a penalty; leave it out, and set {decay}")
        added = next((named(each) for each in model._flatten_layers() if getattr(each, "_loss_ids", None)), "the model")
        raise UnsupportedModel(f"{added} adds a loss of its own (add_loss), which is not an example's; leave it out")
    state = [variable for variable in model.non_trainable_variables if not is_seed(variable)]
    changed = [variable.path for variable in state if scopes[-1].get_current_value(variable) is not None]
    if changed:
        raise UnsupportedModel(f"{changed[0]} changes {LEARNT}")
    refuse_effects(graph, model)
    try:
        prove(graph, UNITS, graph.inputs[: len(tf.nest.flatten(specs))], graph.outputs)
    except Mixes as found:
        place = layer_in(found.operation, model, "the model or its loss")
        raise UnsupportedModel(
            f"{place} takes the examples of a batch together ({found.kind}: {found.reason}), so that none has a "
            "gradient of its own; use a layer that works on each example alone, as GroupNormalization does for "
            "BatchNormalization"
        ) from found
    except Unproved as found:
        return graph, found  # units in turn do not meet
    return graph, None


def _reasons(layer: Layer) -> Iterator[str]:
    layers = keras.layers
    if type(layer).__name__ in ("MixUp", "CutMix"):
        yield "mixes the examples of a batch at random; leave it out"
    if isinstance(layer, layers.BatchNormalization) and layer.trainable:
        yield (
            "normalises an example with the others of its batch and keeps their statistics un-noised; "
            "use keras.layers.GroupNormalization or LayerNormalization"
        )
    if hasattr(layer, "adapt") and all(getattr(layer, name, None) is None for name in GIVEN):
        yield (
            "learns from data outside of the private steps; use keras.layers.Rescaling, "
            "or give the layer a public mean and variance, vocabulary or bin_boundaries"
        )
    if getattr(layer, "stateful", False):
        yield "carries state from batch to batch; set stateful=False"
    for name in PENALTIES:
        penalty = getattr(layer, name, None)
        if penalty and (layer.trainable or name == ACTIVITY):
            instead = "" if name == ACTIVITY else f", and set {_decay(penalty)}"
            yield f"adds a penalty to the loss of the batch; leave its {name} out{instead}"
    if layer.compute_dtype != layer.variable_dtype or layer.compute_dtype not in DTYPES:
        yield f"computes in {layer.compute_dtype}, whose norms are too coarse to bound; use float32"


def _decay(penalty: keras.regularizers.Regularizer) -> str:
    """Return the setting of weight decay that takes the place of a penalty.

    In plain SGD, decay moves the weights with an L2 penalty as the penalty did; it moves all other weights too.
    """
    share = float(getattr(penalty, "l2", 0.0))
    return DECAY.format(2 * share or SOME_DECAY)


def use_single_precision() -> None:
    """Disable TensorFloat-32 in this process: its 11-bit products break bounds."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    refuse_coarse_precision()


def refuse_coarse_precision() -> None:
    """Refuse settings under which float32 products may be coarser than float32.

    Raises:
        ConfigError: TensorFloat-32 is on, or the environment lets oneDNN use a coarser format.
    """
    if tf.config.experimental.tensor_float_32_execution_enabled():
        raise ConfigError(
            "TensorFloat-32 is on, and clipping cannot be bounded in it; leave "
            "tf.config.experimental.enable_tensor_float_32_execution(False) as DpSgd sets it"
        )
    refuse_coarse_modes()
