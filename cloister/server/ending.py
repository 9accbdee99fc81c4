"""How a run ended: what its claim, its console and whoever started it are told."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cloister.core.errors import BudgetExhausted, CloisterError, TooFewNodes

Ended = Literal["as-asked", "budget", "operator", "too-few-nodes", "disk", "no-replies", "error"]
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        how: `as-asked`: after all its rounds, or when early stopping said so; `budget`: the next round would have
            passed it; `operator`: somebody asked it to stop; `too-few-nodes`: fewer stayed connected than
            `strategy.quorum`; `disk`: it was full; `no-replies`: nobody's reply counted; `error`: anything else.
        why: for a person; empty where all rounds were run.
    """

    how: Ended = "as-asked"
    why: str = ""

    def facts(self) -> dict[str, object]:
        """What `privacy.json` says of it."""
        return {"ended": {"how": self.how, "why": self.why}}


def ending_of(error: BaseException) -> Ending:
    """The ending that an error makes. The text of a foreign error stays out: it may hold values of arrays."""
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
    """Whether a full disk is what an error comes from, by itself or as the cause of one of ours."""
    return any(isinstance(each, OSError) and each.errno in FULL for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
