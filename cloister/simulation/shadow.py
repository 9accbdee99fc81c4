"""Shadow federations of an attacker: the configuration of a run on examples of the attacker's choice.

Shadow runs use the same strategies, trainers and mechanisms as a run. They leave no run directory and no ledger. Their
noise comes from the operating system's entropy, independently of the run's noise seed.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message
from numpy.typing import NDArray

from cloister.client.app import app
from cloister.client.data import LocalData, handing_out, local_data, task_of
from cloister.client.node import node_of
from cloister.client.trainers import model_and_trainer_of
from cloister.config.io import Scalar
from cloister.config.privacy import SWITCHED_OFF
from cloister.config.run import RunConfig, parse
from cloister.config.variants import GlobalPrivacy, MetricPrivacy
from cloister.flower.messages import ErrorCode
from cloister.server.build import build
from cloister.server.round import Round, RoundLoop
from cloister.simulation.grid import LocalGrid, quiet
from cloister.tasks.base import Examples, Model
from cloister.tasks.making import frozen_digest_field
from cloister.utils.arrays import Layout, from_record, to_record
from cloister.utils.errors import ConfigError
from cloister.utils.wire import SEED

Arrays = Mapping[str, NDArray]
QUIET: dict[str, Scalar] = {
    "tensorboard": False,
    "run-name": "",
    "resume": "",
    "evaluation.central": False,
    "evaluation.federated": "off",
    "evaluation.held-out-clients": 0.0,
    "evaluation.patience": 0,
    "evaluation.criterion": "loss",
    "privacy.ledger-dir": "",
    **SWITCHED_OFF,
    "privacy.noise-seed": -1,
}
"""Settings of a shadow run: no scoring, no shared ledger, no reproducible noise."""


@dataclass(frozen=True)
class Shadow:
    """Configuration of a run, to be run again on other examples.

    Attributes:
        config: of the run.
    """

    config: RunConfig

    def __post_init__(self) -> None:
        if self.config.sums_gradients:
            raise ConfigError(
                "a run of dp-sgd with secure-aggregation.enabled = true has no replay: without secure aggregation its "
                "clients would train by themselves; audit its model by membership of examples, or a run without it"
            )

    @property
    def model(self) -> Model:
        """Return the model that all shadow runs train; assign arrays before use."""
        return model_and_trainer_of(self._quiet("", 0)).model

    def initial(self, seed: int) -> Arrays:
        """Return the initial model of a run with this seed.

        Args:
            seed: of the run.
        """
        model = self.model
        model.initialise(seed)
        return model.arrays()

    def run(
        self, parts: Sequence[Examples | None], seed: int, start: Arrays | None = None, rounds: int = 0
    ) -> list[Arrays]:
        """Return the global models that a run releases.

        These are the initial model and the model after each round.

        Args:
            parts: the examples of each client. None: a client that is on the roster and contributes nothing.
            seed: of shuffles and dropout, and of the initial model if none is given; never of noise.
            start: the initial model; None: that of the seed.
            rounds: number of rounds; 0: as configured. Noise is always calibrated for the configured number.

        Raises:
            CloisterError: no client takes part, or the configuration cannot be run.
        """
        seen: list[Arrays] = []

        def note(_: Round, arrays: ArrayRecord) -> None:
            seen.append({name: array.copy() for name, array in from_record(arrays).items()})

        first = self.initial(seed) if start is None else start
        like = next((part for part in parts if part is not None), None)
        if like is None:
            raise ConfigError("a shadow run needs a client with examples")
        # An absent client never requests its zero examples, and is no failure that the clients' log should contain.
        filled = [like.take(np.arange(0)) if part is None else part for part in parts]
        nodes: list[dict[str, Scalar]] = [
            {} if part is None else {"partition-id": number, "num-partitions": len(parts)}
            for number, part in enumerate(parts)
        ]
        with tempfile.TemporaryDirectory() as scratch, handing_out(filled), quiet("cloister.client"):
            config = self._quiet(scratch, seed)
            plan = build(config)
            strategy = plan.strategy.calibrated(Layout.of(first), config.num_rounds)
            plan.budget.begin("shadow")
            grid = LocalGrid(_answering(config, parts), config.flat(), nodes)
            public: dict[str, str | int] = {SEED: seed, **frozen_digest_field(self.model)}
            loop = RoundLoop(grid, strategy, None, [note], public, config.round_timeout, to_the_end=True)
            loop.run(to_record(dict(first)), rounds or config.num_rounds)
        return seen

    def _quiet(self, scratch: str, seed: int) -> RunConfig:
        return parse(self.config.flat() | QUIET | {"output-dir": scratch or "runs", "seed": seed})


def without_privacy(config: RunConfig) -> RunConfig:
    """Return the same run without any mechanism, for an attack that has to succeed.

    Args:
        config: of the run.
    """
    kept = {key: value for key, value in config.flat().items() if not key.startswith(("privacy.", "secure-"))}
    weighting = "examples" if config.weights_by_examples else "uniform"
    return parse(kept | {"privacy.server": "none", "strategy.weighting": weighting, "task.group": ""})


def without_noise(config: RunConfig) -> RunConfig:
    """Return the same run with all mechanisms but zero noise.

    A plugin mechanism keeps its noise.

    Args:
        config: of the run.
    """
    server, client = config.privacy.server, config.privacy.client
    silent: dict[str, Scalar] = {"privacy.max-epsilon": 0.0}
    if isinstance(server, GlobalPrivacy | MetricPrivacy):
        silent["privacy.noise-multiplier"] = 0.0
    if client.is_on:
        silent |= {client.noise_key: 0.0, "privacy.client-max-epsilon": 0.0}
        silent["privacy.max-leakage"] = 0.0
    return parse(config.flat() | silent)


def one_client(config: RunConfig, epochs: int = 0) -> Shadow:
    """Return a federation of one client without privacy.

    Its release is that client's model. The client trains as those of the run do.

    Args:
        config: of the run.
        epochs: of its only round; 0: as in the run.
    """
    kept = {key: value for key, value in config.flat().items() if key.startswith(("task.", "client."))}
    alone: dict[str, Scalar] = {"num-rounds": 1, "privacy.server": "none", "strategy.min-nodes": 1, "task.group": ""}
    longer: dict[str, Scalar] = {"client.local-epochs": epochs} if epochs else {}
    return Shadow(parse(kept | alone | longer))


def dealt(config: RunConfig, clients: int, seed: int) -> list[LocalData]:
    """Return the training and held-out examples of each client of a simulated run.

    Args:
        config: of the run.
        clients: number of clients.
        seed: in force.

    Raises:
        DataError: the task's data is not on this machine.
    """
    nodes = (node_of({"partition-id": number, "num-partitions": clients}) for number in range(clients))
    return [local_data(config.for_clients.task, node, seed) for node in nodes]


def outsiders(config: RunConfig) -> Examples:
    """Return the examples that no client of a simulation has: the test examples.

    Args:
        config: of the run.
    """
    return task_of(config.for_clients.task).load().test


def _answering(config: RunConfig, parts: Sequence[Examples | None]) -> Callable[[Message, Context], Message]:
    """Return the app of every node, with an error reply for a client without data.

    If clients noise their updates, a client without data sends only noise, so the app is unchanged.
    """
    absent = {number for number, part in enumerate(parts, start=1) if part is None}
    if config.privacy.client.noise_on_update is not None:
        return app

    def answer(message: Message, context: Context) -> Message:
        if context.node_id in absent:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "absent"), reply_to=message)
        return app(message, context)

    return answer
