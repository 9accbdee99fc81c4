"""The clipped sum of a call's per-unit gradients, as one computation of fixed shape."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from cloister.core.tensors import Layer, Network, Tensor, Variable
from cloister.privacy.dpsgd.capture import (
    Call,
    CapturedLayer,
    NotCapturable,
    captured_layers,
    is_plain_convolution,
    is_plain_dense,
    leaks,
    record,
)
from cloister.privacy.dpsgd.convolution import convolution
from cloister.privacy.dpsgd.dense import dense
from cloister.privacy.dpsgd.embedding import Embedded, is_plain_embedding
from cloister.privacy.dpsgd.losses import Loss, losses_of
from cloister.privacy.dpsgd.normalization import is_plain_normalization, normalization
from cloister.privacy.dpsgd.parts import Part, Rows
from cloister.privacy.dpsgd.rounding import SMALLEST_FACTOR

ROOT = 1 + 2.0**-40
"""Makes up for roundings of a root, and of the sum of a few squares under it, in double precision."""

VariablesPart = tuple[tuple[Variable, ...], Part]
"""Variables and their per-unit gradients."""


class Clipped(NamedTuple):
    """What a call of a graph gives. Nothing of it is noised.

    Attributes:
        sums: for each trainable variable.
        clipped: how many units were scaled down.
        non_finite: how many had no finite gradient, and contributed zero.
    """

    sums: list[Tensor]
    clipped: Tensor
    non_finite: Tensor


class Gradients:
    """Per-unit gradients of a model with respect to all its trainable variables, layer by layer, in one backward pass.

    Args:
        model: a built Keras model of one input and one output.
        loss: of each example by itself.

    Attributes:
        layers: those with weights, as small as possible.
        kernels: how each layer's gradients are held, by its path; known once a graph was traced.
        held: of the last graph that `clipped` traced, what is held of units, with leading size U. All that is computed
            else follows from it, by operations on rows and by sums of rows times factors.

    Raises:
        NotCapturable: this model's layers cannot be looked at one by one, or one has no form of its own.
    """

    def __init__(self, model: Network, loss: Loss) -> None:
        self.model = model
        self._loss = loss
        self.layers: list[CapturedLayer] = captured_layers(model)
        for captured in self.layers:
            _form(captured.layer)
        self.kernels: dict[str, str] = {}
        self.held: list[Tensor] = []

    def reach_all(self, x: Tensor, y: Tensor) -> bool:
        """Return whether the weights reach the losses through calls of their layers alone.

        Args:
            x, y: examples, a row each.
        """
        values = [tf.convert_to_tensor(variable.value) for variable in self.model.trainable_variables]

        def forward() -> Tensor:
            with keras.StatelessScope(list(zip(self.model.trainable_variables, values, strict=True))):
                return losses_of(self.model, self._loss, x, y)

        return not leaks(self.layers, forward, values)

    def parts(self, x: Tensor, y: Tensor, rows: Rows, shares: Tensor) -> list[VariablesPart]:
        """Variables and their per-unit gradients; variables that the loss does not need are left out.

        Args:
            x: examples, those of a unit next to each other.
            y: a label in each row.
            rows: which examples are a unit.
            shares: shape (rows,), double: what each example's loss is multiplied with.

        Raises:
            NotCapturable: a layer is given something that does not have an example in each row.
            ConfigError: the loss function gives something else than a number for each example.
        """

        def forward() -> Tensor:
            losses = losses_of(self.model, self._loss, x, y)
            return losses if rows.each == 1 else losses * tf.cast(shares, losses.dtype)

        calls = record(self.layers, forward)
        found = [
            (captured, _form(captured.layer)(captured, own, rows))
            for captured, own in zip(self.layers, map(_needed, calls), strict=True)
            if own
        ]
        self.kernels = {captured.layer.path: part.kernel for captured, part in found}
        return [(captured.variables, part) for captured, part in found]

    def clipped(self, x: Tensor, y: Tensor, mask: Tensor, bound: Tensor) -> Clipped:
        """Σ over the units of gradient·min(1, bound/‖gradient‖), a unit's gradient being the mean of its examples'.

        Norms are overstated by what roundings may have taken from them. A unit whose gradient, or the square of its
        norm, is not finite contributes zero.

        Args:
            x, y: U·cap examples, those of a unit next to each other.
            mask: shape (U, cap), False for padding: of what stands there nothing reaches the sums. An empty unit
                counts for nothing.
            bound: above 0, double.
        """
        rows, real = Rows(*mask.shape), tf.reduce_any(mask, axis=1)
        parts = self.parts(x, y, rows, _shares(mask))
        total = tf.add_n([part.squared_norms() for _, part in parts])
        self.held = [*(tensor for _, part in parts for tensor in part.held), total]
        finite = tf.math.is_finite(total)
        norms = tf.sqrt(total) * ROOT
        # Divided by the larger of the two: a norm of 0 is nothing to divide by.
        factors = tf.where(finite & real, bound / tf.maximum(norms, bound), tf.zeros_like(norms))
        factors = tf.where(factors < SMALLEST_FACTOR, tf.zeros_like(factors), factors)
        clipped = tf.math.count_nonzero(finite & real & (norms > bound))
        return Clipped(self._sums(parts, factors, finite), clipped, tf.math.count_nonzero(real & ~finite))

    def _sums(self, parts: list[VariablesPart], factors: Tensor, finite: Tensor) -> list[Tensor]:
        sums = {
            id(variable): total
            for variables, part in parts
            for variable, total in zip(variables, part.weighted_sum(factors, cleaner(finite)), strict=True)
        }
        return [
            sums[id(variable)] if id(variable) in sums else tf.zeros(variable.shape, variable.dtype)
            for variable in self.model.trainable_variables
        ]


def _needed(calls: list[Call]) -> list[Call]:
    """Those that the loss depends on. The others have no gradient."""
    return [call for call in calls if any(delta is not None for delta in call.deltas)]


def cleaner(finite: Tensor) -> Callable[[Tensor], Tensor]:
    """What puts zeros in the place of the rows of a tensor that are not marked, shape (U,)."""
    all_finite = tf.reduce_all(finite)

    def clean(tensor: Tensor) -> Tensor:
        """Looked at only when something is not finite: it takes a pass over the memory."""
        rows = tf.reshape(finite, [-1] + [1] * (len(tensor.shape) - 1))
        return tf.cond(all_finite, lambda: tensor, lambda: tf.where(rows, tensor, tf.zeros_like(tensor)))

    return clean


def _shares(mask: Tensor) -> Tensor:
    """Shape (U·cap,), double: one part of its unit's examples for each, 0 for padding."""
    counted = tf.cast(mask, tf.float64)
    # An empty unit has no examples to divide by; its share is 0 all the same.
    return tf.reshape(counted / tf.maximum(tf.reduce_sum(counted, axis=1, keepdims=True), 1.0), [-1])


FORMS: tuple[tuple[Callable[[Layer], bool], Callable[[CapturedLayer, Sequence[Call], Rows], Part]], ...] = (
    (is_plain_dense, dense),
    (is_plain_convolution, convolution),
    (is_plain_embedding, Embedded),
    (is_plain_normalization, normalization),
)
"""Pairs of a test for a kind of layer, and the form in which gradients of its units are held."""


def _form(layer: Layer) -> Callable[[CapturedLayer, Sequence[Call], Rows], Part]:
    """Return the form for a layer.

    Raises:
        NotCapturable: there is none.
    """
    for is_of_kind, form in FORMS:
        if is_of_kind(layer):
            return form
    raise NotCapturable(f"layer {layer.name!r} has no form of its own for the gradients of units")
