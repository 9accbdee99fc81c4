"""Layers and losses that are known to keep the examples of a batch apart.

A model of these alone is computed for many examples in one pass. Anything else may mix examples in a way that no trial
shows: by less than its tolerance, for some whole numbers, in gradients alone, or by raising an exception. TensorFlow's
vectorisation does so too, for some operations on numbers of an example: it shifts indices, and computes a branch for
the examples that take it. So such a model is computed for one unit at a time, in calls that hold nothing of another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import keras
import numpy as np

from cloister.core.tensors import Layer, Network
from cloister.privacy.dpsgd.draws import RANDOM_BY_EXAMPLE
from cloister.privacy.dpsgd.vectorised import Loss

_layers, _losses = keras.layers, keras.losses
MERGING = (_layers.Add, _layers.Subtract, _layers.Multiply, _layers.Average, _layers.Maximum, _layers.Minimum)
"""Layers that are known where all that they are given has one shape: Keras takes some tensors of one number for each
example for a bias, and what else it repeats depends on the first call."""
ATTENTION = (_layers.Attention, _layers.AdditiveAttention, _layers.MultiHeadAttention, _layers.GroupQueryAttention)
"""Layers that are known where all that they are given has three axes."""
MOST_ATTENDED = 3
"""Arguments of an attention, which are queries, values and keys. Masks stand behind them."""
ACTIVATING = (_layers.ReLU, _layers.LeakyReLU, _layers.PReLU, _layers.ELU, _layers.Softmax)
"""Layers that are known as activations: what comes out has the shape of what goes in."""
KNOWN = frozenset(
    (
        *(*RANDOM_BY_EXAMPLE, *MERGING, *ATTENTION, *ACTIVATING),
        *(_layers.InputLayer, _layers.Identity, _layers.Embedding),
        *(_layers.Dense, _layers.Conv1D, _layers.Conv2D, _layers.Conv3D),
        *(_layers.Conv1DTranspose, _layers.Conv2DTranspose, _layers.Conv3DTranspose),
        *(_layers.SeparableConv1D, _layers.SeparableConv2D, _layers.DepthwiseConv1D, _layers.DepthwiseConv2D),
        *(_layers.MaxPooling1D, _layers.MaxPooling2D, _layers.MaxPooling3D),
        *(_layers.AveragePooling1D, _layers.AveragePooling2D, _layers.AveragePooling3D),
        *(_layers.GlobalMaxPooling1D, _layers.GlobalMaxPooling2D, _layers.GlobalMaxPooling3D),
        *(_layers.GlobalAveragePooling1D, _layers.GlobalAveragePooling2D, _layers.GlobalAveragePooling3D),
        *(_layers.Activation, _layers.Flatten, _layers.Reshape, _layers.Permute, _layers.RepeatVector),
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
SET_BY_KERAS = ("build", "quantize", "loss")
"""Methods that every layer or model may have for itself."""
OPTION = bool | int | float | str | None
"""What may be given to a call by name: an array may add axes in front."""
SCALARS = ("scale", "offset")
"""Parts of a layer's configuration that are known where they are single numbers. An array may add axes in front."""
LOSSES = (
    _losses.sparse_categorical_crossentropy,
    _losses.categorical_crossentropy,
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
LOSSES_OF_EQUAL_RANKS = (
    _losses.categorical_focal_crossentropy,
    _losses.categorical_hinge,
    _losses.kl_divergence,
    _losses.poisson,
)
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


def keeps_examples_apart(model: Network, loss: Loss, label_axes: int) -> bool:
    """Whether all layers of a model, and the loss, are known to keep examples apart.

    False if some tensor has no axis but that of examples: the last axis would be that one.

    Args:
        model: built, of one output.
        loss: of each example.
        label_axes: of a batch of labels.
    """
    has_own_methods = any(map(_has_methods_of_its_own, model._flatten_layers()))
    return (
        not has_own_methods
        and _is_known(model)
        and _is_known_loss(loss, equal_ranks=label_axes == len(model.outputs[0].shape))
    )


def _is_known_loss(loss: Loss, equal_ranks: bool) -> bool:
    return any(loss is one for one in (LOSSES + LOSSES_OF_EQUAL_RANKS if equal_ranks else LOSSES))


def _has_methods_of_its_own(layer: Layer) -> bool:
    """Whether a layer has another method than its type, such as a `call`."""
    return any(callable(getattr(type(layer), name, None)) for name in vars(layer).keys() - set(SET_BY_KERAS))


def _is_known(layer: Layer) -> bool:
    is_quantized = getattr(layer, "quantization_mode", None) is not None
    # The calls behind an inner model do not show a mask that it makes.
    if is_quantized or getattr(layer, "mask_zero", False) or not _has_batches(layer):
        return False
    inner = _inner(layer)
    if inner is not None:
        return _is_given_what_it_was_built_for(layer) and all(_is_known(one) for one in inner)
    return type(layer) in KNOWN and _takes_known_shapes(layer) and _keeps_first_axis(layer)


def _is_given_what_it_was_built_for(layer: Layer) -> bool:
    """Whether all calls of a model give it the shapes of its inputs. Its layers were looked at with those alone."""
    if not isinstance(layer, keras.Model):
        return True
    built = [tuple(tensor.shape[1:]) for tensor in keras.tree.flatten(layer.inputs)]
    return all([tuple(one.shape[1:]) for one in node.arguments.keras_tensors] == built for node in layer._inbound_nodes)


def _takes_known_shapes(layer: Layer) -> bool:
    """Whether a layer of the list is known for what its calls are given by place."""
    given = [node.arguments.args for node in layer._inbound_nodes]
    most = MOST_ATTENDED if type(layer) in ATTENTION else 1
    shapes = [[tuple(tensor.shape[1:]) for tensor in keras.tree.flatten(args)] for args in given]
    return all(len(args) <= most for args in given) and _are_known(layer, shapes)


def _are_known(layer: Layer, shapes: Sequence[Sequence[tuple[int | None, ...]]]) -> bool:
    """Whether a layer is known for the shapes of an example that are given to each of its calls."""
    # A layer that was built for another rank may repeat what it is given.
    ranks = {len(shape) for own in shapes for shape in own} | {len(shape) - 1 for shape in _built_for(layer)}
    if type(layer) in ATTENTION:
        return bool(shapes) and ranks == {2}
    return len(ranks) <= 1 and (type(layer) not in MERGING or all(map(_is_one_shape, shapes)))


def _is_one_shape(shapes: Sequence[tuple[int | None, ...]]) -> bool:
    return len(set(shapes)) == 1 and None not in shapes[0]


def _built_for(layer: Layer) -> Iterator[Sequence[int | None]]:
    """The shapes that a layer was built for, with the axis of examples."""
    config = layer.get_build_config() or {}
    shapes = [config.get("input_shape"), *(config.get("shapes_dict") or {}).values()]
    return (shape for shape in shapes if shape is not None and not any(isinstance(one, tuple | list) for one in shape))


def _has_batches(layer: Layer) -> bool:
    """Whether all tensors of a layer's calls have another axis behind that of examples, and none is given by name.

    Masks and states are given by name. They could have other axes than they should, constant arrays too.
    """
    nodes = layer._inbound_nodes
    named = keras.tree.flatten([node.arguments.kwargs for node in nodes])
    tensors = (tensor for node in nodes for tensor in (*node.arguments.keras_tensors, *node.outputs))
    return all(isinstance(one, OPTION) for one in named) and all(len(tensor.shape) > 1 for tensor in tensors)


def _keeps_first_axis(layer: Layer) -> bool:
    config = layer.get_config()
    has_scalars = all(isinstance(config.get(name), float | int | None) for name in SCALARS)
    return has_scalars and all(map(_is_behind_examples, _axes(config))) and _has_known_activations(layer)


def _inner(layer: Layer) -> Iterable[Layer] | None:
    """What a layer applies, and nothing besides; None for a layer that computes something itself."""
    # A model within would have no calls to look at.
    if type(layer) is _layers.TimeDistributed and not isinstance(layer.layer, keras.Model):
        return [layer.layer]
    if type(layer) is _layers.Bidirectional:
        return [layer.forward_layer, layer.backward_layer]
    # Without this its layers have no nodes to look at.
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
