"""Names for what Keras and TensorFlow hand out, since neither says its types.

Nothing is checked by them: a type checker takes each for `Any`. They tell a reader what is meant. Importing this module
imports neither Keras nor TensorFlow.
"""

from typing import Any

Tensor = Any
"""A `tf.Tensor` of any shape and dtype, or a NumPy array where TensorFlow takes one in its place."""
Variable = Any
"""A `keras.Variable`: weights of a model, or the state of a random layer or an optimizer."""
Layer = Any
"""A `keras.Layer` that is built; a model is one too."""
Network = Any
"""A `keras.Model` that is built."""
Optimizer = Any
"""A `keras.optimizers.Optimizer`."""
Compiled = Any
"""What `tf.function` makes of a Python function: takes and gives tensors."""
