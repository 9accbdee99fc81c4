"""Whether a run is still running: Flower asks its database for each part of each message, in three statements."""

import time
from collections.abc import Callable

from cloister.deploy.superlink.in_front import InFront

SECONDS = 1.0
"""How long it is remembered. For so long after its end a run may still hand out and take parts of messages."""


class RunningRuns(InFront):
    """Remembers for a moment that a run is running; that one is not is always asked anew.

    Args:
        clock: tells seconds.
    """

    names = ("check_abort",)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.clock = clock
        self.until: dict[int, float] = {}

    def check_abort(self, run_id: int, *others: object) -> str | None:
        """Why a node is told nothing of a run; None while it is running."""
        now = self.clock()
        if now < self.until.get(run_id, now):
            return None
        said: str | None = self.inner["check_abort"](run_id, *others)
        if said is None:
            self.until[run_id] = now + SECONDS
        return said
