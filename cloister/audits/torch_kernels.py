"""Trials of the kernels of PyTorch, on a device and with small modules, as `keras_kernels` does for TensorFlow.

What is tried is the graph that DP-SGD computes in rows: losses, gradients and norms of all units of a round. What is
held of a unit must not depend on the numbers in other rows. Equal calls must give equal sums, in rows and in turn.
Trials can refute a premise, but cannot prove it.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from cloister.audits.kernels import EXTREMES, processor, scale
from cloister.privacy.dpsgd.batches import Draws
from cloister.privacy.dpsgd.clipped_sums import Call
from cloister.privacy.dpsgd.nested import Probe
from cloister.privacy.dpsgd.torch_calls import Loss, equal_results
from cloister.privacy.dpsgd.torch_checks import use_single_precision
from cloister.privacy.dpsgd.torch_in_rows import TorchInRows
from cloister.privacy.dpsgd.torch_step import engine_of
from cloister.utils.arrays import Network, Tensor

CHOICES = 3
"""Whole numbers in examples and labels are below this."""
BATCH = 8
"""Expected units of a batch: calls have more places."""


def of_classes(y: Tensor, outputs: Tensor) -> Tensor:
    """Return the cross-entropy of each example."""
    return functional.cross_entropy(outputs, y, reduction="none")


class Model(NamedTuple):
    """Module with its loss, and the examples that it is tried on.

    Attributes:
        build: makes the module.
        shape: of one example.
        loss: (labels, outputs) -> (rows,); labels are whole numbers.
        words: whether examples are whole numbers.
        cap: examples of a unit.
    """

    build: Callable[[], Network]
    shape: tuple[int, ...]
    loss: Loss = of_classes
    words: bool = False
    cap: int = 1

    def probe(self) -> Probe:
        """Return three dummy examples."""
        return np.zeros((3, *self.shape), np.int64 if self.words else np.float32), np.zeros(3, np.int64)


class Trial:
    """Test cases of one model, in calls of one shape.

    Args:
        model: to try.
        device: of PyTorch. DP-SGD computes units in rows on a processor alone.
        seed: of all random draws. None: the operating system's entropy.

    Attributes:
        cases, changed, differed, kernels, places, in_rows: as in `kernels.Tried`.
    """

    def __init__(self, model: Model, device: str, seed: int | None = None) -> None:
        self._model, self._module = model, model.build().to(device)
        self._engine, _ = engine_of(self._module, model.loss, model.probe(), BATCH, model.cap)
        self.in_rows, self.places = isinstance(self._engine, TorchInRows), self._engine.places
        self.kernels = ", ".join(sorted(set(self._engine.kernels.values()))) or self._engine.method
        self._rng, self.cases, self.changed, self.differed = np.random.default_rng(seed), 0, 0, 0

    def case(self) -> None:
        """Draw weights and units, and compare calls.

        Two calls are equal. In rows, some units of a round are computed once more, beside others whose examples have
        extreme numbers, other labels, and other gaps.
        """
        rng, engine, cap = self._rng, self._engine, self._model.cap
        with torch.no_grad():
            for own in self._module.parameters():
                drawn = np.clip(scale(rng) * rng.standard_normal(tuple(own.shape)), -3e38, 3e38)
                own.copy_(torch.from_numpy(drawn.astype(np.float32)))
        x, y = self._examples(engine.places * cap)
        mask = np.ones((engine.places, cap), bool)
        call = Call(x, y, mask, 1.0, engine.seeds(Draws(int(rng.integers(1 << 31)))))
        one, again = ([own.tobytes() for own in engine(call).arrays] for _ in range(2))
        self.cases += 1
        self.differed += one != again
        if isinstance(engine, TorchInRows):
            self.changed += self._is_changed(engine, x, y, call.seeds[0])

    def _is_changed(self, engine: TorchInRows, x: NDArray, y: NDArray, seed: NDArray[np.int64]) -> bool:
        rng, units, cap = self._rng, engine.at_once, self._model.cap
        kept = rng.permutation(units) < rng.integers(1, units)  # at least one unit, and not all
        own = kept.repeat(cap)
        x, y, (others, labels) = x[: units * cap], y[: units * cap], self._examples(units * cap)
        if not self._model.words:
            others = rng.choice(rng.choice(EXTREMES, rng.integers(1, 3)), x.shape).astype(x.dtype)
        others[own], labels[own] = x[own], y[own]
        counted = np.ones((units, cap), bool)
        gaps = np.where(kept[:, None], counted, rng.random(counted.shape) < 0.5)

        def bits(x: NDArray, y: NDArray, counted: NDArray) -> list[bytes]:
            with torch.no_grad(), torch.inference_mode(False), equal_results(fill=False):
                return [each.numpy()[kept].tobytes() for each in engine.held(engine.values(), x, y, counted, seed)]

        return bits(x, y, counted) != bits(others, labels, gaps)

    def _examples(self, count: int) -> tuple[NDArray, NDArray]:
        """Draw examples and labels."""
        rng, shape = self._rng, (count, *self._model.shape)
        x = rng.integers(CHOICES, size=shape) if self._model.words else rng.standard_normal(shape).astype(np.float32)
        return x, rng.integers(CHOICES, size=count)


class Residual(nn.Module):
    """Adds the outputs of a module to its inputs."""

    def __init__(self, inner: Network) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.inner(x)


class Scaled(nn.Module):
    """Scales, shifts and appends what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.place, self.scale = nn.Parameter(torch.randn(1, 5, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (n, 30)."""
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return functional.gelu(x * self.scale).flatten(1)


class Attends(nn.MultiheadAttention):
    """Attends to all positions, and takes their mean."""

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (n, width)."""
        return super().forward(x, x, x)[0].mean(1)


class Recurrent(nn.GRU):
    """Returns its last state."""

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (n, width)."""
        return super().forward(x)[1][0]


class Heads(nn.Module):
    """Multiplies each position by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (n, 2, 8)."""
        return torch.einsum("bti,tio->bto", x, self.weight)


class Places(nn.Module):
    """Sorts features, chooses some of them, and puts them at other places."""

    def forward(self, x: Tensor) -> Tensor:
        """Return features, shape (n, 6 · width + 3)."""
        largest, places = x.topk(3, 1)
        put = x.clone()
        put[:, [0, 2]] = largest[:, 1:] * x[:, :2]
        scattered = torch.zeros_like(x).scatter(1, places, x.gather(1, places).exp())
        added = x.index_add(1, torch.tensor([1, 1, 0]), largest)
        parts = x.sort(1)[0], put, scattered, added, x[:, [2, 1, 0]], torch.slice_scatter(x, largest, 1, 0, 3)
        return torch.cat([*parts, x.cumsum(1), x.amax(1, keepdim=True)], 1)


class Chosen(nn.Module):
    """Looks words up in a table that is trained, and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(CHOICES, 6, padding_idx=2), nn.Linear(6, 5)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CHOICES))

    def forward(self, words: Tensor) -> Tensor:
        """Return scores, shape (n, 5)."""
        return self.out((self.table(words) * self.weights[words][..., None]).mean(1))


