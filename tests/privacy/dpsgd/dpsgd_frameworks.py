"""One model in every framework that has DP-SGD: softmax regression, whose gradients have a closed form.

Nothing of a framework is imported before it is asked for.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from cloister.privacy.dpsgd.batches import Members
from cloister.privacy.dpsgd.clipped_sums import EMPTY
from cloister.privacy.dpsgd.noise import noisy_sum
from cloister.privacy.mechanisms.noise import GaussianNoise

FEATURES, CLASSES, BATCH = 40, 3, 8
FRAMEWORKS = [
    *("numpy", "sklearn", "keras"),
    *(pytest.param(name, marks=pytest.mark.torch) for name in ("torch", "torch in turn")),
]
STEPPING = FRAMEWORKS[2:]
"""Frameworks whose models take steps of `Descent`; the others take those of `noisy_sum`."""


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays)))


def gradient(kernel: np.ndarray, bias: np.ndarray, x: np.ndarray, y: int, framework: str = "") -> list[np.ndarray]:
    """Of one example, in double precision. scikit-learn has a logistic function for each class."""
    scores = x.astype(np.float64) @ kernel.astype(np.float64) + bias
    if framework == "sklearn":
        values = 1 / (1 + np.exp(-scores))
    else:
        values = np.exp(scores - scores.max())
        values = values / values.sum()
    delta = values - (np.arange(CLASSES) == y)
    return [np.outer(x.astype(np.float64), delta), delta]


def examples(size: int = BATCH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((size, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, size)


def weights(seed: int = 1, scale: float = 0.5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(shape)).astype(np.float32) for shape in ((FEATURES, CLASSES), (CLASSES,))]


def kind_of(framework: str) -> Any:
    """The class of DP-SGD."""
    if framework == "keras":
        from cloister.privacy.dpsgd.step import DpSgd

        return DpSgd
    pytest.importorskip("torch")
    from cloister.privacy.dpsgd.torch_step import TorchDpSgd

    return TorchDpSgd


def stepping(framework: str, own: list[np.ndarray], kind: Any = None, **options: Any) -> Any:
    """DP-SGD, or a twin of it, on a model of these weights, with a rate of 1 and seeded draws."""
    kind = kind or kind_of(framework)
    options = {"batch_size": BATCH, "noise_multiplier": 1.0, "clipping_norm": 1.0} | options
    if framework == "keras":
        import keras

        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, "softmax")])
        step = kind(model, optimizer=keras.optimizers.SGD(1.0), **options)
    else:
        import torch

        torch.set_num_threads(1)
        model = torch.nn.Linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x, y = examples(3)
        options = {"loss": torch_loss, "probe": (x, y), "optimizer": optimizer} | options
        step = kind(model, **options)
        assert step.method == "rows"
        if framework == "torch in turn":
            _put_in_turn(step)
    step.noise = GaussianNoise(seed=11)
    begin(framework, step, own)
    return step


def begin(framework: str, step: Any, own: list[np.ndarray]) -> None:
    """Give a step these weights, and the draws that it began with."""
    if framework == "keras":
        step.model.set_weights(own)
    else:
        import torch

        with torch.no_grad():
            step.module.weight.copy_(torch.from_numpy(own[0].T.copy()))
            step.module.bias.copy_(torch.from_numpy(own[1]))
    step.reseed(0)


def _put_in_turn(step: Any) -> None:
    """Have a step compute one unit after another, as for a module without a proof."""
    from cloister.privacy.dpsgd.clipped_sums import ClippedSums
    from cloister.privacy.dpsgd.torch_in_turn import TorchInTurn

    cap = step._clipped_sums._cap
    engine = TorchInTurn(step.module, torch_loss, step.probe, step.batch_size, cap)
    step._clipped_sums = ClippedSums(engine, step._like, step.probe, step.batch_size, cap)


def torch_loss(y: Any, outputs: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs, y, reduction="none")


def as_kernels(framework: str, arrays: Any) -> list[np.ndarray]:
    """The arrays of a sum in the order and the layout of `weights`: PyTorch's kernels are transposed."""
    kernel, bias = (np.asarray(array, np.float64) for array in arrays)
    return [kernel.T if framework.startswith("torch") else kernel, bias]


