"""Checks that refuse models and processors without a guarantee for DP-SGD, with the reason and a remedy.

A few kinds of layers are refused by name, for their remedy. A model is also refused if its graph provably combines
several examples (`isolation`), adds a loss of its own or changes its state.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from cloister.privacy.dpsgd.isolation import Mixes, Unproved, prove
from cloister.privacy.dpsgd.tracing import (
    LEARNT,
    Loss,
    Probe,
    chained_sums,
    check_probe,
    losses_of,
    refuse_effects,
    seeded,
    seeds_of,
    specs_of,
)
from cloister.utils.arrays import Layer, Network, Tensor, is_seed
from cloister.utils.errors import CloisterError, ConfigError, UnsupportedModel

DTYPES = ("float32", "float64")
ACTIVITY = "activity_regularizer"
GIVEN = ("input_mean", "input_vocabulary", "bin_boundaries")
"""Attributes of a preprocessing layer that hold given values, not values learnt from data."""
PENALTIES = ("kernel_regularizer", "bias_regularizer", ACTIVITY)
"""Attributes of a layer that add to the loss of the batch; those on the weights of a frozen layer add nothing."""
UNITS = 11
"""Number of examples in a trace: a length that other axes of a model rarely have."""
PENALTY = (
    "a layer adds a loss of its own (add_loss or a regularizer), which is not an example's; add it to the loss "
    "function, or use weight_decay of the optimizer"
)
COARSE_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
"""Environment variables that let oneDNN compute products of float32 numbers in fewer bits."""


@contextmanager
def as_unsupported_model() -> Iterator[None]:
    """Convert third-party exceptions to UnsupportedModel, with type, without message."""
    try:
        yield
    except CloisterError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"gradients of this model cannot be computed: {type(error).__name__} while its training was traced; "
            "`model.fit` on a few examples with run_eagerly=False shows where"
        ) from error


def refuse(model: Network, loss: Loss, probe: Probe) -> None:
    """Refuse a model that DP-SGD cannot train.

    Args:
        model, loss, probe: as in `step.DpSgd`.

    Raises:
        UnsupportedModel: the model cannot be trained with DP-SGD, with the reason and the replacement.
        ConfigError: the probe has another number of examples, or the loss does not return a number for each.
    """
    check_probe(probe)
    for layer in model._flatten_layers():
        for reason in _reasons(layer):
            raise UnsupportedModel(f"layer {layer.name!r} ({type(layer).__name__}) {reason}")
    if not model.trainable_variables:
        raise UnsupportedModel("the model has no trainable weights")
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
        raise UnsupportedModel(PENALTY)
    state = [variable for variable in model.non_trainable_variables if not is_seed(variable)]
    changed = [variable.path for variable in state if scopes[-1].get_current_value(variable) is not None]
    if changed:
        raise UnsupportedModel(f"{changed[0]} changes {LEARNT}")
    refuse_effects(graph, model)
    try:
        prove(graph, UNITS, graph.inputs[: len(tf.nest.flatten(specs))], graph.outputs)
    except Mixes as found:
        # TensorFlow appends a number to the scopes of a layer that is called more than once.
        names = {part for scope in found.operation.split("/") for part in (scope, re.sub(r"_\d+$", "", scope))}
        layer = next((each for each in model._flatten_layers(include_self=False) if each.name in names), None)
        place = f"layer {layer.name!r} ({type(layer).__name__})" if layer else "the model or its loss"
        raise UnsupportedModel(
            f"{place} takes the examples of a batch together ({found.kind}: {found.reason}), so that none has a "
            "gradient of its own; use a layer that works on each example alone, as GroupNormalization does for "
            "BatchNormalization"
        ) from found
    except Unproved:
        pass  # units in turn do not meet


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
    if any(getattr(layer, name, None) for name in PENALTIES if layer.trainable or name == ACTIVITY):
        yield "adds a penalty to the loss of the batch; use weight_decay of the optimizer, or add it to the loss"
    if layer.compute_dtype != layer.variable_dtype or layer.compute_dtype not in DTYPES:
        yield f"computes in {layer.compute_dtype}, whose norms are too coarse to bound; use float32"


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
    for name in COARSE_MODES:
        if os.environ.get(name, "strict").lower() not in ("", "strict"):
            raise ConfigError(
                f"environment variable {name} must be unset or STRICT for DP-SGD, got {os.environ[name]!r}"
            )
