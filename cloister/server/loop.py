"""The round loop.

wait for a quorum → choose nodes → send → wait → [screen, record, bound, noise] → strategy → score → write down
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from cloister.aggregation.decorator import Decorator, Measurements
from cloister.aggregation.screening import Rejection
from cloister.core.errors import BudgetExhausted, FederationError, TooFewNodes
from cloister.server.attested import Attested
from cloister.server.ending import Ended, Ending
from cloister.server.quorum import Quorum
from cloister.server.sites import Sites
from cloister.server.stop import Stop, StopAsked
from cloister.server.stopping import EarlyStopping

SECRET = ("asked", "accepted", "rejected")
"""Measurements that tell who was drawn."""
SILENT_ROUNDS = 3
"""Rounds in a row without enough replies that count, after which a run without a guarantee stops. Without any, the
first has none."""


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

    def line(self, secret_cohorts: bool = False, hides_times: bool = False) -> dict[str, object]:
        """The round as one JSON object, without what a draw must keep secret if it is accounted for."""
        fields = asdict(self)
        if secret_cohorts or hides_times:
            del fields["seconds"]  # it takes as long as it has clients, or they have examples
        for name in SECRET if secret_cohorts and self.measured else ():
            del fields["measured"][name]
        return {"round": fields.pop("number"), **{key: value for key, value in fields.items() if value}}

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> "Round":
        """The scores of a round that `line` wrote; what was measured and rejected stays in the file."""
        scores = ("central", "federated", "train", "seconds")
        return cls(line["round"], **{name: line[name] for name in scores if name in line})


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
        judged_by_clients: whether clients are asked for scores, and the run is judged by theirs, not by the server's.
        quorum: of connected nodes, before each round.
        to_the_end: go on whoever is silent: where there is a guarantee, an end would tell who replied.
        told: gets a sentence when the run pauses.
        sites: learns what nodes are called.
        answered: is called when the replies of a training round are there, before anything is made of them.
        attested: counts what nodes state that their clients applied.

    Attributes:
        ending: how the run ended.
        model: the last good global model: released, whether or not its round came to its end.
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
    quorum: Quorum = field(default_factory=Quorum)
    to_the_end: bool = False
    told: Callable[[str], None] = lambda _: None
    sites: Sites = field(default_factory=Sites)
    answered: Callable[[], None] = lambda: None
    attested: Attested = field(default_factory=Attested)
    ending: Ending = field(default_factory=Ending)
    model: ArrayRecord = field(default_factory=ArrayRecord)
    aggregated: int = 0
    asked: int = 0

    def run(self, arrays: ArrayRecord, rounds: int, after: int | None = None) -> ArrayRecord:
        """The global model after `rounds` rounds, or after as many as end in order.

        On early stopping it is the best one.

        Args:
            arrays: the model to start from.
            rounds: how many there are.
            after: the round whose model this is, of a run that is resumed; None: the run begins.

        Raises:
            TooFewNodes: so few are connected that there is no first round.
            FederationError: no reply counted in several rounds in a row, or all replies of the first round were errors;
                not where a guarantee holds, which an early end would break.
        """
        self.model = arrays
        self.asked = self.aggregated = after or 0
        if after is None:
            self._publish(Round(0, central=self._score(arrays)), arrays)
        if self._is_over():
            return self.kept
        silent = 0
        for number in range(self.aggregated + 1, rounds + 1):
            done = self._begun(number, scored=number % self.every == 0 or number == rounds)
            if done is None:
                break
            # First of all: observers save what comes of it.
            self.stopping.observe(number, done.federated if self.judged_by_clients else done.central, self.model)
            self._publish(done, self.model)
            if self._is_over():
                break
            silent = 0 if self.to_the_end or _heard(done) else silent + 1
            if silent == SILENT_ROUNDS or (silent and number == 1 and _all_refused(done)):
                why = _why_nobody(number, done, self.strategy.has_secret_cohorts)
                self._end("no-replies", f"stopped: {why}")
                raise FederationError(why)
        return self.kept

    @property
    def kept(self) -> ArrayRecord:
        """The model that the run keeps: the best one where early stopping looks for it, else the last good one."""
        return self.model if self.stopping.best is None else self.stopping.best

    def _is_over(self) -> bool:
        """Whether the run no longer learns, which ends it."""
        if self.stopping.is_over:
            self._end("as-asked", self.stopping.why())
        return self.stopping.is_over

    def _end(self, how: Ended, why: str) -> None:
        self.ending = Ending(how, why)

    def _begun(self, number: int, scored: bool) -> Round | None:
        """The finished round; None if the run has ended in order before it."""
        try:
            with self.stop.waiting():
                self.quorum.wait(self.grid, number, self.told)
            return self._round(number, scored)
        except BudgetExhausted as error:
            self._end("budget", f"stopped before round {number}: {error}")
        except TooFewNodes as error:
            self._end("too-few-nodes", f"stopped before round {number}: {error}")
            if number == 1:
                raise
        except StopAsked as request:
            self._end(
                "operator",
                f"stopped by {request}: round {number} was abandoned; the server released nothing of it, and what "
                "clients had sent had reached the server",
            )
        return None

    def _round(self, number: int, scored: bool) -> Round:
        clock = _Clock()
        with self.stop.waiting():
            messages = self.strategy.configure_train(number, self.model, ConfigRecord(dict(self.public)), self.grid)
            if not self.strategy.has_secret_cohorts:
                self.sites.learn(self.grid)
            self.asked = number
            received = self.strategy.collect(number, messages, lambda asked: self._trained(number, asked))
        self.answered()
        clock.lap("train")
        aggregated, train = self.strategy.aggregate_train(number, received)
        self.aggregated = number
        self.model = self.model if aggregated is None else aggregated
        clock.lap("aggregate")
        federated = self._federated(number, self.model) if scored else {}
        central = self._score(self.model) if scored else {}
        clock.lap("evaluate")
        unscored = self.sites.named(self.strategy.unscored if federated else ())
        scores = dict(train or {})
        return Round(number, central, federated, scores, self._measured(), unscored, clock.laps())  # type: ignore[arg-type]

    def _measured(self) -> Measurements | None:
        """What the strategy measured, with the names of sites."""
        measured = self.strategy.measured
        return measured and replace(measured, rejected=self.sites.named(measured.rejected))

    def _federated(self, number: int, arrays: ArrayRecord) -> Mapping[str, float]:
        if not self.judged_by_clients:
            return {}
        config = ConfigRecord(dict(self.public))
        try:
            with self.stop.waiting():
                messages = list(self.strategy.configure_evaluate(number, arrays, config, self.grid))
                if not messages:
                    return {}
                # One reply at a time: a node may have put into its own what nobody reads, twice the size of the model.
                found = self.strategy.aggregate_evaluate(number, self._replies(number, messages))
        except StopAsked:
            return {}  # The model of this round is there: it is kept, without scores, and the next round is not begun.
        return dict(found or {})  # type: ignore[arg-type]

    def _trained(self, number: int, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield the replies to requests to train, once each is counted by what its node states."""
        messages = list(messages)
        return self.attested.counted(messages, self._replies(number, messages))

    def _replies(self, number: int, messages: Iterable[Message]) -> Iterable[Message]:
        """Send, and wait as long as a round may take; a message nobody has fetched by then is void.

        All messages say the same time: they are made one after another in the order of nodes, and two clients could
        tell by their own times whether one between them was drawn.
        """
        messages, begun = list(messages), time.time()
        for message in messages:
            message.metadata.created_at = begun
            message.metadata.ttl = self.timeout
            message.metadata.group_id = str(number)  # nodes show it in their logs
        return self.grid.send_and_receive(messages, timeout=self.timeout)

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


def _all_refused(done: Round) -> bool:
    """Return whether replies came and none counted; messages that were lost with a SuperLink are no replies."""
    found = done.measured
    return found is not None and not found.accepted and any(item.code != "missing" for item in found.rejected)


def _why_nobody(number: int, done: Round, secret_cohorts: bool) -> str:
    """Why a run ends for want of replies; not who was drawn, nor how many, where that has to stay secret."""
    if secret_cohorts or done.measured is None:
        return f"no reply counted in round {number}; see the logs of the nodes"
    reasons = sorted({f"{item.code}: {item.detail}" for item in done.measured.rejected})
    few = f"too few replies ({done.measured.accepted})" if done.measured.accepted else "no reply"
    return f"{few} counted in round {number}: " + "; ".join(reasons[:5])