def weights_of(framework: str, step: Any) -> list[np.ndarray]:
    found = step.model.get_weights() if framework == "keras" else [p.detach().numpy() for p in step.module.parameters()]
    return as_kernels(framework, found)


@cache
def _sklearn_model() -> Any:
    from sklearn.linear_model import SGDClassifier

    from cloister.tasks.sklearn_models import SklearnModel

    return SklearnModel(SGDClassifier(loss="log_loss"), FEATURES, CLASSES)


def sklearn_model(own: list[np.ndarray]) -> Any:
    """The linear model of these weights."""
    model = _sklearn_model()
    model.assign({"coef": own[0].T, "intercept": own[1]})
    return model


@cache
def _summing(framework: str, cap: int) -> Any:
    """Return a step that every sum of this framework shares: to trace one takes a second."""
    return stepping(framework, weights(), group_cap=cap)


class Summed:
    """The clipped sum of each framework, without noise."""

    def __init__(self, framework: str, own: list[np.ndarray], cap: int = 1) -> None:
        self.framework, self.own = framework, own
        self.step = _summing(framework, cap) if framework in ("keras", "torch") else None
        if self.step is not None:
            begin(framework, self.step, own)

    def of(self, x: Any, y: Any, bound: float, groups: Any = None, shares: Any = None) -> list[np.ndarray]:
        if self.step is not None:
            return as_kernels(self.framework, self.step.clipped_sum(x, y, bound, groups, shares).sums)
        names = np.arange(len(x)) if groups is None else groups
        members = [np.flatnonzero(names == name) for name in np.unique(names)]
        parts = noisy_sum(
            [lambda rows=rows: self._mean(x[rows], y[rows]) for rows in members],
            (np.zeros(FEATURES * CLASSES), np.zeros(CLASSES)),
            clipping_norm=bound,
            noise_multiplier=0.0,
            noise=GaussianNoise(1),
            shares=Members(names).means(np.ones(len(x)) if shares is None else shares),
        )
        return [parts[0].reshape(FEATURES, CLASSES), parts[1]]

    def _mean(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the gradient of a group: that of the model of scikit-learn, or the closed form."""
        with np.errstate(all="ignore"):
            if self.framework == "sklearn":
                found = sklearn_model(self.own).loss_and_gradients(x, y)[1]
                return found["coef"].T.ravel(), found["intercept"]
            each = [gradient(*self.own, one, label) for one, label in zip(x, y, strict=True)]
        return tuple(np.mean(same, axis=0).ravel() for same in zip(*each, strict=True))

    def with_and_without(self, x: Any, y: Any, bound: float, leaving: int) -> list[list[np.ndarray]]:
        """The sums of a batch and of the same without a unit: the others keep places and random numbers."""
        if self.step is not None:
            return [as_kernels(self.framework, sums) for sums in coupled(self.step, x, y, bound, leaving)]
        return [self.of(x, y, bound), self.of(np.delete(x, leaving, 0), np.delete(y, leaving, 0), bound)]


def coupled(
    step: Any, x: np.ndarray, y: np.ndarray, bound: float | np.ndarray, leaving: int, seed: int = 0
) -> list[Any]:
    """The sums of a batch with and without a unit: the others keep their places and their random numbers."""
    sums, own, bounds = [], step._clipped_sums, np.broadcast_to(bound / (1 + step.overstatement), len(x))
    units = Members(np.arange(len(y)))
    for left in (None, leaving):
        step.reseed(seed)
        total = own._nothing()
        for numbers in list(own._calls(len(x))):
            numbers = np.where(numbers == left, EMPTY, numbers)
            given = numbers, bounds, own.engine.seeds(own.draws), np.flatnonzero(numbers != EMPTY)
            for found in own._computed(x, y, units, *given):
                total = [np.add(old, new, dtype=np.float64) for old, new in zip(total, found.arrays, strict=True)]
        sums.append(total)
    return sums
