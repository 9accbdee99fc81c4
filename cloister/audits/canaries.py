"""Lower bounds on ε from a finished run's canaries, beside the run's claim."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister.audits.one_run import CONFIDENCE, OneRun
from cloister.core.digits import at_least, at_most, percent_at_least
from cloister.core.errors import ConfigError
from cloister.core.files import read_text
from cloister.privacy.claims.server import RUN

NAME = "canaries.json"
"""File in the run directory."""
DELTA = 1e-5
"""δ of the bounds if the run claims no ε."""


@dataclass(frozen=True)
class CanaryBounds:
    """Lower bounds on the ε of a run, with the claim that they test.

    Attributes:
        canaries, guesses, right, rounds: m, r, number of right guesses, and number of scored rounds.
        delta, confidence: of every bound.
        claimed: ε at δ that the run claims for adding or removing a client; None: it claims none.
        distribution_free: ε, for every distribution of the scores.
        shift: μ, under the Gaussian shape.
        gaussian: ε, under the Gaussian shape.
    """

    canaries: int
    guesses: int
    right: int
    rounds: int
    delta: float
    confidence: float
    claimed: float | None
    distribution_free: float
    shift: float
    gaussian: float

    @property
    def contradicted(self) -> tuple[str, ...]:
        """Return the names of the bounds that contradict the claim; empty without a claim."""
        found = {"distribution-free": self.distribution_free, "Gaussian shape": self.gaussian}
        return tuple(name for name, bound in found.items() if self.claimed is not None and bound > self.claimed)

    def words(self) -> tuple[str, ...]:
        """Format the claim, each bound with its assumption, and the verdict: a sentence each."""
        share, delta = percent_at_least(self.confidence), at_most(self.delta)
        sure = f"with {share} confidence"
        claimed = "nothing is claimed" if self.claimed is None else f"ε = {at_most(self.claimed)} at δ = {delta}"
        verdict = (
            f"The claim is contradicted, {share} sure, by the bound: {', '.join(self.contradicted)}."
            if self.contradicted
            else "No bound is above a claim. That proves nothing: another attack might show more."
        )
        return (
            f"Claimed: {claimed}, for a client, over all rounds.",
            f"Distribution-free: ε is at least {at_least(self.distribution_free)} {sure}, for any distribution of "
            f"the scores; {self.right} of {self.guesses} guesses about {self.canaries} canaries were right.",
            f"Under the Gaussian shape: ε is at least {at_least(self.gaussian)} {sure} (μ at least "
            f"{at_least(self.shift)}), if the scores of canaries are normal with one spread, as under Gaussian noise "
            "without a draw.",
            verdict,
        )


def canary_bounds(run: Path, confidence: float = CONFIDENCE) -> CanaryBounds:
    """Compute both bounds on the ε of a finished run from its canaries.

    Args:
        run: the run directory.
        confidence: of each bound.

    Raises:
        ConfigError: the run had no canaries, or its files are not those of a run.
    """
    told = one_run_of(run)
    try:
        claims = json.loads(read_text(run / "privacy.json"))["claims"]
        rounds = int(json.loads(read_text(run / NAME))["rounds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{run / NAME} cannot be read: {type(error).__name__}") from None
    figure: dict[str, float] = next((claim for claim in claims if claim["scope"] == RUN), {})
    delta = figure.get("delta", DELTA)
    return CanaryBounds(
        canaries=len(told.coins),
        guesses=told.guesses,
        right=told.right,
        rounds=rounds,
        delta=delta,
        confidence=confidence,
        claimed=figure.get("epsilon"),
        distribution_free=told.distribution_free(delta, confidence),
        shift=told.shift(confidence),
        gaussian=told.gaussian(delta, confidence),
    )


def one_run_of(run: Path) -> OneRun:
    """Read the coins and scores of a finished run.

    Raises:
        ConfigError: the run had no canaries, or its file is not that of a run.
    """
    try:
        facts = json.loads(read_text(run / NAME))
        return OneRun(np.array(facts["coins"], bool), np.array(facts["scores"], float), facts["guesses"])
    except FileNotFoundError:
        raise ConfigError(f"{run} is no finished run with canaries: it has no {NAME}; set privacy.canaries") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{run / NAME} cannot be read: {type(error).__name__}") from None
