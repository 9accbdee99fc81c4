"""Layers and losses that are known to keep the examples of a batch apart.

A model of these alone is computed for many examples in one pass. Anything else may mix examples in a way that no trial
shows: by less than its tolerance, for some whole numbers, in gradients alone, or by raising an exception. TensorFlow's
vectorisation does so too, for some operations on numbers of an example: it shifts indices, and computes a branch for
the examples that take it. So such a model is computed for one unit at a time, in calls that hold nothing of another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np
from numpy.typing import NDArray

from cloister.core.tensors import Layer, LayerCall, Network
from cloister.privacy.dpsgd.draws import RANDOM_BY_EXAMPLE
from cloister.privacy.dpsgd.vectorised import Loss

_layers, _losses = keras.layers, keras.losses
KNOWN = frozenset(
    (
        *RANDOM_BY_EXAMPLE,
        *(_layers.InputLayer, _layers.Identity, _layers.Masking, _layers.Embedding),
        *(_layers.Dense, _layers.Conv1D, _layers.Conv2D, _layers.Conv3D),
        *(_layers.Conv1DTranspose, _layers.Conv2DTranspose, _layers.Conv3DTranspose),
        *(_layers.SeparableConv1D, _layers.SeparableConv2D, _layers.DepthwiseConv1D, _layers.DepthwiseConv2D),
        *(_layers.MaxPooling1D, _layers.MaxPooling2D, _layers.MaxPooling3D),
        *(_layers.AveragePooling1D, _layers.AveragePooling2D, _layers.AveragePooling3D),
        *(_layers.GlobalMaxPooling1D, _layers.GlobalMaxPooling2D, _layers.GlobalMaxPooling3D),
        *(_layers.GlobalAveragePooling1D, _layers.GlobalAveragePooling2D, _layers.GlobalAveragePooling3D),
        *(_layers.Activation, _layers.ReLU, _layers.LeakyReLU, _layers.PReLU, _layers.ELU, _layers.Softmax),
        *(_layers.Flatten, _layers.Reshape, _layers.Permute, _layers.RepeatVector),
        *(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.ZeroPadding3D),
        *(_layers.Cropping1D, _layers.Cropping2D, _layers.Cropping3D),
        *(_layers.UpSampling1D, _layers.UpSampling2D, _layers.UpSampling3D),
        *(_layers.Concatenate, _layers.Dot),
        *(_layers.LayerNormalization, _layers.GroupNormalization, _layers.UnitNormalization),
        *(_layers.RMSNormalization, _layers.BatchNormalization, _layers.Normalization, _layers.Rescaling),
        *(_layers.SimpleRNN, _layers.LSTM, _layers.GRU),
    )
)
"""Layers, and no subclass of them. A batch normalisation that is trained is refused by name (`refusals`), and dropout
that draws for several examples together is found by `draws.draws_otherwise`."""
MERGING = (_layers.Add, _layers.Subtract, _layers.Multiply, _layers.Average, _layers.Maximum, _layers.Minimum)
"""Layers that are known where all that they are given has one shape: Keras takes some tensors of one number for each
example for a bias, and what else it repeats depends on the first call."""
ATTENTION = (_layers.Attention, _layers.AdditiveAttention, _layers.MultiHeadAttention, _layers.GroupQueryAttention)
"""Layers that are known where all that they are given has three axes."""
MOST_ATTENDED = 3
"""Arguments of an attention, which are queries, values and keys. Masks stand behind them."""
ACTIVATING = (_layers.ReLU, _layers.LeakyReLU, _layers.PReLU, _layers.ELU, _layers.Softmax)
"""Layers that are known as activations: what comes out has the shape of what goes in."""
SCALARS = ("scale", "offset", "mask_value")
"""Parts of a layer's configuration that are known where they are single numbers. An array may add axes in front."""
LOSSES = (
    _losses.sparse_categorical_crossentropy,
    _losses.categorical_crossentropy,
    _losses.categorical_focal_crossentropy,
    _losses.binary_crossentropy,
    _losses.binary_focal_crossentropy,
    _losses.cosine_similarity,
    _losses.huber,
    _losses.log_cosh,
    _losses.mean_absolute_error,
    _losses.mean_absolute_percentage_error,
    _losses.mean_squared_error,
    _losses.mean_squared_logarithmic_error,
)
"""Losses of which each number is of one example. Not `hinge` and `squared_hinge`: they convert labels if all of a batch
are 0 or 1."""
LOSSES_OF_EQUAL_RANKS = (_losses.poisson, _losses.kl_divergence, _losses.categorical_hinge)
"""Others, which are known where labels have as many axes as outputs: labels that are single numbers are repeated for
the outputs of all examples."""
FUNCTIONS = tuple(
    one
    for name, one in vars(keras.activations).items()
    if callable(one) and name not in ("get", "serialize", "deserialize")
)
"""Activations of Keras: they look along the last axis at most."""
ACTIVATIONS = ("activation", "recurrent_activation")
"""Attributes of a layer that hold a function."""
AXES = ("axis", "axes", "attention_axes")
"""Parts of a layer's configuration that name axes."""


