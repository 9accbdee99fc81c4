"""Canary audit of a run: two lower bounds on ε, and controls with the same coins."""

from dataclasses import replace

import numpy as np

from cloister.audits.canaries import NAME, canary_bounds, one_run_of
from cloister.audits.finding import Control, Finding, Measured
from cloister.audits.one_run import CONFIDENCE, OneRun
from cloister.audits.subject import FinishedRun
from cloister.audits.table import Effort

FREE, SHAPED = "canaries, distribution-free", "canaries, Gaussian shape"
SHAPE = "the scores of canaries are normal with one spread, as under Gaussian noise without a draw"
LOUD = 20.0
"""Shift of the present canaries' scores in the control with large bounds, in standard deviations."""
LARGE = 1.0
"""ε that the bounds must reach in this control. It needs more than ten guesses."""


class CanaryAudit:
    """The audit of a run with `privacy.canaries`."""

    name = "canaries"

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why the run cannot be audited; empty if it can.

        Args:
            run: audited run.
        """
        return "" if (run.path / NAME).is_file() else "it had no canaries (privacy.canaries)"

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Bound the ε of the run from its canaries' scores and coins.

        Args:
            run: audited run.
            effort: the seed of the control with permuted coins.
        """
        bounds, told = canary_bounds(run.path), one_run_of(run.path)
        measured = _measured(told, bounds.delta)
        spread = float(told.scores.std()) or 1.0
        loud = replace(told, scores=told.scores + LOUD * spread * told.coins)
        # A permutation keeps the number of present canaries, and makes coins independent of scores.
        blind = replace(told, coins=np.random.default_rng(effort.seed).permutation(told.coins))
        controls = [
            Control("those present stand out", "succeeds", each, each.value >= LARGE)
            for each in _measured(loud, bounds.delta)
        ]
        controls += [
            Control("coins exchanged at random", "fails", each, each.value < LARGE)
            for each in _measured(blind, bounds.delta)
        ]
        return Finding(
            self.name,
            " ".join(bounds.words()),
            measured,
            tuple(controls),
            details={"canaries": bounds.canaries, "guesses": bounds.guesses, "right": bounds.right},
        )


def _measured(told: OneRun, delta: float) -> tuple[Measured, Measured]:
    free, shaped = told.distribution_free(delta, CONFIDENCE), told.gaussian(delta, CONFIDENCE)
    return (
        Measured(FREE, "epsilon", free, "client", delta=delta, confidence=CONFIDENCE),
        Measured(SHAPED, "epsilon", shaped, "client", delta=delta, confidence=CONFIDENCE, assumption=SHAPE),
    )


AUDIT = CanaryAudit()
