"""The clipped sum of a microbatch's per-example gradients, as one computation of fixed shape."""

from typing import Any

import tensorflow as tf

from cloister.core.errors import ConfigError
from cloister.privacy.dpsgd import vectorised
from cloister.privacy.dpsgd.capture import Call, Unit, is_plain_dense, record, units
from cloister.privacy.dpsgd.convolution import convolution
from cloister.privacy.dpsgd.dense import dense
from cloister.privacy.dpsgd.parts import Part
from cloister.privacy.dpsgd.vectorised import Loss

NORM_ERROR = 2.0**-18
"""Bound on the relative error of a norm: TensorFlow adds squares in vectors and pairwise, not one after the other."""


class Gradients:
    """Per-example gradients of a model with respect to all its trainable variables.

    Args:
        model: a built Keras model of one input and one output.
        loss: of each example by itself.
        by_layer: look at layers one by one, in one backward pass; otherwise at the model as a whole.

    Raises:
        NotCapturable: `by_layer`, and this model's layers cannot be looked at one by one.
    """

    def __init__(self, model: Any, loss: Loss, by_layer: bool) -> None:
        self.model = model
        self.by_layer = by_layer
        self._loss = loss
        self.units: list[Unit] = units(model) if by_layer else []
        self.kernels: dict[str, str] = {}

    def losses(self, x: Any, y: Any, training: bool = True) -> Any:
        """Shape (batch,), as in training.

        Raises:
            ConfigError: the loss function gives something else.
        """
        losses = self._loss(y, self.model(x, training=training))
        if losses.shape != x.shape[:1]:
            raise ConfigError(f"loss must give one number per example, shape {tuple(x.shape[:1])}; got {losses.shape}")
        return losses

    def parts(self, x: Any, y: Any) -> list[tuple[tuple[Any, ...], Part]]:
        """Variables and their per-example gradients; variables that the loss does not need are left out."""
        if not self.by_layer:
            return [(tuple(self.model.trainable_variables), vectorised.whole_model(self.model, self._loss, x, y))]
        calls = record(self.units, lambda: self.losses(x, y))
        needed = [[call for call in heard if any(delta is not None for delta in call.deltas)] for heard in calls]
        found = [
            (unit, _part(unit, heard, x.shape[0])) for unit, heard in zip(self.units, needed, strict=True) if heard
        ]
        self.kernels = {unit.layer.path: part.kernel for unit, part in found}
        return [(unit.variables, part) for unit, part in found]

    def clipped(self, x: Any, y: Any, mask: Any, bound: Any) -> tuple[list[Any], Any, Any]:
        """Σ over the examples of the mask of gradient·min(1, S/‖gradient‖).

        Norms are overstated by their own rounding error first, so that no contribution is longer than S. An example
        whose gradient, or the square of its norm, is not finite contributes zero.

        Args:
            x, y: B examples, padded with any others.
            mask: shape (B,), False for padding.
            bound: S > 0.

        Returns:
            A sum for each trainable variable; how many examples were scaled down; how many were not finite.
        """
        parts = self.parts(x, y)
        squares = tf.add_n([part.squared_norms() for _, part in parts])
        finite = tf.math.is_finite(squares)
        norms = tf.sqrt(tf.where(finite, squares, tf.zeros_like(squares))) * (1 + NORM_ERROR)
        bound = tf.cast(bound, norms.dtype)
        factors = tf.where(finite & mask, bound / tf.maximum(norms, bound), tf.zeros_like(norms))
        sums = self._sums(parts, factors, finite)
        clipped = tf.math.count_nonzero(finite & mask & (norms > bound))
        return sums, clipped, tf.math.count_nonzero(mask & ~finite)

    def weighted(self, x: Any, y: Any, factors: Any) -> tuple[Any, list[Any]]:
        """Squared norms, shape (B,), and Σ factors[i]·gradient[i], without any bound."""
        parts = self.parts(x, y)
        squares = tf.add_n([part.squared_norms() for _, part in parts])
        return squares, self._sums(parts, factors, tf.math.is_finite(squares))

    def _sums(self, parts: list[tuple[tuple[Any, ...], Part]], factors: Any, finite: Any) -> list[Any]:
        all_finite = tf.reduce_all(finite)

        def clean(tensor: Any) -> Any:
            """Looked at only when something is not finite: it takes a pass over the memory."""
            rows = tf.reshape(finite, [-1] + [1] * (len(tensor.shape) - 1))
            return tf.cond(all_finite, lambda: tensor, lambda: tf.where(rows, tensor, tf.zeros_like(tensor)))

        sums = {
            id(variable): total
            for variables, part in parts
            for variable, total in zip(variables, part.weighted_sum(factors, clean), strict=True)
        }
        return [
            sums[id(variable)] if id(variable) in sums else tf.zeros(variable.shape, variable.dtype)
            for variable in self.model.trainable_variables
        ]


def _part(unit: Unit, calls: list[Call], batch: int) -> Part:
    if not unit.fast:
        return vectorised.layer(unit, calls, batch)
    return dense(unit, calls, batch) if is_plain_dense(unit.layer) else convolution(unit, calls, batch)
