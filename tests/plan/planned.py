"""Plans and runs of one configuration, for tests that compare them."""

import json
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from cloister.estimate.preview import Options, preview
from cloister.estimate.render import record
from cloister.privacy.accounting.events import Pure
from cloister.privacy.claims.premises import CRYPTOGRAPHY
from cloister.privacy.mechanisms.clipping import clip
from cloister.privacy.mechanisms.mechanism import Mechanism, Released
from cloister.privacy.mechanisms.release import bounded_sum
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate

CLIENTS = 4
TINY = {"task.model": "softmax", "num-rounds": 2, "seed": 1, "tensorboard": False, "client.local-epochs": 1}
GLOBAL = {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
DP_SGD = {"privacy.server": "none", "privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 2.5}


@dataclass(frozen=True)
class Uniformly(Mechanism):
    """A mechanism of another package, with a price of its own. What it adds is not looked at here."""

    epsilon: float = 2.0
    bound: float = 0.5
    name = "uniformly"
    premises = (CRYPTOGRAPHY,)

    def events(self, layout, sampling):
        return (Pure(self.epsilon),)

    def release(self, contributions):
        cohort = clip(contributions.cohort, self.bound)
        total = bounded_sum(cohort)
        rng = np.random.default_rng(contributions.server_round)
        model = tuple(
            (sent + (piece + rng.laplace(0, self.bound / self.epsilon, piece.shape)) / 4).astype(sent.dtype)
            for sent, piece in zip(cohort.sent, total, strict=True)
        )
        return Released((model,), self.bound / self.epsilon / 4, self.bound / 4)

    def parameters(self):
        return {"epsilon": self.epsilon, "bound": self.bound}


def planned(settings, clients=CLIENTS, **options):
    """A plan's JSON, read back."""
    found = preview(settings, Options(clients, **{"timing": False} | options))
    content = json.loads(json.dumps(record(found)))
    assert content["privacy"]["ledger"].pop("head") == "", "no line of a ledger was written"
    return content


def run(settings, clients=CLIENTS):
    """A finished run."""
    return simulate(settings, clients, ConsoleReporter(0, Console(quiet=True)))


def claimed(outcome):
    """Return the claim of a run, as in `privacy.json`, without the parts that only its end shows."""
    content = json.loads((outcome.directory.path / "privacy.json").read_text())
    del content["ended"], content["ledger"]["head"]
    assert content.pop("keys-by-provisioner", []) == [], "a plan takes them for made at the sites"
    return content
