"""Variables of a Keras model that a server sends, and those that hold random state.

Importing this module imports neither Keras nor TensorFlow.
"""

from cloister.core.tensors import Network, Variable


def frozen_weights(model: Network) -> list[Variable]:
    """Return the weights of layers that are not trainable, sublayers included.

    A server does not send them.
    """
    return [weight for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights]


def sent_weights(model: Network) -> list[Variable]:
    """Return the weights that a server sends: those of all layers that are not frozen."""
    frozen = {id(weight) for weight in frozen_weights(model)}
    return [weight for weight in model.weights if id(weight) not in frozen]


def is_seed(variable: Variable) -> bool:
    """Return True if a variable is the integer state of a random generator."""
    return variable.path.endswith("seed_generator_state") and "int" in str(variable.dtype)
