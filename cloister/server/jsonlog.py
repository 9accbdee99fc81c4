"""What a log collector sees of a run: one JSON object a line."""

import json
import time
from typing import Any

from cloister.server.build import Plan
from cloister.server.console import Narrator
from cloister.server.loop import Round
from cloister.server.rundir import RunDirectory


class JsonNarrator(Narrator):
    """Tells what `Narrator` tells, with the time, the run and the event in every line.

    Args: as `Narrator`.
    """

    run = ""

    def opening(self, plan: Plan, directory: RunDirectory) -> None:
        """The event `start`."""
        self.secret_cohorts = plan.strategy.has_secret_cohorts
        self.run = directory.path.name
        self._say("start", directory=str(directory.path), rounds=self.rounds, privacy=plan.claim.mechanism)

    def __call__(self, done: Round, _: object) -> None:
        """The event `round`, and `rejected` for each reply that did not count."""
        self.last = done
        measured = done.measured
        facts: dict[str, Any] = {"scores": dict(done.central or done.federated)}
        if measured is not None:
            facts |= {"noise-std": measured.noise_std, "epsilon": measured.epsilon, "abandoned": measured.abandoned}
            facts["seconds"] = done.seconds["total"]
            if not self.secret_cohorts:
                facts |= {"accepted": measured.accepted, "asked": measured.asked}
        self._say("round", round=done.number, **facts)
        rejected = measured.rejected if measured and not self.secret_cohorts else ()
        for item in (*rejected, *done.unscored):
            self._say("rejected", round=done.number, node=str(item.node_id), code=item.code, detail=item.detail)

    def closing(
        self, plan: Plan, directory: RunDirectory, privacy: dict[str, Any], stopped: str, seconds: float
    ) -> None:
        """The event `end`, with what may be said about privacy."""
        rounds = self.last.number if self.last else 0
        self._say("end", rounds=rounds, stopped=stopped, seconds=round(seconds, 1), privacy=privacy)

    def _say(self, event: str, **facts: Any) -> None:
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": moment, "run": self.run, "event": event, **facts}
        self.console.print(json.dumps(line, ensure_ascii=False), soft_wrap=True)
