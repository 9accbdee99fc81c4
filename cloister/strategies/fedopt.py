"""FedOpt and its cases FedAvgM, FedAdam, FedYogi and FedAdagrad: a server optimizer applied to the mean update.

    Δ = mean of the clients' models - the global model;  the global model += optimizer(Δ)

Source: Reddi et al. (2021), arXiv:2003.00295, Algorithms 1 and 2. Flower's class of this name only averages.

Each optimizer is a pure step (state, Δ) → (state, change of the model), on flat arrays of any length. There is no bias
correction, and second moments start at τ². Flower's start at 0, and its FedAdam corrects the bias with the exponent of
the next round. The state is plain arrays, and contains all that must be saved.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cloister.strategies.averaging import FedAvg, Sampling
from cloister.utils import check
from cloister.utils.arrays import Layout, State, from_record, joined, part, to_record
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.registry import OPTIMIZER, Aggregated, Messages


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
    """Adaptive optimizers: m ← β₁·m + (1-β₁)·Δ; v starts at τ², `second_moment` updates it. Change: η·m / (√v + τ)."""

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


class Finalized(FedAvg):
    """A base class for FedAvg with a server optimizer.

    Attributes:
        optimizer: a pure step.
        state: of the optimizer between rounds; None before the first round.
    """

    capabilities = OPTIMIZER

    def __init__(self, optimizer: Optimizer, **sampling: Sampling | None) -> None:
        super().__init__(**sampling)
        self.optimizer = optimizer
        self.state: State | None = None
        self._sent: ArrayRecord | None = None

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Messages:
        """Configure the messages of FedAvg, and store the model sent, from which Δ is computed."""
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Messages) -> Aggregated:
        """Return the global model after the optimizer's step."""
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, metrics
        if self._sent is None:
            raise FederationError("aggregate_train was called before configure_train: there is no model to step from")
        sent = from_record(self._sent)
        layout = Layout.of(sent)
        model = np.concatenate(layout.rows(sent), dtype=layout.dtype)
        update = np.concatenate(layout.rows(from_record(mean)), dtype=layout.dtype) - model
        if self.state is None:
            self.state = self.optimizer.init(layout.size, update.dtype)
        self.state, change = self.optimizer.step(self.state, update)
        stepped = np.split(model + change, layout.offsets[1:-1])
        return to_record(layout.named(tuple(stepped))), metrics

    def state_dict(self) -> State:
        """Return the state of the draws and the optimizer's moments."""
        return {**super().state_dict(), **joined({"optimizer": self.state or {}})}

    def load_state_dict(self, state: State) -> None:
        """Restore the state of the draws and the optimizer's moments."""
        super().load_state_dict(state)
        self.state = part(state, "optimizer") or None


class FedAvgM(Finalized):
    """FedAvg with server momentum. The defaults are those of Sáinz-Pardo Díaz et al. (2026)."""

    def __init__(
        self, *, server_learning_rate: float = 0.1, momentum: float = 0.5, **sampling: Sampling | None
    ) -> None:
        super().__init__(Momentum(server_learning_rate, momentum), **sampling)


class FedAdam(Finalized):
    """Adam as the server optimizer. Source: Reddi et al. (2021), Algorithm 2."""

    kind: type[Adam] | type[Yogi] = Adam

    def __init__(
        self,
        *,
        server_learning_rate: float = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        tau: float = 1e-3,
        **sampling: Sampling | None,
    ) -> None:
        super().__init__(self.kind(server_learning_rate, beta_1, tau, beta_2), **sampling)


class FedYogi(FedAdam):
    """Yogi as the server optimizer. Source: Reddi et al. (2021), Algorithm 2."""

    kind = Yogi


class FedAdagrad(Finalized):
    """Adagrad as the server optimizer, with β₁ = 0. Source: Reddi et al. (2021), Algorithm 2."""

    def __init__(self, *, server_learning_rate: float = 0.1, tau: float = 1e-3, **sampling: Sampling | None) -> None:
        super().__init__(Adagrad(server_learning_rate, 0.0, tau), **sampling)


class FedOpt(Finalized):
    """FedOpt with a choice of server optimizers. Source: Reddi et al. (2021), Algorithm 1.

    Args:
        server_optimizer: `sgd`, `momentum`, `adam`, `yogi` or `adagrad`. `sgd` with rate 1 is called FedOpt in
            Sáinz-Pardo Díaz et al. (2026).
        server_learning_rate: η.
        momentum: β of `momentum`.
        beta_1, beta_2: of `adam` and `yogi`; `adagrad` uses only β₁.
        tau: τ of the adaptive optimizers.
        sampling: as in `Sampled`.
    """

    def __init__(
        self,
        *,
        server_optimizer: str = "sgd",
        server_learning_rate: float = 1.0,
        momentum: float = 0.9,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        tau: float = 1e-3,
        **sampling: Sampling | None,
    ) -> None:
        choices: dict[str, Optimizer] = {
            "sgd": Sgd(server_learning_rate),
            "momentum": Momentum(server_learning_rate, momentum),
            "adam": Adam(server_learning_rate, beta_1, tau, beta_2),
            "yogi": Yogi(server_learning_rate, beta_1, tau, beta_2),
            "adagrad": Adagrad(server_learning_rate, beta_1, tau),
        }
        check.one_of(choices, **{"strategy.server-optimizer": server_optimizer})
        super().__init__(choices[server_optimizer], **sampling)
