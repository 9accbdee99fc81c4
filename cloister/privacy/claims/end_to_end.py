"""What the noise of DP-SGD on the clients is worth, for an example and for a client: as published, and as it is.

The method of the thesis on end-to-end privacy adds noise while clients train and claims it twice: for each example, and
again for each client, on whose whole update the noise of its k local steps lies. Its formulas are here to reproduce its
tables and to compare with; `docs/end-to-end.md` derives both sets and says what is wrong with the first.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from scipy import stats  # type: ignore[import-untyped]

from cloister.config.privacy import PrivacyConfig
from cloister.core import check
from cloister.privacy.accounting.account import Account, by_accountant
from cloister.privacy.accounting.events import MIN_MULTIPLIER, Gaussian, Pure, Sampling
from cloister.privacy.dpsgd.local_steps import LocalSteps, caveats

EVERYBODY = "everybody else, the server and the other clients together: the noise is added on the client"
UNITS_ARE_NEIGHBOURS = {
    "example": "the gradients of one example count or not; how many examples a client has is public",
    "group": "the gradients of all examples of one group count or not; how many groups a client has is public",
}
CLIENTS_ARE_NEIGHBOURS = "the gradients of all examples of one client count or not; its noise is added in both cases"
PUBLISHED_CLIENT_REASONS = (
    "the noise N(0, σ²S²) is on the sum of a batch, and the formula takes it for noise on the mean of a batch: it "
    "counts the batch size times too much of it",
)
PUBLISHED_EXAMPLE_REASONS = (
    "batches are parts of a shuffled order, and the formula takes them for Poisson draws",
    "it counts on the draw of clients, which the server knows, and which the steps of a round share",
)


@dataclass(frozen=True)
class Setting:
    """A federation of DP-SGD clients, as the published formulas see it.

    Attributes:
        noise_multiplier: σ.
        batch_size: B.
        examples: |P|, of each client.
        epochs: E, in each round.
        participation: C, the share of the clients that train in a round.
        rounds: T.
    """

    noise_multiplier: float
    batch_size: int
    examples: int
    epochs: int
    participation: float
    rounds: int

    @property
    def local_steps(self) -> float:
        """k = E·|P|/B."""
        return self.epochs * self.examples / self.batch_size


def published_example(setting: Setting) -> Account:
    """T·k Gaussians of multiplier σ, Poisson-sampled with q = C·B/|P|. Heuristic: `PUBLISHED_EXAMPLE_REASONS`."""
    rate = setting.participation * setting.batch_size / setting.examples
    event = Gaussian(setting.noise_multiplier, Sampling("poisson", rate))
    return Account().plus(event, round(setting.rounds * setting.local_steps))


def published_client(setting: Setting) -> Account:
    """T Gaussians of multiplier σ/√k, Poisson-sampled with q = C. Heuristic: `PUBLISHED_CLIENT_REASONS`."""
    multiplier = recovered_multiplier(setting.noise_multiplier, setting.local_steps)
    return Account().plus(Gaussian(multiplier, Sampling("poisson", setting.participation)), setting.rounds)


def recovered_multiplier(noise_multiplier: float, local_steps: float) -> float:
    """σ/√k, which the thesis claims for a client: noise of σS√k over a sensitivity of S·k."""
    check.positive(local_steps=local_steps)
    return noise_multiplier / math.sqrt(local_steps)


def client_multiplier(noise_multiplier: float, batch: int, local_steps: int) -> float:
    """σ/(b√k): what a client's own noise is worth for the client.

    Args:
        noise_multiplier: σ; the noise on the sum of a batch is N(0, σ²S²).
        batch: b, the most examples in a batch: together their clipped gradients move the sum by at most b·S.
        local_steps: k.

    Guarantee: k adaptive Gaussian mechanisms, each of multiplier σ/b, are together as hard to tell apart as one of
        multiplier σ/(b√k).
    """
    check.positive(batch=batch, local_steps=local_steps)
    return noise_multiplier / (batch * math.sqrt(local_steps))


def sound_example(steps: LocalSteps, noise_multiplier: float, rounds: int) -> Account:
    """An example of a client that took part in so many rounds, against everybody."""
    return Account().plus(steps.event(noise_multiplier), rounds)


def sound_client(steps: LocalSteps, noise_multiplier: float, rounds: int, delta: float) -> tuple[float, float]:
    """ε at δ of a client that took part in so many rounds, against everybody, and the multiplier of a round.

    Half of δ is for the chance that some Poisson batch is larger than the size that is counted on: sizes do not depend
    on what the examples are, so that it is simply added.
    """
    batch, rest = _largest_batch(steps, rounds, delta)
    multiplier = client_multiplier(noise_multiplier, batch, steps.count)
    if rounds == 0:
        return 0.0, multiplier
    if multiplier < MIN_MULTIPLIER:
        return math.inf, multiplier
    return Account().plus(Gaussian(multiplier), rounds).epsilon(rest, "pld"), multiplier


def _largest_batch(steps: LocalSteps, rounds: int, delta: float) -> tuple[int, float]:
    """A size that all batches of all rounds stay within, and the δ that is left when that has had its share."""
    if steps.sampling == "shuffle" or steps.rate == 1:
        return min(steps.batch_size, steps.examples), delta
    tail = delta / 2 / max(1, rounds * steps.count)
    return int(stats.binom.isf(tail, steps.examples, steps.rate)), delta / 2


def dp_sgd_statement(
    privacy: PrivacyConfig,
    *,
    examples: int,
    batch_size: int,
    epochs: int,
    rounds_taken_part: int,
    delta: float,
    unit: Literal["example", "group"] = "example",
    hypotheses: int = 1,
) -> dict[str, Any]:
    """What may be said about the data of one client of a run with `privacy.client = "dp-sgd"`.

    Args:
        privacy: of the run.
        examples: n that the client trained on, in units.
        batch_size: B, in units.
        epochs: E of a round.
        rounds_taken_part: rounds that the client trained in; more can only cost more.
        delta: at which ε is computed.
        unit: what is clipped by itself: an example, or with `task.group` a group of them.
        hypotheses: k that a client chooses among; each private choice is one more release about a unit.

    Returns:
        A part of `privacy.json`. `claims` are sound and empty where nothing is; `heuristic` are figures that are not
        guarantees, each with its reasons.
    """
    steps = LocalSteps(examples, batch_size, epochs, privacy.dp_sgd.batch_sampling)
    sigma, reasons = privacy.dp_sgd.noise_multiplier, caveats(privacy)
    facts: dict[str, Any] = {
        "mechanism": "dp-sgd",
        "status": "heuristic" if reasons else "sound",
        "reasons": reasons,
        "parameters": _parameters(privacy, unit),
        "noise": "seeded" if privacy.noise_seed != -1 else "from the operating system's entropy",
        f"{unit}s": examples,
        "rounds": rounds_taken_part,
        "claims": [],
        "heuristic": [],
    }
    if not reasons:
        choices = rounds_taken_part if hypotheses > 1 else 0
        account = sound_example(steps, sigma, rounds_taken_part).plus(Pure(privacy.choice_epsilon), choices)
        # What a choice tells of one unit, it tells of each of a client's.
        beside = choices * examples * privacy.choice_epsilon
        facts["claims"] = [
            _unit_claim(account, steps, sigma, rounds_taken_part, delta, unit),
            _client_claim(steps, sigma, rounds_taken_part, delta, beside),
        ]
    if sigma:
        facts["heuristic"] = [_published_claim(steps, sigma, rounds_taken_part, delta)]
    return facts


def _parameters(privacy: PrivacyConfig, unit: str) -> dict[str, Any]:
    names: tuple[str, ...] = (
        "client-noise-multiplier",
        "client-clipping-norm",
        "clipping-decay",
        "least-clipping-norm",
        "batch-sampling",
    )
    names += ("group-cap",) if unit == "group" else ()
    keys = privacy.dp_sgd.leaves()
    return {f"privacy.{name}": keys[name] for name in names}


def _unit_claim(
    account: Account, steps: LocalSteps, sigma: float, rounds: int, delta: float, unit: str
) -> dict[str, Any]:
    found = by_accountant(account, delta)
    tightest = min(found, key=lambda name: found[name])
    words = f"poisson, {steps.rate:.4g}" if steps.sampling == "poisson" else "shuffle, no amplification claimed"
    return {
        "unit": unit,
        "relation": "add-or-remove",
        "neighbours": UNITS_ARE_NEIGHBOURS[unit],
        "adversary": EVERYBODY,
        "epsilon": found[tightest],
        "delta": delta,
        "accountant": tightest,
        "by-accountant": found,
        "noise-multiplier": sigma,
        "steps": rounds * steps.count,
        "sampling": words,
    }


def _client_claim(steps: LocalSteps, sigma: float, rounds: int, delta: float, choices: float) -> dict[str, Any]:
    epsilon, multiplier = sound_client(steps, sigma, rounds, delta)
    return {
        "unit": "client",
        "relation": "add-or-remove",
        "neighbours": CLIENTS_ARE_NEIGHBOURS,
        "adversary": EVERYBODY,
        "epsilon": epsilon + choices,
        "delta": delta,
        "accountant": "pld",
        "noise-multiplier": multiplier,
        "releases": rounds,
    }


def _published_claim(steps: LocalSteps, sigma: float, rounds: int, delta: float) -> dict[str, Any]:
    """The thesis' figure for a client, without the amplification that it takes from the draw of clients."""
    multiplier = recovered_multiplier(sigma, steps.epochs * steps.examples / steps.batch_size)
    return {
        "unit": "client",
        "status": "heuristic",
        "reasons": list(PUBLISHED_CLIENT_REASONS),
        "formula": "σ/√k",
        "epsilon": Account().plus(Gaussian(multiplier), rounds).epsilon(delta, "published"),
        "delta": delta,
        "accountant": "published",
        "noise-multiplier": multiplier,
        "releases": rounds,
    }
