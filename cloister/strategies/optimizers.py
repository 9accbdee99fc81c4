"""Server optimizers: steps that turn the mean update Δ of a round into a change of the model.

Each is a pure step (state, Δ) → (state, change of the model), on flat arrays of any length, as in Reddi et al. (2021),
arXiv:2003.00295, Algorithms 1 and 2. There is no bias correction, and second moments start at τ². (Flower's start at
0, and its FedAdam corrects the bias with the exponent of the next round.) The state is plain arrays, and contains all
that must be saved.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.core import check
from cloister.core.errors import ConfigError
from cloister.core.state import State


@dataclass(frozen=True)
class Optimizer(ABC):
    """A server optimizer with rate η > 0."""

    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        check.positive(**{"strategy.server-learning-rate": self.learning_rate})

    def init(self, size: int, dtype: np.dtype) -> State:
        """Return the state before the first round, for `size` parameters."""
        return {}

    @abstractmethod
    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """Return the next state and the model's change for the mean update Δ, shape (p,)."""


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Gradient descent: the change is η·Δ. With η = 1 the new model is the clients' mean."""

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """Return the unchanged state and η·Δ."""
        return state, self.learning_rate * update


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Server momentum: v ← β·v + Δ; the change is η·v. Source: Hsu et al. (2019), arXiv:1909.06335, §4.3 (FedAvgM)."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        decay(**{"strategy.momentum": self.momentum})

    def init(self, size: int, dtype: np.dtype) -> State:
        """Return the state with v = 0."""
        return {"velocity": np.zeros(size, dtype)}

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """Return the state with the next v, and η·v."""
        velocity = self.momentum * state["velocity"] + update
        return {"velocity": velocity}, self.learning_rate * velocity


@dataclass(frozen=True)
class Adaptive(Optimizer):
    """Adaptive optimizers: m ← β₁·m + (1-β₁)·Δ, v from τ² on by `second_moment`; the change is η·m / (√v + τ)."""

    learning_rate: float = 0.1
    beta_1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        decay(**{"strategy.beta-1": self.beta_1})
        check.positive(**{"strategy.tau": self.tau})

    def init(self, size: int, dtype: np.dtype) -> State:
        """Return the state with m = 0 and v = τ²."""
        return {"first": np.zeros(size, dtype), "second": np.full(size, self.tau**2, dtype)}

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """Return the state with the next m and v, and the change η·m / (√v + τ)."""
        first = self.beta_1 * state["first"] + (1 - self.beta_1) * update
        second = self.second_moment(state["second"], update * update)
        return {"first": first, "second": second}, self.learning_rate * first / (np.sqrt(second) + self.tau)

    @abstractmethod
    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """Return the next v from the last v and Δ²."""


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """Adagrad: v ← v + Δ²."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """Return v + Δ²."""
        return second + square


@dataclass(frozen=True)
class _Decaying(Adaptive):
    beta_1: float = 0.9
    beta_2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        decay(**{"strategy.beta-2": self.beta_2})


@dataclass(frozen=True)
class Adam(_Decaying):
    """Adam: v ← β₂·v + (1-β₂)·Δ²."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """Return β₂·v + (1-β₂)·Δ²."""
        return self.beta_2 * second + (1 - self.beta_2) * square


@dataclass(frozen=True)
class Yogi(_Decaying):
    """Yogi: v ← v - (1-β₂)·Δ²·sign(v - Δ²)."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """Return v - (1-β₂)·Δ²·sign(v - Δ²)."""
        return second - (1 - self.beta_2) * square * np.sign(second - square)


def decay(**values: float) -> None:
    """Refuse a decay rate outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value}")
