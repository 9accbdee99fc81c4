"""Server optimizers: what is done with the mean update Δ of a round.

Each is a pure step (state, Δ) → (state, change of the model), on flat arrays of any length, as in Reddi et al. (2021),
arXiv:2003.00295, Algorithms 1 and 2: there is no bias correction, and second moments start at τ². (Flower's start at
0 and, in FedAdam, correct a bias with the exponent of the round after.) State is plain arrays: saving it is saving
the optimizer.
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
        """The state before the first round, for `size` parameters."""
        return {}

    @abstractmethod
    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """The next state, and what to add to the model, for the mean update Δ of shape (p,)."""


@dataclass(frozen=True)
class Sgd(Optimizer):
    """η·Δ. With η = 1 the new model is the clients' mean."""

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """See the class."""
        return state, self.learning_rate * update


@dataclass(frozen=True)
class Momentum(Optimizer):
    """v ← β·v + Δ; η·v. Source: Hsu et al. (2019), arXiv:1909.06335, §4.3 (FedAvgM)."""

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        decay(**{"strategy.momentum": self.momentum})

    def init(self, size: int, dtype: np.dtype) -> State:
        """v = 0."""
        return {"velocity": np.zeros(size, dtype)}

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """See the class."""
        velocity = self.momentum * state["velocity"] + update
        return {"velocity": velocity}, self.learning_rate * velocity


@dataclass(frozen=True)
class Adaptive(Optimizer):
    """m ← β₁·m + (1-β₁)·Δ; v as the subclass says, from τ² on; η·m / (√v + τ)."""

    learning_rate: float = 0.1
    beta_1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        decay(**{"strategy.beta-1": self.beta_1})
        check.positive(**{"strategy.tau": self.tau})

    def init(self, size: int, dtype: np.dtype) -> State:
        """m = 0, v = τ²."""
        return {"first": np.zeros(size, dtype), "second": np.full(size, self.tau**2, dtype)}

    def step(self, state: State, update: NDArray) -> tuple[State, NDArray]:
        """See the class."""
        first = self.beta_1 * state["first"] + (1 - self.beta_1) * update
        second = self.second_moment(state["second"], update * update)
        return {"first": first, "second": second}, self.learning_rate * first / (np.sqrt(second) + self.tau)

    @abstractmethod
    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """The next v, from the last one and Δ²."""


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """v ← v + Δ²."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """See the class."""
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
    """v ← β₂·v + (1-β₂)·Δ²."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """See the class."""
        return self.beta_2 * second + (1 - self.beta_2) * square


@dataclass(frozen=True)
class Yogi(_Decaying):
    """v ← v - (1-β₂)·Δ²·sign(v - Δ²)."""

    def second_moment(self, second: NDArray, square: NDArray) -> NDArray:
        """See the class."""
        return second - (1 - self.beta_2) * square * np.sign(second - square)


def decay(**values: float) -> None:
    """Refuse a decay rate outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value}")