def keeps_examples_apart(model: Network, loss: Loss, labels: NDArray) -> bool:
    """Whether a model consists of known layers alone, and the loss is known.

    Not where an example is a single number somewhere: the last axis of such a tensor is that of examples.

    Args:
        model: built, of one output.
        loss: of each example.
        labels: of made-up examples.
    """
    return _is_known(model) and _is_known_loss(loss, equal_ranks=labels.ndim == len(model.outputs[0].shape))


def _is_known_loss(loss: Loss, equal_ranks: bool) -> bool:
    return any(loss is one for one in (LOSSES + LOSSES_OF_EQUAL_RANKS if equal_ranks else LOSSES))


def _is_known(layer: Layer) -> bool:
    calls, inner = layer._inbound_nodes, _inner(layer)
    if not all(map(_gives_rows, calls)) or getattr(layer, "quantization_mode", None) is not None:
        return False
    if inner is not None:
        return all(_is_known(one) for one in inner)
    if type(layer) not in (*KNOWN, *MERGING, *ATTENTION):
        return False
    return _takes_one_shape(layer, [call.arguments.args for call in calls]) and _keeps_first_axis(layer)


def _takes_one_shape(layer: Layer, given: Sequence[Sequence[object]]) -> bool:
    """Whether a layer of the lists takes tensors of one rank, and of one shape where it has to.

    A layer that was made for another rank may repeat what it is given.

    Args:
        layer: built.
        given: what its calls are given by place.
    """
    shapes = [[tuple(tensor.shape[1:]) for tensor in keras.tree.flatten(args)] for args in given]
    ranks = {len(shape) for own in shapes for shape in own} | {len(shape) - 1 for shape in _built_for(layer)}
    if type(layer) in ATTENTION:
        return bool(given) and ranks == {2} and all(len(args) <= MOST_ATTENDED for args in given)
    if type(layer) in MERGING and not all(len(set(own)) == 1 and None not in own[0] for own in shapes):
        return False
    return len(ranks) <= 1 and all(len(args) <= 1 for args in given)


def _built_for(layer: Layer) -> Iterator[Sequence[int | None]]:
    """The shapes that a layer was built for, with the axis of examples."""
    config = layer.get_build_config() or {}
    shapes = [config.get("input_shape"), *(config.get("shapes_dict") or {}).values()]
    return (shape for shape in shapes if shape is not None and not any(isinstance(one, tuple | list) for one in shape))


def _gives_rows(call: LayerCall) -> bool:
    """Whether all tensors of a call have another axis behind that of examples, and none is given by name.

    Masks and states are given by name. They could have other axes than they should.
    """
    arguments = call.arguments
    has_named = any(map(keras.backend.is_keras_tensor, keras.tree.flatten(arguments.kwargs)))
    return not has_named and all(len(tensor.shape) > 1 for tensor in (*arguments.keras_tensors, *call.outputs))


def _keeps_first_axis(layer: Layer) -> bool:
    config = layer.get_config()
    has_scalars = all(isinstance(config.get(name), float | int | None) for name in SCALARS)
    return has_scalars and all(map(_is_behind_examples, _axes(config))) and _has_known_activations(layer)


def _inner(layer: Layer) -> Iterable[Layer] | None:
    """What a layer applies, and nothing besides; None for a layer that computes something itself."""
    if type(layer) is _layers.TimeDistributed:
        return [layer.layer]
    if type(layer) is _layers.Bidirectional:
        return [layer.forward_layer, layer.backward_layer]
    if type(layer) is keras.Sequential and layer._functional is not None:
        return layer.layers
    is_functional = type(layer).__name__ == "Functional" and type(layer).__module__.startswith("keras.")
    # Operations between layers are among them.
    return layer.operations if is_functional else None


def _axes(config: Mapping[str, object]) -> Iterator[int]:
    """All axes that a layer's configuration names."""
    for name in AXES:
        if config.get(name) is not None:
            yield from map(int, np.ravel(np.asarray(config[name])))


def _is_behind_examples(axis: int) -> bool:
    """Whether an axis cannot be the first one. How many a tensor has is not known, but two at least."""
    return axis == -1 or axis > 0


def _has_known_activations(layer: Layer) -> bool:
    functions = [getattr(layer, name, None) for name in ACTIVATIONS]
    return all(one is None or _is_known_activation(one) for one in functions)


def _is_known_activation(one: object) -> bool:
    if isinstance(one, _layers.Layer):
        return type(one) in ACTIVATING and _is_known(one)
    return any(one is known for known in FUNCTIONS)
