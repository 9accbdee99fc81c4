"""Trials of the kernels of PyTorch, on a device and with small modules, as `keras_kernels` does for TensorFlow.

All calls of a module have one shape. The outputs for a row, and the gradients that flow back to its inputs, must not
depend on the numbers in other rows. Equal calls must give equal results, with gradients of parameters. Trials can
refute a premise, but cannot prove it.
"""

import itertools
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cloister.audits.kernels import EXTREMES, processor, scale
from cloister.privacy.dpsgd.torch_calls import equal_results
from cloister.privacy.dpsgd.torch_checks import use_single_precision
from cloister.utils.arrays import Network, Tensor

TABLE = 7
"""Rows of each embedding table."""


class Trial:
    """Test cases of one module, in calls of one shape.

    Args:
        module: on its device; its weights change from case to case.
        shape: of one row's inputs.
        places: rows of a call.
        kernels: names of what the module computes.
        words: whether inputs are rows of a table.
        seed: of all random draws. None: the operating system's entropy.

    Attributes:
        cases, changed, differed, kernels, places, in_rows: as in `kernels.Tried`. Only on a processor are there rows:
            on other devices DP-SGD computes units in turn.
    """

    def __init__(
        self, module: Network, shape: tuple[int, ...], places: int, kernels: str, words: bool, seed: int | None = None
    ) -> None:
        self._module, self._shape, self._words = module, (places, *shape), words
        self.kernels, self.places = kernels, places
        self._rng, self.cases, self.changed, self.differed = np.random.default_rng(seed), 0, 0, 0
        self._trained = list(module.parameters())
        self._device = next(iter(self._trained)).device
        self.in_rows = self._device.type == "cpu"
        with torch.no_grad():
            self._outputs = tuple(module(self._tensor(np.zeros(self._shape))).shape)

    def case(self) -> None:
        """Draw weights, rows and a place, and compare calls.

        Two calls are equal. A third, if there are rows, has extreme numbers in the other rows, and in the gradients of
        their outputs.
        """
        rng = self._rng
        with torch.no_grad():
            for own in self._trained:
                drawn = np.clip(scale(rng) * rng.standard_normal(tuple(own.shape)), -3e38, 3e38)
                own.copy_(torch.from_numpy(drawn.astype(np.float32)))
        place = int(rng.integers(self.places))
        x = rng.integers(TABLE, size=self._shape) if self._words else rng.standard_normal(self._shape)
        slopes = rng.standard_normal(self._outputs)
        numbers = rng.choice(EXTREMES, rng.integers(1, 3))
        others = rng.choice((0, TABLE - 1) if self._words else numbers, self._shape)
        extremes = rng.choice(numbers, self._outputs)
        others[place], extremes[place] = x[place], slopes[place]
        one, again = (self._bits(place, x, slopes) for _ in range(2))
        self.cases += 1
        if self.in_rows:
            self.changed += one[0] != self._bits(place, others, extremes)[0]
        self.differed += one != again

    def _bits(self, place: int, x: NDArray, slopes: NDArray) -> tuple[bytes, bytes]:
        """Return the bytes of the results for the row at a place, and of all results."""
        inputs = self._tensor(x).requires_grad_(not self._words)
        with equal_results():
            outputs = self._module(inputs)
            wanted = [*self._trained] if self._words else [inputs, *self._trained]
            found = torch.autograd.grad(outputs, wanted, torch.as_tensor(slopes, dtype=outputs.dtype).to(self._device))
        rows = [outputs] if self._words else [outputs, found[0]]
        return _stored([each[place] for each in rows]), _stored([outputs, *found])

    def _tensor(self, x: NDArray) -> Tensor:
        return torch.as_tensor(x, dtype=torch.int64 if self._words else torch.float32).to(self._device)


def _stored(tensors: list[Tensor]) -> bytes:
    return b"".join(tensor.detach().cpu().numpy().tobytes() for tensor in tensors)


class Products(nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """Products of the outputs and the inputs of each row over its positions, as gradients of its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return a matrix for each row, shape (n, 24, 16)."""
        return x.transpose(1, 2) @ self.inner(x)


MODULES: Mapping[str, tuple[Callable[[], Network], tuple[int, ...], int, str]] = {
    "dense, wide": (lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 5)), (784,), 96, "matmul"),
    "dense, several positions": (lambda: nn.Sequential(nn.Linear(80, 96), nn.Tanh()), (6, 80), 24, "matmul"),
    "gradients of each row": (Products, (9, 24), 24, "batched matmul"),
    "convolution, pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 12, 12),
        32,
        "convolution",
    ),
    "convolution, many channels": (lambda: nn.Conv2d(32, 64, 5, padding=2), (32, 14, 14), 48, "convolution"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(TABLE, 6), nn.Linear(6, 5)), (9,), 64, "embedding, matmul"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16)), (12,), 96, "matmul, normalization"),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8)),
        (2, 8, 8),
        32,
        "convolution, normalization",
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True),
        (9, 12),
        24,
        "attention, matmul, normalization",
    ),
}
"""By name: the module's builder, the shape of a row, the rows of a call, and the kernels."""


def tried(until: float, device: str = "") -> dict[str, Trial]:
    """Run a case of each module in turn, again and again, until the deadline.

    Each has at least one case.

    Args:
        until: deadline, a time of `time.monotonic`.
        device: of PyTorch; empty: a GPU if there is one.

    Raises:
        ConfigError: the device is set to coarser products.
    """
    use_single_precision()
    trials = {
        name: Trial(build().to(device or device_name()), shape, places, kernels, name == "embedding")
        for name, (build, shape, places, kernels) in MODULES.items()
    }
    for trial in itertools.cycle(trials.values()):
        if trial.cases and time.monotonic() >= until:
            break
        trial.case()
    return trials


def device_name() -> str:
    """Return the device that a node chooses by `auto`: `cuda`, `mps` or `cpu`."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def platform_name(device: str = "") -> str:
    """Return the processor, PyTorch's version and the device.

    Args:
        device: as in `tried`.
    """
    found = device or device_name()
    named = torch.cuda.get_device_name() if found == "cuda" else ""
    return f"{processor()}, PyTorch {torch.__version__} on {found} {named}".rstrip()
