"""The variables of a Keras model that a server sends, and those that hold random state.

Importing this module imports neither Keras nor TensorFlow.
"""

from cloister.core.tensors import Network, Variable


def frozen_weights(model: Network) -> list[Variable]:
    """The weights of layers that are not to be trained, sublayers included. A server does not send them."""
    return [weight for layer in model._flatten_layers() if not layer.trainable for weight in layer.weights]


def sent_weights(model: Network) -> list[Variable]:
    """The weights that a server sends: of all layers that are not frozen, trained themselves or not."""
    frozen = {id(weight) for weight in frozen_weights(model)}
    return [weight for weight in model.weights if id(weight) not in frozen]


def is_seed(variable: Variable) -> bool:
    """Whether a variable is the state of a random number generator, such as that of a dropout layer: whole numbers."""
    return variable.path.endswith("seed_generator_state") and "int" in str(variable.dtype)
