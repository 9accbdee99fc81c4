"""Tasks of PyTorch: their data is a map-style dataset, and their losses are functions of tensors."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cloister.tasks.base import Examples, Task
from cloister.tasks.targets import Loss, Target
from cloister.utils.arrays import Tensor
from cloister.utils.rows import as_rows

if TYPE_CHECKING:
    import torch


class MapStyle(Protocol):
    """Dataset of PyTorch that has a length, and an item for each index."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int) -> tuple[object, object]:
        """Return the inputs and the target of an example."""


class TorchTask(Task):
    """Task whose model is a `torch.nn.Module`; see `TorchModel` for its inputs and outputs.

    Importing this module does not import PyTorch. `input_shape` is as the module takes it, so a picture has its
    channels first. A function as loss takes tensors of targets and outputs, and returns a loss for each example.
    """

    channels_first = True

    @abstractmethod
    def build(self) -> "torch.nn.Module":
        """Return a new module."""

    @property
    def targets(self) -> dict[str, Target]:
        """Return the targets by the names of the outputs. Their loss functions take arrays too, for scores."""
        return {
            name: replace(target, loss=_OfTensors(target.loss)) if callable(target.loss) else target
            for name, target in super().targets.items()
        }

    def examples(self, data: MapStyle, groups: NDArray | None = None) -> Examples:
        """Return the items of a dataset as examples.

        The dataset's own transforms are applied once, here. Random ones belong into `transforms`.

        Args:
            data: n items, each a pair of inputs and target. Both are a tensor, an array or a number; several of them
                are in a dict or a tuple.
            groups: of the examples, shape (n,).
        """
        items = [data[place] for place in range(len(data))]
        return Examples(_stacked([x for x, _ in items]), _stacked([y for _, y in items]), groups)


def _stacked(values: Sequence[Any]) -> NDArray:
    """Return an array with a row for each value; values may be several in a dict or a tuple."""
    first = values[0]
    if isinstance(first, Mapping):
        return as_rows({name: np.stack([np.asarray(each[name]) for each in values]) for name in first})
    if isinstance(first, tuple):
        return as_rows([np.stack([np.asarray(part) for part in parts]) for parts in zip(*values, strict=True)])
    return np.stack([np.asarray(each) for each in values])


@dataclass(frozen=True)
class _OfTensors:
    """Loss function of tensors that takes arrays of NumPy too."""

    loss: Loss

    def __call__(self, y: Tensor, outputs: Tensor) -> Tensor:
        assert callable(self.loss)
        if not isinstance(outputs, np.ndarray):
            return self.loss(y, outputs)
        import torch

        with torch.no_grad():
            return self.loss(*(torch.tensor(np.ascontiguousarray(each)) for each in (y, outputs))).numpy()
