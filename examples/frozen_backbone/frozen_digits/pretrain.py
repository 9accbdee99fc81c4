"""Train the backbone on the public digits, and write its weights into the package: python -m frozen_digits.pretrain"""

from pathlib import Path

import numpy as np

from frozen_digits.task import FEATURES, PUBLIC, WEIGHTS, digits

EPOCHS = 60


def backbone():
    """Kernel and bias of a layer from whose outputs the public images can be drawn again: it needs no labels."""
    import keras

    keras.utils.set_random_seed(0)
    x, y = digits()
    public = x[y < PUBLIC]
    layers = [keras.layers.Dense(FEATURES, activation="tanh", name="backbone"), keras.layers.Dense(64)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.Adam(0.003), "mean_squared_error")
    model.fit(public, public, batch_size=32, epochs=EPOCHS, verbose=0)
    return model.get_layer("backbone").get_weights()


def write(path: Path = WEIGHTS) -> None:
    """Write the weights to an `.npz` file."""
    kernel, bias = backbone()
    np.savez(path, kernel=kernel, bias=bias)


if __name__ == "__main__":
    write()
