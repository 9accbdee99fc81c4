"""The round loop.

choose nodes → send → wait → [decorator: screen, bound, noise] → strategy → score → write down
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from cloister.core.decorator import Decorator, Measurements
from cloister.core.errors import BudgetExhausted, FederationError
from cloister.core.replies import Rejection
from cloister.server.stop import Stop, StopAsked
from cloister.server.stopping import EarlyStopping

SECRET = ("asked", "accepted", "rejected")
"""Measurements that tell who was drawn."""
PATIENCE = 3
"""Rounds in a row without enough replies that count, after which a run stops. Without any, the first has none."""


@dataclass(frozen=True)
class Round:
    """One round, as it is written to `rounds.jsonl`.

    Attributes:
        number: from 1 on; 0 is the initial model.
        central: scores on the server's examples.
        federated: scores on the clients' own examples.
        train: training metrics the clients sent.
        measured: by the decorator; some of it is not for release.
        unscored: evaluation replies that did not count.
        seconds: of the whole round, and of its parts.
    """

    number: int
    central: Mapping[str, float] = field(default_factory=dict)
    federated: Mapping[str, float] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    measured: Measurements | None = None
    unscored: tuple[Rejection, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def line(self, secret_cohorts: bool = False) -> dict[str, Any]:
        """The round as one JSON object, without what a draw must keep secret if it is accounted for."""
        fields = asdict(self)
        if secret_cohorts:
            del fields["seconds"]  # of a simulation: it takes as long as it has clients
        for name in SECRET if secret_cohorts and self.measured else ():
            del fields["measured"][name]
        return {"round": fields.pop("number"), **{key: value for key, value in fields.items() if value}}


Score = Callable[[ArrayRecord], Mapping[str, float]]
Observer = Callable[[Round, ArrayRecord], None]


@dataclass
class RoundLoop:
    """Runs rounds; each finished one, the initial model as number 0 first, goes to the observers.

    Args:
        grid: to the clients.
        strategy: decorated.
        score: of the server, or None.
        observers: called in order after every round with the round and its global model.
        public: what every client is told besides the model.
        timeout: seconds a round waits for replies.
        every: rounds from one evaluation to the next; the last round is always scored.
        stopping: ends a run that no longer learns.
        stop: listens for requests to end the run.
        judged_by_clients: whether it goes by their scores, and not by the server's.

    Attributes:
        stopped: why the run ended before its last round; empty if it did not.
        asked: rounds that clients were asked to train in, whatever became of their replies.
        aggregated: rounds whose replies were aggregated, whether or not the round came to its end.
    """

    grid: Grid
    strategy: Decorator
    score: Score | None
    observers: list[Observer]
    public: Mapping[str, Any]
    timeout: float
    every: int = 1
    stopping: EarlyStopping = field(default_factory=lambda: EarlyStopping(0))
    stop: Stop = field(default_factory=Stop)
    judged_by_clients: bool = False
    stopped: str = ""
    aggregated: int = 0
    asked: int = 0

    def run(self, arrays: ArrayRecord, rounds: int) -> ArrayRecord:
        """The global model after `rounds` rounds, or after as many as the budget allows, or until it is asked to stop.

        On early stopping it is the best one.

        Raises:
            FederationError: nobody's reply counted in the first round, or in several rounds in a row.
        """
        self._publish(Round(0, central=self._score(arrays)), arrays)
        silent = 0
        for number in range(1, rounds + 1):
            try:
                arrays, done = self._round(number, arrays, scored=number % self.every == 0 or number == rounds)
            except BudgetExhausted as error:
                self.stopped = f"stopped before round {number}: {error}"
                break
            except StopAsked as request:
                self.stopped = (
                    f"stopped by {request}: round {number} was abandoned; the server released nothing of it, and what "
                    "clients had sent had reached the server"
                )
                break
            self._publish(done, arrays)
            if self.stopping.observe(number, done.federated if self.judged_by_clients else done.central, arrays):
                self.stopped = self.stopping.why()
                break
            silent = 0 if _heard(done) else silent + 1
            if silent == PATIENCE or (silent and number == 1 and not done.measured.accepted):  # type: ignore[union-attr]
                raise FederationError(_why_nobody(number, done, self.strategy.has_secret_cohorts))
        return arrays if self.stopping.best is None else self.stopping.best

    def _round(self, number: int, arrays: ArrayRecord, scored: bool) -> tuple[ArrayRecord, Round]:
        clock = _Clock()
        with self.stop.waiting():
            messages = self.strategy.configure_train(number, arrays, ConfigRecord(dict(self.public)), self.grid)
            self.asked = number
            replies = self._replies(number, messages)
        clock.lap("train")
        aggregated, train = self.strategy.aggregate_train(number, replies)
        self.aggregated = number
        arrays = arrays if aggregated is None else aggregated
        clock.lap("aggregate")
        federated = self._federated(number, arrays) if scored else {}
        central = self._score(arrays) if scored else {}
        clock.lap("evaluate")
        unscored = self.strategy.unscored if federated else ()
        scores = dict(train or {})
        return arrays, Round(number, central, federated, scores, self.strategy.measured, unscored, clock.laps())  # type: ignore[arg-type]

    def _federated(self, number: int, arrays: ArrayRecord) -> Mapping[str, float]:
        config = ConfigRecord(dict(self.public))
        try:
            with self.stop.waiting():
                messages = list(self.strategy.configure_evaluate(number, arrays, config, self.grid))
                if not messages:
                    return {}
                replies = self._replies(number, messages)
        except StopAsked:
            return {}  # The model of this round is there: it is kept, without scores, and the next round is not begun.
        return dict(self.strategy.aggregate_evaluate(number, replies) or {})  # type: ignore[arg-type]

    def _replies(self, number: int, messages: Iterable[Message]) -> list[Message]:
        """Send, and wait as long as a round may take; a message nobody has fetched by then is void."""
        messages = list(messages)
        for message in messages:
            message.metadata.ttl = self.timeout
            message.metadata.group_id = str(number)  # nodes show it in their logs
        return list(self.grid.send_and_receive(messages, timeout=self.timeout))

    def _score(self, arrays: ArrayRecord) -> Mapping[str, float]:
        return self.score(arrays) if self.score else {}

    def _publish(self, done: Round, arrays: ArrayRecord) -> None:
        for observer in self.observers:
            observer(done, arrays)


class _Clock:
    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = round(now - self._last, 4)
        self._last = now

    def laps(self) -> dict[str, float]:
        return {"total": round(self._last - self._start, 4), **self._laps}


def _heard(done: Round) -> bool:
    """Whether some reply counted, or none was asked for (an empty Poisson cohort is no failure)."""
    measured = done.measured
    if measured is None or measured.asked == 0:
        return True
    return measured.accepted > 0 and not measured.abandoned


def _why_nobody(number: int, done: Round, secret_cohorts: bool) -> str:
    """Why a run ends for want of replies; not who was drawn, nor how many, where that has to stay secret."""
    if secret_cohorts or done.measured is None:
        return f"no reply counted in round {number}; see the logs of the nodes"
    reasons = sorted({f"{item.code}: {item.detail}" for item in done.measured.rejected})
    few = f"too few replies ({done.measured.accepted})" if done.measured.accepted else "no reply"
    return f"{few} counted in round {number}: " + "; ".join(reasons[:5])
