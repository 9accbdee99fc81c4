"""Early stopping on the best loss."""

import math
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord

from cloister.core.arrays import from_record, to_record
from cloister.core.state import State, joined, part

CRITERION = "loss"
"""Score of every task, for which a smaller value is better."""


class EarlyStopping:
    """Early stopping that keeps the best model.

    Args:
        patience: evaluations without a better loss after which to stop; 0: never.
        first_round: evaluations before it do not count.

    Attributes:
        best: the model of the least loss from `first_round` on; None before the first.
        best_round: its round.
    """

    def __init__(self, patience: int, first_round: int = 0) -> None:
        self.patience = patience
        self.first_round = first_round
        self.best: ArrayRecord | None = None
        self.best_round = 0
        self._smallest = math.inf
        self._since = 0

    def observe(self, number: int, scores: Mapping[str, float], arrays: ArrayRecord) -> bool:
        """Record the scores of a round and return whether to stop.

        Without a loss, it returns False.
        """
        loss = scores.get(CRITERION)
        if not self.patience or loss is None or number < self.first_round:
            return False
        if loss < self._smallest:
            self._smallest, self._since, self.best, self.best_round = loss, 0, arrays, number
        else:
            self._since += 1
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Return whether `patience` evaluations in a row had no better loss."""
        return 0 < self.patience <= self._since

    def state_dict(self) -> State:
        """Return the best model and the evaluations since; empty without patience."""
        if not self.patience:
            return {}
        numbers = {"round": self.best_round, "smallest": self._smallest, "since": self._since}
        best = {} if self.best is None else from_record(self.best)
        return {**{name: np.array(value) for name, value in numbers.items()}, **joined({"best": best})}

    def load_state_dict(self, state: State) -> None:
        """Restore the best model and the count of evaluations."""
        if not self.patience:
            return
        self.best_round, self._since = int(state["round"]), int(state["since"])
        self._smallest, best = float(state["smallest"]), part(state, "best")
        self.best = to_record(best) if best else None

    def why(self) -> str:
        """Return the message about the stop."""
        if self.best is None:
            return f"stopped: {self.patience} evaluations without a {CRITERION} that is a number"
        return (
            f"stopped: {self.patience} evaluations without a {CRITERION} below {self._smallest:.4g}, that of round "
            f"{self.best_round}, whose model is kept"
        )
