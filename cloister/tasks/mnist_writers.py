"""MNIST partitioned by writer: one person per client, with images that may be rotated.

Rotating the images of some owners by 90° makes two populations, which two models fit better than one (Galli et al.,
2023, §5.3; Ghosh et al., 2020).
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloister.core.errors import DataError
from cloister.core.files import expanded
from cloister.tasks.base import Dataset, Examples, Model, Recipe, Task
from cloister.tasks.images import SHAPE, characters, read_arrays, two_convolutions
from cloister.tasks.partition import numbered

IMAGES = "mnist.npz"
WRITERS = "mnist_writer_ids.npz"
ORDER_SEED, TURN_SEED = 0, 0
"""Constants, so that a writer has the same number and rotation in every run."""


class MnistWriters(Task):
    """Ten digits. x is float32 of shape (n, 28, 28, 1), from 0 to 1. The writers of the test images train nothing."""

    recipe = Recipe(local_epochs=1, batch_size=10, learning_rate=0.03)
    partition = "natural"
    classes = 10
    input_shape = SHAPE
    image_shape = SHAPE[:2]
    models = ("cnn", "cnn-62", "softmax")
    rotates = True
    public = True

    def load(self) -> Dataset:
        """Return 60,000 training images of 539 writers and 10,000 test images of 297."""
        images, writers = _below(self.config.data_path, IMAGES), _below(self.config.data_path, WRITERS)
        train, owners = self._part(images, writers, "train")
        test, test_owners = self._part(images, writers, "test")
        return Dataset(train, test, owners, test_owners, groups={"writer": owners})

    def build(self) -> Model:
        """Return a network of two convolutions, or softmax regression.

        The network has 10 outputs, or 62 as in the paper. Softmax regression needs no TensorFlow.
        """
        if self.model_name == "softmax":
            from cloister.tasks.softmax import SoftmaxRegression

            return SoftmaxRegression(features=28 * 28, classes=10)
        return two_convolutions(62 if self.model_name == "cnn-62" else 10)

    def _part(self, images: Path, writers: Path, part: str) -> tuple[Examples, NDArray]:
        """Return one half of the published split, and the writer of each image.

        Images of the chosen writers are rotated.
        """
        arrays = read_arrays(images, (f"x_{part}", f"y_{part}"))
        owners = read_arrays(writers, (f"{part}_writer",))[f"{part}_writer"]
        try:
            examples = characters(arrays[f"x_{part}"], arrays[f"y_{part}"], self.classes)
        except (ValueError, DataError):
            raise DataError(
                f"task.data-path: {images} must hold images of 28 by 28 bytes and labels from 0 to 9"
            ) from None
        if owners.shape != examples.y.shape or owners.dtype.kind not in "iu" or (owners < 0).any():
            raise DataError(f"task.data-path: {writers} must name the writer of each of {len(examples)} {part} images")
        turned = np.isin(owners, turned_writers(owners, self.config.rotated_fraction))
        examples.x[turned] = np.rot90(examples.x[turned], axes=(1, 2))
        return examples, numbered(owners, np.random.default_rng(ORDER_SEED))


def turned_writers(owners: NDArray, fraction: float) -> NDArray:
    """Draw the writers whose images are rotated by 90° counter-clockwise.

    Each writer is drawn independently, with probability `fraction`. A writer who is drawn at one fraction is drawn at
    every larger one.

    Args:
        owners: the writer of each of n images, shape (n,).
        fraction: from 0 to 1.

    Returns:
        The numbers of the drawn writers, in rising order.
    """
    return np.array([w for w in np.unique(owners) if np.random.default_rng([TURN_SEED, w]).random() < fraction], int)


def _below(data_path: str, name: str) -> Path:
    """Find a file in the folder `task.data-path`, or one folder below."""
    folder = expanded(data_path)
    found = [*folder.glob(name), *sorted(folder.glob(f"*/{name}"))] if data_path else []
    if not found:
        raise DataError(
            f"task.data-path = {data_path!r} must be a folder with {IMAGES}, in Keras' layout, and {WRITERS}, with "
            f"train_writer and test_writer in MNIST's order (from QMNIST), there or one folder below; found no {name}"
        )
    return found[0]
