"""Audited run, as its directory describes it."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from numpy.typing import NDArray

from cloister.config.run import RunConfig, parse
from cloister.core.errors import ConfigError, DataError
from cloister.core.files import read_json, read_npz, read_text
from cloister.tasks.base import Model, Task
from cloister.tasks.making import model_of, named_task

MAX_CLIENTS = 10**6
"""Most clients of a simulation: the directory may be from an untrusted source, with any number."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended, as its directory describes it.

    Attributes:
        path: of the directory.
        config: of the run.
        seed: effective seed, of the partition of examples and of the initial model.
        privacy: the content of `privacy.json`.
        clients: number of simulated clients; 0: they were nodes, whose data is not available.
    """

    path: Path
    config: RunConfig
    seed: int
    privacy: Mapping[str, Any]
    clients: int

    @classmethod
    def read(cls, path: Path) -> "FinishedRun":
        """Read a run directory.

        Raises:
            ConfigError: it is no run directory, or its run has not ended.
        """
        facts, privacy = read_json(path / "config.json"), read_json(path / "privacy.json")
        if privacy.get("status") == "running":
            raise ConfigError(f"{path}: this run has not ended; audit it when it has (cloister status --runs {path})")
        if "status" not in privacy:
            raise ConfigError(f"{path / 'privacy.json'} is not what a run writes: it has no status")
        try:
            config, seed = parse(facts["config"]), int(facts["seed"])
        except ConfigError as error:
            raise ConfigError(f"{path / 'config.json'}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path} is no run directory: its config.json is not that of a run") from None
        file = path / "simulation.json"
        clients = read_json(file).get("clients") if file.is_file() else 0
        if type(clients) is not int or not 0 <= clients <= MAX_CLIENTS:
            raise ConfigError(f"{file} is not what a run writes: clients must be a whole number up to {MAX_CLIENTS}")
        return cls(path, config, seed, privacy, clients)

    @cached_property
    def task(self) -> Task:
        """Learning problem of the run."""
        return named_task(self.config.task)

    @property
    def delta(self) -> float:
        """δ at which the run's claims are stated."""
        return self.config.privacy.target_delta

    @property
    def without_examples(self) -> str:
        """Return the reason why attacks on examples are impossible; empty if they are possible."""
        if not self.clients:
            return "its clients were nodes with data of their own, which is not here (no simulation.json)"
        if self.config.privacy.server.hypotheses:
            return "it trains several hypotheses, and this attack is about one model"
        if self.config.privacy.server.canaries:
            return "canaries take part in its releases, and runs of the attacker's own would have others"
        if self.config.strategy.pretrain_epochs:
            return (
                "its first model was trained on the server's examples, which runs of the attacker's own do not repeat"
            )
        if self.config.evaluation.held_out_clients:
            return "some of its clients train nothing, and which ones was drawn at random"
        return ""

    @property
    def seconds_a_round(self) -> float | None:
        """Return the median duration of a round without evaluation.

        It is None if it was not recorded.

        The first round builds the network, and is excluded. Durations that would reveal a draw are not recorded.
        """
        path = self.path / "rounds.jsonl"
        try:
            rounds = [line for line in map(json.loads, read_text(path).splitlines()) if line["round"]]
            return median(line["seconds"]["total"] - line["seconds"].get("evaluate", 0.0) for line in rounds)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def model(self) -> Model:
        """Load the final model of the run.

        Raises:
            DataError: there is none, or there are several hypotheses.
        """
        model = model_of(self.task)
        path = self.path / f"model{model.suffix}"
        if not path.is_file():
            raise DataError(f"{self.path} holds no model{model.suffix}: the run ended without one model for everybody")
        model.load(path)
        return model

    @property
    def has_model(self) -> bool:
        """Return True if the run saved a final model for all clients."""
        return any(self.path.glob("model.*"))

    def released(self) -> dict[int, dict[str, NDArray]]:
        """Load the saved checkpoints: the model after each round, by its number.

        Number 0 is the initial model.
        """
        found = {int(path.stem.removeprefix("round-")): path for path in self.path.glob("checkpoints/round-*.npz")}
        models = {}
        for number, path in sorted(found.items()):
            try:
                models[number] = read_npz(path)
            except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
                raise DataError(f"{path} holds no model: an .npz file of its weights was expected") from None
        return models
