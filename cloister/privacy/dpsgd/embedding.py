"""Per-unit gradients of an embedding, out of its indices and the gradients of its outputs.

An embedding is a dense layer whose inputs are one-hot: of two positions the product of inputs is 1 where their indices
are equal. So nothing of the size of the table is made for a unit.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from cloister.core.tensors import Layer, Tensor
from cloister.privacy.dpsgd.capture import Call, CapturedLayer, NotCapturable
from cloister.privacy.dpsgd.dense import gram, gram_squares
from cloister.privacy.dpsgd.parts import Rows, rows_times
from cloister.privacy.dpsgd.rounding import MAX_POSITIONS

MAX_PAIRS = 1 << 24
"""Pairs of positions of a call: each takes some 25 bytes."""


def is_plain_embedding(layer: Layer) -> bool:
    """Return whether the layer looks rows of one trained table up."""
    trained = [id(variable) for variable in layer.trainable_variables]
    return type(layer) is keras.layers.Embedding and not layer.lora_enabled and trained == [id(layer._embeddings)]


class Embedded:
    """A table's gradients by unit, held as indices and deltas.

    Positions of one index can cancel, as those of a dense layer can. So norms and sums are in double precision.

    Args:
        captured: the layer, and its variable.
        calls: of the layer in one forward computation.
        rows: which rows of a tensor belong to a unit.

    Raises:
        NotCapturable: there are too many pairs of positions, or a row is not of one example.
    """

    kernel = "embedding"

    def __init__(self, captured: CapturedLayer, calls: Sequence[Call], rows: Rows) -> None:
        size = captured.variables[0].shape[0]
        given = [_positions(tf.cast(call.first_input, tf.int32), rows, axes=0) for call in calls]
        # Keras counts negative indices from the end.
        indices = [tf.where(each < 0, each + size, each) for each in given]
        deltas = [_positions(tf.cast(call.deltas[0], tf.float64), rows, axes=1) for call in calls]
        self._indices, self._deltas = tf.concat(indices, 1), tf.concat(deltas, 1)
        if self._indices.shape[1] > MAX_POSITIONS:
            raise NotCapturable("an embedding of this many positions")
        if rows.units * self._indices.shape[1] ** 2 > MAX_PAIRS:
            raise NotCapturable("an embedding whose pairs of positions take too much memory")
        self._size = size
        self.held: Sequence[Tensor] = (self._indices, self._deltas)

    def squared_norms(self) -> Tensor:
        """As `Part` says: Σ over pairs of positions with one index of d_s·d_t, and a part of the squared mass."""
        same = self._indices[:, :, None] == self._indices[:, None, :]
        return gram_squares(tf.cast(same, tf.float64), gram(self._deltas))

    def weighted_sum(self, factors: Tensor, clean: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """As `Part` says.

        Args:
            factors: of each unit, shape (U,).
            clean: puts zeros where a unit's numbers are not finite.
        """
        deltas = rows_times(clean(self._deltas), factors)
        flat = tf.reshape(deltas, [-1, deltas.shape[-1]])
        return [tf.math.unsorted_segment_sum(flat, tf.reshape(self._indices, [-1]), self._size)]


def _positions(tensor: Tensor, rows: Rows, axes: int) -> Tensor:
    """Return a tensor of shape (rows, ..., *last axes) as (U, T, *last axes)."""
    if tensor.shape[0] != rows.count:
        raise NotCapturable("an embedding's indices do not have an example in each row")
    return tf.reshape(tensor, [rows.units, -1, *tensor.shape[tensor.shape.rank - axes :]])
