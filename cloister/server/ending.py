"""Reasons for which a run ends, for its claim, its console and its exit status."""

import errno
from dataclasses import dataclass
from typing import Literal

from cloister.core.errors import BudgetExhausted, CloisterError, TooFewNodes

Ended = Literal["as-asked", "budget", "operator", "too-few-nodes", "disk", "no-replies", "error"]
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Ending:
    """End of a run.

    Attributes:
        how: `as-asked`: after all its rounds or by early stopping; `budget`: the next round would exceed it;
            `operator`: by a request to stop; `too-few-nodes`: fewer nodes than `strategy.quorum` stayed connected;
            `disk`: the disk was full; `no-replies`: no reply counted; `error`: any other cause.
        why: the reason as a sentence; empty after all rounds.
    """

    how: Ended = "as-asked"
    why: str = ""

    def facts(self) -> dict[str, object]:
        """Return the fields of `privacy.json` about the end."""
        return {"ended": {"how": self.how, "why": self.why}}


def ending_of(error: BaseException) -> Ending:
    """Return the ending for an exception.

    The text of foreign exceptions is omitted, since it may contain data.
    """
    if is_disk_full(error):
        return Ending("disk", "stopped: the disk is full")
    if isinstance(error, KeyboardInterrupt):
        return Ending("operator", "stopped at once, on a second request")
    if not isinstance(error, CloisterError):
        return Ending("error", f"stopped by an unexpected {type(error).__name__}")
    if isinstance(error, TooFewNodes):
        return Ending("too-few-nodes", f"stopped: {error}")
    if isinstance(error, BudgetExhausted):
        return Ending("budget", f"stopped: {error}")
    return Ending("error", f"stopped by {type(error).__name__}: {error}")


def is_disk_full(error: BaseException) -> bool:
    """Return whether the exception, or one of its causes, reports a full disk."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in FULL:
            return True
        cause = cause.__cause__
    return False
