"""Type names for objects of Keras and TensorFlow, which declare no types.

For a type checker each is `Any`: they document the code only. Importing this module imports neither Keras nor
TensorFlow.
"""

from typing import Any

Tensor = Any
"""A `tf.Tensor` of any shape and dtype, or a NumPy array that TensorFlow accepts in its place."""
Variable = Any
"""A `keras.Variable`: weights of a model, or the state of a random layer or an optimizer."""
Layer = Any
"""A `keras.Layer` that is built; a model is one too."""
Network = Any
"""A `keras.Model` that is built."""
Optimizer = Any
"""A `keras.optimizers.Optimizer`."""
Compiled = Any
"""A function compiled by `tf.function`, from tensors to tensors."""
