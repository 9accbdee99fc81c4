"""FedOpt and its cases FedAvgM, FedAdam, FedYogi and FedAdagrad: a server optimizer applied to the mean update.

    Δ = mean of the clients' models - the global model;  the global model += optimizer(Δ)

Source: Reddi et al. (2021), arXiv:2003.00295, Algorithm 1. (The class of this name in Flower averages and stops.)
"""

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from cloister.core import check
from cloister.core.arrays import Layout, from_record, to_record
from cloister.core.capabilities import OPTIMIZER, Aggregated, Messages
from cloister.core.errors import FederationError
from cloister.core.state import State, joined, part
from cloister.strategies.averaging import FedAvg
from cloister.strategies.optimizers import Adagrad, Adam, Momentum, Optimizer, Sgd, Yogi


class Finalized(FedAvg):
    """A base class for FedAvg with a server optimizer.

    Attributes:
        optimizer: a pure step.
        state: of the optimizer between rounds; None before the first round.
    """

    capabilities = OPTIMIZER

    def __init__(self, optimizer: Optimizer, **sampling: Any) -> None:
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

    def __init__(self, *, server_learning_rate: float = 0.1, momentum: float = 0.5, **sampling: Any) -> None:
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
        **sampling: Any,
    ) -> None:
        super().__init__(self.kind(server_learning_rate, beta_1, tau, beta_2), **sampling)


class FedYogi(FedAdam):
    """Yogi as the server optimizer. Source: Reddi et al. (2021), Algorithm 2."""

    kind = Yogi


class FedAdagrad(Finalized):
    """Adagrad as the server optimizer, with β₁ = 0. Source: Reddi et al. (2021), Algorithm 2."""

    def __init__(self, *, server_learning_rate: float = 0.1, tau: float = 1e-3, **sampling: Any) -> None:
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
        **sampling: Any,
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
