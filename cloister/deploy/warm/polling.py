"""How often a SuperNode looks for messages: often after one, rarely when there has been none for long."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cloister.flower.supernode import start_client_internal

SHARE = 0.1
"""Of the time that a node has waited already, how much longer it may take to notice a message."""
WAITING = 0.5
"""Seconds between two looks for its own client's reply, as in Flower: nobody else is asked."""


@dataclass
class Polling:
    """The pauses between two looks for messages.

    A message is noticed after a tenth of the time it was waited for, but within `slowest`: in a run that is quick, and
    an idle node costs the SuperLink little.

    Args:
        fastest: seconds between two looks just after a message.
        slowest: seconds between two looks in the long run.
        clock: tells seconds; `sleep` lets them pass.
    """

    fastest: float = 0.5
    slowest: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.heard = self.clock()
        self.idle = False

    def looking(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """Flower's look for a message, such that it is known when there was one."""

        def looked(*arguments: Any, **named: Any) -> Any:
            found = look(*arguments, **named)
            self.idle = found is None
            if not self.idle:
                self.heard = self.clock()
            return found

        return looked

    def pause(self, seconds: float) -> None:
        """Wait before the next look; while a message is worked on, as long as Flower would, at most `WAITING`."""
        if not self.idle:
            self.heard = self.clock()
            self.sleep(min(seconds, WAITING))
        else:
            waited = self.clock() - self.heard
            self.sleep(min(max(SHARE * waited, self.fastest), self.slowest))

    def install(self) -> None:
        """Have Flower's SuperNode pause like this: its own pause is a literal in the middle of its loop."""
        names = vars(start_client_internal)
        names["_pull_and_store_message"] = self.looking(names["_pull_and_store_message"])
        # The module uses nothing else of `time`.
        names["time"] = SimpleNamespace(sleep=self.pause)
