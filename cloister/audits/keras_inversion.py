"""Recovery of an image from the gradient of one training step.

The client has one image, takes one step, and its network has sigmoid units, so that gradients are differentiable: the
best conditions for an attacker. Two attacks search for an image with a gradient close to the observed one:

- deep leakage from gradients: the least squared distance, over image and label together, by L-BFGS. Source: Zhu, Liu,
  Han (2019), arXiv:1906.08935, Algorithm 1, and its network, LeNet with sigmoid units and wide initial weights;
- inverting gradients: the largest cosine, with a penalty on total variation, the label derived from the last layer, and
  pixels clipped to [0, 1], by the signs of Adam's steps. Sources: Geiping et al. (2020), arXiv:2003.14053, §4; Zhao,
  Mopuri, Bilen (2020), arXiv:2001.02610, for the label.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import optimize

from cloister.utils.arrays import Network, Tensor

Arrays = Mapping[str, NDArray]
FILTERS, KERNEL, SPREAD = 12, 5, 0.5
DLG_STARTS = 2
SEARCH = {"maxiter": 1000, "maxcor": 50, "ftol": 1e-12, "gtol": 1e-10}
"""Options of L-BFGS: an image becomes sharp only when its gradient agrees to five digits."""
NOTHING = 0.9
"""Distance of gradients, in units of the squared gradient, above which a search has failed and restarts."""
INVERTING_STEPS, STEP, VARIATION = 1200, 0.1, 1e-3
DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the steps after which the step size is divided by ten."""


@dataclass(frozen=True)
class Recovered:
    """Result of an attack on a gradient.

    Attributes:
        image: shape (height, width), from 0 to 1.
        distance: of its gradient to the observed one, in the attack's own measure.
    """

    image: NDArray
    distance: float


def network(shape: tuple[int, int], classes: int, seed: int, dtype: str = "float32") -> Network:
    """Build a small convolutional network of sigmoid units.

    Args:
        shape: height and width of an image.
        classes: number of classes.
        seed: of the initial weights.
        dtype: of weights and products.
    """
    rng = np.random.default_rng(seed)
    strides = (2, 2, 1) if min(shape) > 16 else (2, 1)
    layers = [
        keras.layers.Conv2D(FILTERS, KERNEL, stride, "same", activation="sigmoid", dtype=dtype, name=f"conv{number}")
        for number, stride in enumerate(strides)
    ]
    ending = [
        keras.layers.Flatten(name="flatten", dtype=dtype),
        keras.layers.Dense(classes, activation="softmax", name="output", dtype=dtype),
    ]
    model = keras.Sequential([keras.Input((*shape, 1), dtype=dtype, name="pixels"), *layers, *ending], name="sigmoids")
    model.set_weights([rng.uniform(-SPREAD, SPREAD, weight.shape) for weight in model.get_weights()])
    return model


