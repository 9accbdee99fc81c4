"""When a run has learnt what it can: no better score for a while."""

import math
from collections.abc import Mapping

from flwr.app import ArrayRecord

CRITERION = "loss"
"""The score that every task has, and that is better when it is less."""


class EarlyStopping:
    """Remembers the best model, and says when it is time to return to it.

    Args:
        patience: evaluations without a better loss after which to stop; 0: never.

    Attributes:
        best: the model of the least loss so far; None before the first.
        best_round: its round.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.best: ArrayRecord | None = None
        self.best_round = 0
        self._smallest = math.inf
        self._since = 0

    def observe(self, number: int, scores: Mapping[str, float], arrays: ArrayRecord) -> bool:
        """Take the scores of a round into account; whether to stop now. Without a loss nothing is decided."""
        loss = scores.get(CRITERION)
        if not self.patience or loss is None:
            return False
        if loss < self._smallest:
            self._smallest, self._since, self.best, self.best_round = loss, 0, arrays, number
        else:
            self._since += 1
        return self._since >= self.patience

    def why(self) -> str:
        """What is said when it stops."""
        if self.best is None:
            return f"stopped: {self.patience} evaluations without a {CRITERION} that is a number"
        return (
            f"stopped: {self.patience} evaluations without a {CRITERION} below {self._smallest:.4g}, that of round "
            f"{self.best_round}, whose model is kept"
        )