def several_losses(y: Tensor, outputs: Tensor) -> Tensor:
    """Return a sum of losses of each example."""
    hot = functional.one_hot(y, outputs.shape[1]).to(outputs.dtype)
    logits = functional.log_softmax(outputs, 1)
    each = (
        functional.binary_cross_entropy_with_logits(outputs, hot, reduction="none"),
        functional.mse_loss(outputs, hot, reduction="none"),
        functional.huber_loss(outputs, hot, reduction="none"),
        functional.kl_div(logits, hot, reduction="none"),
        functional.binary_cross_entropy(outputs.sigmoid(), hot, reduction="none"),
        functional.hinge_embedding_loss(outputs, 2 * hot - 1, reduction="none"),
    )
    smooth = functional.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)
    whole = functional.nll_loss(logits, y, reduction="none") + 1 - functional.cosine_similarity(outputs, hot)
    return smooth + whole + sum(own.mean(1) for own in each)


def _stack(*parts: Any) -> Network:
    return nn.Sequential(*parts[:-1], nn.Flatten(), nn.Linear(parts[-1], 3))


def _normalised() -> Network:
    convolutions = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 6, 3, 2, 2, groups=2)
    return _stack(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(24), 24)


MODELS: Mapping[str, Model] = {
    "dense": Model(lambda: _stack(nn.Linear(6, 8), nn.ReLU(), 8), (6,)),
    "dense, wide": Model(lambda: _stack(nn.Linear(784, 128), nn.ReLU(), 128), (784,)),
    "dense, units of three examples": Model(lambda: _stack(nn.Linear(13, 16), nn.GELU(), 16), (13,), cap=3),
    "dense, frozen": Model(lambda: _stack(nn.Linear(6, 8).requires_grad_(False), nn.Tanh(), 8), (6,)),
    "dense, products of positions": Model(lambda: _stack(Residual(nn.Linear(64, 64)), 128), (2, 64)),
    "convolution, pooling": Model(
        lambda: _stack(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), 16), (2, 6, 6)
    ),
    "convolution, many channels": Model(
        lambda: _stack(nn.Conv2d(32, 32, 3), nn.AvgPool2d(2), nn.ReflectionPad2d(1), 2048), (32, 14, 14)
    ),
    "norms, groups": Model(_normalised, (2, 6, 6)),
    "convolution along one axis": Model(lambda: _stack(nn.Conv1d(2, 4, 3, dilation=2), 8), (2, 6)),
    "scales, offsets": Model(lambda: _stack(Scaled(), 30), (4, 6)),
    "dropout of nothing": Model(lambda: _stack(nn.Linear(6, 8), nn.Dropout(1e-12), 8), (6,)),
    "attention": Model(lambda: _stack(Attends(8, 2, batch_first=True), 8), (5, 8)),
    "transformer": Model(lambda: _stack(nn.TransformerEncoderLayer(8, 2, 6, 1e-12, batch_first=True), 32), (4, 8)),
    "volumes": Model(
        lambda: _stack(nn.Conv3d(1, 2, 2), nn.InstanceNorm3d(2), nn.PReLU(), nn.ConvTranspose3d(2, 2, 2, 2), 128),
        (1, 3, 3, 3),
    ),
    "pools of volumes": Model(
        lambda: _stack(
            nn.Conv3d(1, 4, 2), nn.ELU(), nn.MaxPool3d(2), nn.AvgPool3d((1, 2, 1)), nn.AdaptiveMaxPool3d(1), 4
        ),
        (1, 5, 5, 5),
    ),
    "recurrence": Model(lambda: _stack(Recurrent(6, 4, batch_first=True), 4), (5, 6)),
    "matrices of positions": Model(lambda: _stack(Heads(), 16), (2, 6)),
    "places": Model(lambda: _stack(nn.Linear(6, 5), Places(), 34), (6,)),
    "words": Model(Chosen, (4,), words=True),
    "losses": Model(lambda: nn.Linear(6, 4), (6,), several_losses),
}
"""By name; all are computed in rows on a processor."""


def tried(until: float, device: str = "") -> dict[str, Trial]:
    """Run a case of each model in turn, again and again, until the deadline.

    Each has at least one case.

    Args:
        until: deadline, a time of `time.monotonic`.
        device: of PyTorch; empty: a GPU if there is one.

    Raises:
        ConfigError: the device is set to coarser products.
    """
    use_single_precision()
    trials = {name: Trial(model, device or device_name()) for name, model in MODELS.items()}
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
