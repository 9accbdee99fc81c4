"""Log of a run for a log collector, as one JSON object a line."""

import json
import time

from cloister.config.run import changed, shown
from cloister.privacy.claims.claim import Claim, Statement
from cloister.privacy.claims.premises import to_json
from cloister.privacy.claims.record import record
from cloister.server.build import Plan
from cloister.server.ending import Ending
from cloister.server.loop import Round, published
from cloister.server.reports.console import Narrator
from cloister.server.reports.rundir import RunDirectory


class JsonNarrator(Narrator):
    """Reporter of the content of `Narrator` as JSON, with time, run and event in every line.

    If the privacy analysis relies on secret draws, the time is the day, and durations are omitted.

    Args: as `Narrator`.
    """

    run = ""
    draws = False

    def opening(self, plan: Plan, directory: RunDirectory, claim: Claim, epsilon: float | None = None) -> None:
        """The event `start`, with the settings that are not at their defaults.

        Args: as `Narrator.opening`.
        """
        self.begin(plan)
        self.run = directory.path.name
        facts: dict[str, object] = {"privacy": claim.mechanism, "status": claim.status, "epsilon": epsilon}
        facts["premises"] = to_json(claim.premises)
        settings = changed(shown(plan.config.flat()))
        self._say("start", directory=str(directory.path), rounds=self.rounds, settings=settings, **facts)

    def note(self, text: str) -> None:
        """Print the event `note`."""
        self._say("note", text=text)

    def __call__(self, done: Round, _: object) -> None:
        """Print the event `round`, and `rejected` for each reply that did not count."""
        self.last = done
        measured = done.measured
        facts: dict[str, object] = {"scores": dict(done.central or done.federated)}
        if measured is not None:
            facts |= {"noise-std": measured.noise_std, "epsilon": measured.epsilon, "abandoned": measured.abandoned}
            if not self.hides_times:
                facts["seconds"] = done.seconds["total"]
            if not self.secret_cohorts:
                facts |= {"accepted": measured.accepted, "asked": measured.asked}
        self._say("round", round=done.number, **facts)
        rejected = measured.rejected if measured and not self.secret_cohorts else ()
        for item in (*rejected, *done.unscored):
            who = {"node": str(item.node_id)} | ({"site": item.site} if item.site else {})
            self._say("rejected", round=done.number, **who, code=item.code, detail=item.detail)

    def closing(
        self,
        plan: Plan,
        directory: RunDirectory,
        statement: Statement,
        ending: Ending,
        kept: Round | None,
        seconds: float,
    ) -> None:
        """Print the event `end`, with the kept model's scores and the statement.

        Args: as `Narrator.closing`.
        """
        facts: dict[str, object] = {"ended": ending.how, "stopped": ending.why}
        if kept is not None:
            facts |= {"kept": kept.number, "scores": dict(kept.central or kept.federated)}
        if not self.hides_times:
            facts["seconds"] = round(seconds, 1)
        self._say(
            "end", rounds=self.last.number if self.last else 0, **facts, privacy=record(statement) | ending.facts()
        )

    def _say(self, event: str, **facts: object) -> None:
        form = "%Y-%m-%d" if self.hides_times else "%Y-%m-%dT%H:%M:%SZ"
        moment = time.strftime(form, time.gmtime(published(time.time(), self.hides_times)))
        line = {"time": moment, "run": self.run, "event": event, **facts}
        self.console.print(json.dumps(line, ensure_ascii=False), soft_wrap=True)
