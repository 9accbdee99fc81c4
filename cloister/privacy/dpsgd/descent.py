"""What the optimizer does with a noised mean, in one pass over memory where that is worth compiling.

TensorFlow runs an optimizer as a dozen operations, each of which goes over all numbers of a model; XLA makes one of
them. For Adam on 6.5 million numbers that is 7 ms in the place of 22. It is post-processing: nothing about privacy
depends on how it is computed.
"""

import math
from collections.abc import Sequence

import tensorflow as tf

from cloister.core.tensors import Compiled, Optimizer, Tensor, Variable
from cloister.privacy.dpsgd.graphs import is_known_to_xla

WORTH_COMPILING = 1 << 18
"""Numbers of a model below which a step gains less than a third of a millisecond, and compiling takes 0.3 s."""


def descent(optimizer: Optimizer, variables: Sequence[Variable]) -> Compiled:
    """The function that takes the mean gradient of each variable and applies the optimizer to it.

    Args:
        optimizer: built for the variables.
        variables: of a model.

    Returns:
        A compiled function of as many tensors. It is compiled by XLA where the model is large, and XLA knows all
        operations of the optimizer.
    """

    def apply(*means: Tensor) -> None:
        optimizer.apply(list(means), variables)

    if sum(math.prod(variable.shape) for variable in variables) >= WORTH_COMPILING:
        fused = tf.function(apply, autograph=False, jit_compile=True)
        if is_known_to_xla(fused, [tf.TensorSpec(each.shape, each.dtype) for each in variables]):
            return fused
    return tf.function(apply, autograph=False)