class Victim:
    """A network whose gradients are attacked.

    Args:
        shape: height and width of an image.
        classes: number of classes.
        seed: of the network's weights.
    """

    def __init__(self, shape: tuple[int, int], classes: int, seed: int) -> None:
        self.shape, self.classes = shape, classes
        self.model = network(shape, classes, seed)
        # In double precision: gradients of gradients of sigmoids are small.
        self._exact = network(shape, classes, seed, "float64")
        self._weights = self._exact.trainable_variables
        self._distance = tf.function(self._squared_distance)
        self._inverted = tf.function(self._invert)
        self._step = tf.function(self._smooth_distance)

    @property
    def arrays(self) -> Arrays:
        """Return the weights, by path."""
        return {weight.path: weight.numpy() for weight in self.model.trainable_variables}

    def gradient(self, image: NDArray, label: int) -> Arrays:
        """Compute the gradient of the cross-entropy of one image.

        Args:
            image: shape (height, width).
            label: of its class.
        """
        wanted = tf.one_hot([label], self.classes, dtype=tf.float64)
        found = self._gradient(tf.constant(image[None, ..., None], tf.float64), wanted)
        return {weight.path: array.numpy() for weight, array in zip(self._weights, found, strict=True)}

    def seconds_a_search(self) -> float:
        """Estimate the duration of a search on this machine.

        It is the mean of both attacks, from one step of each.
        """
        seen, wanted = (
            self._listed(self.gradient(np.zeros(self.shape), 0)),
            tf.one_hot([0], self.classes, dtype=tf.float64),
        )
        point = tf.zeros(int(np.prod(self.shape)) + self.classes, tf.float64)
        image, scale = tf.zeros((1, *self.shape, 1), tf.float64), tf.constant(1.0, tf.float64)
        leaking = SEARCH["maxiter"] * _seconds(lambda: self._distance(point, seen, scale))
        return (leaking + INVERTING_STEPS * _seconds(lambda: self._step(image, wanted, seen))) / 2

    def deep_leakage(self, gradient: Arrays, seed: int) -> Recovered:
        """Search the image and label with the nearest gradient.

        Args:
            gradient: observed gradient, by path.
            seed: of the search's starting points.
        """
        size, seen = int(np.prod(self.shape)), self._listed(gradient)
        scale = 1 / max(sum(float(np.square(array).sum()) for array in gradient.values()), 1e-300)

        def distance(point: NDArray) -> tuple[float, NDArray]:
            value, slope = self._distance(tf.constant(point), seen, tf.constant(scale, tf.float64))
            return float(value), slope.numpy()

        rng, best = np.random.default_rng(seed), Recovered(np.zeros(self.shape), np.inf)
        for _ in range(DLG_STARTS):
            found = optimize.minimize(
                distance, rng.normal(size=size + self.classes), jac=True, method="L-BFGS-B", options=SEARCH
            )
            if found.fun < best.distance:
                best = Recovered(np.clip(found.x[:size].reshape(self.shape), 0, 1), float(found.fun))
            if best.distance < NOTHING:
                break
        return best

    def inverting(self, gradient: Arrays, seed: int) -> Recovered:
        """Search the smooth image whose gradient has the largest cosine.

        Args:
            gradient: observed gradient, by path.
            seed: of the search's starting point.
        """
        start = np.random.default_rng(seed).uniform(size=(1, *self.shape, 1))
        # Only at the label, the gradient of the last layer's bias is negative.
        label = int(np.argmin(gradient[self._weights[-1].path]))
        wanted = tf.one_hot([label], self.classes, dtype=tf.float64)
        image, distance = self._inverted(tf.constant(start), wanted, self._listed(gradient))
        return Recovered(image.numpy()[0, ..., 0], float(distance))

    def _listed(self, gradient: Arrays) -> list[Tensor]:
        return [tf.constant(gradient[weight.path], tf.float64) for weight in self._weights]

    def _gradient(self, image: Tensor, wanted: Tensor) -> list[Tensor]:
        with tf.GradientTape() as tape:
            said = tf.math.log(tf.maximum(self._exact(image, training=False), 1e-300))
            loss = -tf.reduce_sum(wanted * said)
        return tape.gradient(loss, self._weights)

    def _squared_distance(self, point: Tensor, seen: Sequence[Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distance of gradients at an image and label logits, and its slope."""
        size = int(np.prod(self.shape))
        with tf.GradientTape() as tape:
            tape.watch(point)
            wanted = tf.nn.softmax(point[None, size:])
            found = self._gradient(tf.reshape(point[:size], (1, *self.shape, 1)), wanted)
            pairs = zip(found, seen, strict=True)
            distance = scale * tf.add_n([tf.reduce_sum(tf.square(one - other)) for one, other in pairs])
        return distance, tape.gradient(distance, point)

    def _invert(self, image: Tensor, wanted: Tensor, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run signed steps of Adam within the box; return the last image and its distance."""
        mean, square, distance = tf.zeros_like(image), tf.zeros_like(image), tf.constant(0.0, tf.float64)
        for number in tf.range(INVERTING_STEPS):
            distance, slope = self._smooth_distance(image, wanted, seen)
            slope = tf.sign(slope)
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope**2
            count = tf.cast(number + 1, tf.float64)
            corrected = tf.sqrt(square / (1 - 0.999**count)) + 1e-8
            past = tf.add_n([tf.cast(count > share * INVERTING_STEPS, tf.float64) for share in DECAYS])
            image = tf.clip_by_value(image - STEP * 0.1**past * mean / (1 - 0.9**count) / corrected, 0, 1)
        return image, distance

    def _smooth_distance(self, image: Tensor, wanted: Tensor, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(image)
            found = self._gradient(image, wanted)
            pairs = list(zip(found, seen, strict=True))
            along = tf.add_n([tf.reduce_sum(one * other) for one, other in pairs])
            lengths = [tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(pair[side])) for pair in pairs])) for side in (0, 1)]
            variation = tf.reduce_mean(tf.abs(image[:, 1:] - image[:, :-1])) + tf.reduce_mean(
                tf.abs(image[:, :, 1:] - image[:, :, :-1])
            )
            distance = 1 - along / (lengths[0] * lengths[1] + 1e-300) + VARIATION * variation
        return distance, tape.gradient(distance, image)


def _seconds(step: Callable[[], object]) -> float:
    """Return the duration of a step once it is compiled."""
    step()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def private_gradient(
    model: Network, image: NDArray, label: int, noise_multiplier: float, clipping_norm: float
) -> dict[str, NDArray]:
    """Compute the gradient of one image as DP-SGD releases it.

    It is clipped and noised, for a batch of one.

    Args:
        model: trained model; its weights are restored.
        image: shape (height, width).
        label: of its class.
        noise_multiplier: σ.
        clipping_norm: S.
    """
    from cloister.privacy.dpsgd.step import DpSgd

    before = model.get_weights()
    step = DpSgd(
        model,
        batch_size=1,
        noise_multiplier=noise_multiplier,
        clipping_norm=clipping_norm,
        optimizer=keras.optimizers.SGD(1.0),
    )
    step.step(image[None, ..., None].astype(np.float32), np.array([label]))
    after = model.get_weights()
    model.set_weights(before)
    paths = [weight.path for weight in model.trainable_variables]
    return {path: old.astype(np.float64) - new for path, old, new in zip(paths, before, after, strict=True)}
