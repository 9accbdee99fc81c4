"""Refuse models with the name of the layer, the reason and a replacement."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from cloister.core.errors import CloisterError, UnsupportedModel
from cloister.core.tensors import Layer, Network

DTYPES = ("float32", "float64")
LEARNT = "while training: state learnt from data without noise; use a layer without state"
ACTIVITY = "activity_regularizer"
GIVEN = ("input_mean", "input_vocabulary", "bin_boundaries")
"""Attributes of a preprocessing layer that hold what its maker gave it, and not what it learnt from data."""
PENALTIES = ("kernel_regularizer", "bias_regularizer", ACTIVITY)
"""Attributes of a layer that add to the loss of the batch; those on the weights of a frozen layer add nothing."""


@contextmanager
def refusing_what_cannot_be_computed() -> Iterator[None]:
    """Raises UnsupportedModel in the place of any exception that is none of ours, with its type and not its text."""
    try:
        yield
    except CloisterError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"gradients of this model cannot be computed: {type(error).__name__} while its training was traced; "
            "`model.fit` on a few examples with run_eagerly=False shows where"
        ) from error


def refuse_by_name(model: Network) -> None:
    """Refuse what is known not to have private per-example gradients.

    Raises:
        UnsupportedModel: names the layer, the reason and the replacement.
    """
    for layer in model._flatten_layers():
        for reason in _reasons(layer):
            raise UnsupportedModel(f"layer {layer.name!r} ({type(layer).__name__}) {reason}")
    if not model.trainable_variables:
        raise UnsupportedModel("the model has no trainable weights")


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
