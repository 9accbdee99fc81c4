"""Rounds on the server: `RoundLoop.run` runs all of them, and `RoundLoop.run_round` one, from sampling to observers."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from cloister.server.client_claims import Attested
from cloister.server.polling_grid import Quorum
from cloister.server.screening import Rejection, printable
from cloister.server.stopping import EarlyStopping, Ended, Ending, Stop, StopAsked
from cloister.server.strategy_wrapper import Measurements, StrategyWrapper
from cloister.utils.errors import BudgetExhausted, FederationError, TooFewNodes
from cloister.utils.files import DAY, Json

SECRET = ("asked", "accepted", "rejected")
"""Measurements that reveal the drawn cohort."""
SILENT_ROUNDS = 3
"""Successive rounds without enough counted replies after which a run without a guarantee stops.

The run also stops after round 1 if replies came and none counted."""
Score = Callable[[ArrayRecord], Mapping[str, float]]


class Sites:
    """Names of present and former nodes; simulated nodes have none."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def learn(self, grid: Grid) -> None:
        """Store the names of the connected nodes."""
        self._names |= {node.node_id: printable(node.name) for node in grid.get_nodes() if node.name}

    def name_of(self, node_id: int) -> str:
        """Return the name of a node, or its number."""
        return self._names.get(node_id) or f"node {node_id}"

    def named(self, rejected: Iterable[Rejection]) -> tuple[Rejection, ...]:
        """Return the rejections with the names of their sites, where there are any."""
        return tuple(replace(item, site=self._names.get(item.node_id, "")) for item in rejected)


@dataclass(frozen=True)
class Round:
    """One round, as a line of `rounds.jsonl`.

    Attributes:
        number: from 1 on; 0 is the initial model.
        central: scores on the server's examples.
        federated: scores on the clients' own examples.
        train: training metrics of the clients.
        measured: by the strategy wrapper; partly confidential.
        unscored: evaluation replies that did not count.
        seconds: duration of the whole round and of its parts.
    """

    number: int
    central: Mapping[str, float] = field(default_factory=dict)
    federated: Mapping[str, float] = field(default_factory=dict)
    train: Mapping[str, float] = field(default_factory=dict)
    measured: Measurements | None = None
    unscored: tuple[Rejection, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def line(self, secret_cohorts: bool = False, hides_times: bool = False) -> dict[str, object]:
        """Return the round as JSON, without values that secret sampling must hide."""
        fields = asdict(self)
        if secret_cohorts or hides_times:
            del fields["seconds"]  # the duration depends on the number of clients or examples
        for name in SECRET if secret_cohorts and self.measured else ():
            del fields["measured"][name]
        return {"round": fields.pop("number"), **{key: value for key, value in fields.items() if value}}

    @property
    def is_heard(self) -> bool:
        """Return whether a reply counted, or none was requested, as of an empty Poisson cohort."""
        found = self.measured
        return found is None or found.asked == 0 or self.has_counted

    @property
    def is_all_refused(self) -> bool:
        """Return whether replies came and none counted; a lost message or node is no reply."""
        found = self.measured
        if found is None or found.accepted:
            return False
        return any(item.code not in ("missing", "unavailable") for item in found.rejected)

    @property
    def is_spent(self) -> bool:
        """Return whether every node of the round refused it for lack of budget."""
        found = self.measured
        return found is not None and 0 < found.asked == sum(item.is_spent for item in found.rejected)

    @property
    def has_counted(self) -> bool:
        """Return whether a reply counted."""
        return self.measured is not None and self.measured.accepted > 0 and not self.measured.abandoned

    @staticmethod
    def line_has_counted(line: Json) -> bool:
        """Return whether a line of `rounds.jsonl` shows that a reply counted; one without these numbers shows none."""
        found = line.get("measured")
        return isinstance(found, dict) and bool(found.get("accepted")) and not found.get("abandoned")

    @classmethod
    def of_line(cls, line: Json) -> "Round":
        """Return a round with the scores of `line`, without its measurements."""
        scores = ("central", "federated", "train", "seconds")
        return cls(line["round"], **{name: line[name] for name in scores if name in line})


def published(seconds: float, hides_times: bool) -> float:
    """Return a time as others may see it: truncated to the day (UTC) if durations would reveal a draw.

    Args:
        seconds: since 1970.
        hides_times: as in `Plan.hides_times`.
    """
    return seconds // DAY * DAY if hides_times else seconds


Observer = Callable[[Round, ArrayRecord], None]


@dataclass
class RoundLoop:
    """Loop over the rounds of a run.

    After each round, every observer receives the round and its model. The initial model is round 0.

    Args:
        grid: to the clients.
        strategy: inside its mechanism.
        score: scores a model on the server's examples; None: no central evaluation.
        observers: called in order after every round with the round and its global model.
        public: configuration that every client receives with the model.
        timeout: seconds a round waits for replies.
        every: rounds from one evaluation to the next; the last round is always scored.
        stopping: ends a run that no longer improves.
        stop: listens for requests to end the run.
        judged_by_clients: whether early stopping uses the clients' scores instead of the server's.
        quorum: of connected nodes, before each round.
        to_the_end: continue after silent rounds. With a guarantee, an early end would reveal who replied.
        told: receives a message when the run pauses.
        sites: collects the names of nodes.
        answered: called after each exchange with nodes, also a broken one, and before their training is aggregated.
        attested: counts the mechanisms that nodes state in their replies.
        counted: whether a reply has counted in an earlier round, or before a resume.

    Attributes:
        ending: how the run ended.
        model: the last good global model. It is released even if its round did not finish.
        asked: number of the last round with requests to train, with or without replies.
        aggregated: number of the last round with aggregated replies, even if that round did not finish.
    """

    grid: Grid
    strategy: StrategyWrapper
    score: Score | None
    observers: list[Observer]
    public: Mapping[str, str | int]
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
    counted: bool = False
    ending: Ending = field(default_factory=Ending)
    model: ArrayRecord = field(default_factory=ArrayRecord)
    aggregated: int = 0
    asked: int = 0

    def run(self, arrays: ArrayRecord, rounds: int, after: int | None = None) -> ArrayRecord:
        """Run the rounds and return the model that the run keeps.

        That is the last model, or the best one with early stopping.

        Args:
            arrays: the model to start from.
            rounds: number of the last round.
            after: number of the round that produced `arrays`, in a resumed run; None: a new run.

        Raises:
            TooFewNodes: too few nodes are connected for the first round.
            FederationError: several rounds in a row have too few counted replies, or round 1 only rejected ones. A run
                with a guarantee continues instead, since an early end would break it. A run ends in order if an
                earlier reply counted, and every node of these rounds refused for lack of budget.
        """
        self.model = arrays
        self.asked = self.aggregated = after or 0
        if after is None:
            self._publish(Round(0, central=self._score(arrays)))
        silent = spent = 0
        for number in range(self.aggregated + 1, rounds + 1):
            if self.stopping.is_over:
                break
            done = self.run_round(number, scored=number % self.every == 0 or number == rounds)
            if done is None:
                return self.kept
            silent = 0 if self.to_the_end or done.is_heard or self.stopping.is_over else silent + 1
            spent = spent + 1 if silent and done.is_spent else 0
            self.counted |= done.has_counted
            if silent == SILENT_ROUNDS or (silent and number == 1 and done.is_all_refused):
                why = why_no_replies(number, done, self.strategy.has_secret_cohorts)
                if self.counted and spent == SILENT_ROUNDS:
                    self.ending = Ending("site-budgets", f"stopped: the budgets of the sites are spent: {why}")
                    return self.kept
                self.ending = Ending("no-replies", f"stopped: {why}")
                raise FederationError(why)
        if self.stopping.is_over:
            self.ending = Ending("as-asked", self.stopping.why())
        return self.kept

    def run_round(self, number: int, scored: bool) -> Round | None:
        """Run one round and return it; None if the run ended instead.

        Wait for a quorum, sample, configure, send, collect, screen, release, aggregate, evaluate, write down. Privacy
        rests on this order: the strategy charges the ledger before it releases, and observers see released models only.

        Args:
            number: of the round.
            scored: whether the round is evaluated.

        Raises:
            TooFewNodes: too few nodes are connected for the first round.
        """
        try:
            with self.stop.waiting():
                self.quorum.wait(self.grid, number, self.told)
                clock = _Clock()
                public = ConfigRecord(dict(self.public))
                messages = self.strategy.configure_train(number, self.model, public, self.grid)
                if not self.strategy.has_secret_cohorts:
                    self.sites.learn(self.grid)
                self.asked = number
                received = self.strategy.collect(number, messages, lambda asked: self._trained(number, asked))
            self.answered()
            clock.lap("train")
            # It charges first, then releases; `collect` has charged a secure sum.
            aggregated, train = self.strategy.aggregate_train(number, received)
            self.aggregated = number
            self.model = self.model if aggregated is None else aggregated
            clock.lap("aggregate")
            federated = self._evaluate_on_clients(number) if scored else {}
            central = self._score(self.model) if scored else {}
            clock.lap("evaluate")
        except (BudgetExhausted, TooFewNodes) as error:
            how: Ended = "budget" if isinstance(error, BudgetExhausted) else "too-few-nodes"
            self.ending = Ending(how, f"stopped before round {number}: {error}")
            if how == "too-few-nodes" and number == 1:
                raise
            return None
        except StopAsked as request:
            why = "the server released nothing of it, and what clients had sent had reached the server"
            self.ending = Ending("operator", f"stopped by {request}: round {number} was abandoned; {why}")
            return None
        measured = self.strategy.measured
        measured = measured and replace(measured, rejected=self.sites.named(measured.rejected))
        unscored = self.sites.named(self.strategy.unscored if federated else ())
        scores: Mapping[str, Any] = dict(train or {})
        done = Round(number, central, federated, scores, measured, unscored, clock.laps())
        # Observe first: the first observer writes the checkpoint, and a later one the state of `stopping`.
        self.stopping.observe(number, federated if self.judged_by_clients else central, self.model)
        self._publish(done)
        return done

    @property
    def kept(self) -> ArrayRecord:
        """Return the best model with early stopping, otherwise the last good one."""
        return self.model if self.stopping.best is None else self.stopping.best

    def _evaluate_on_clients(self, number: int) -> Mapping[str, Any]:
        """Return the clients' scores of the model, if they judge it.

        They are empty if the operator stops the run: the model is kept, and the next round does not begin.
        """
        if not self.judged_by_clients:
            return {}
        try:
            with self.stop.waiting():
                public = ConfigRecord(dict(self.public))
                messages = list(self.strategy.configure_evaluate(number, self.model, public, self.grid))
                if not messages:
                    return {}
                # Consume one reply at a time: an unexpected payload can be twice the size of the model.
                return dict(self.strategy.aggregate_evaluate(number, self._send(number, messages)) or {})
        except StopAsked:
            return {}
        finally:
            self.answered()

    def _trained(self, number: int, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages of a round; return the replies. A trained one is counted by the attestation of its node."""
        messages = list(messages)
        if any(message.metadata.message_type != MessageType.TRAIN for message in messages):
            return self._send(number, messages)  # a step of secure aggregation that involves no training
        return self.attested.counted(messages, self._send(number, messages))

    def _send(self, number: int, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages, and return the replies until the round's timeout.

        All messages carry the same time of creation. Separate times, in the order of nodes, would reveal to two clients
        whether a client between them was drawn. At the timeout, messages that no node fetched expire.
        """
        messages, begun = list(messages), time.time()
        for message in messages:
            message.metadata.created_at = begun
            message.metadata.ttl = self.timeout
            message.metadata.group_id = str(number)  # nodes show it in their logs
        return self.grid.send_and_receive(messages, timeout=self.timeout)

    def _score(self, arrays: ArrayRecord) -> Mapping[str, float]:
        return self.score(arrays) if self.score else {}

    def _publish(self, done: Round) -> None:
        for observer in self.observers:
            observer(done, self.model)


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


def why_no_replies(number: int, done: Round, secret_cohorts: bool) -> str:
    """Return why no reply counted, without details about a secret cohort."""
    if secret_cohorts or done.measured is None:
        return f"no reply counted in round {number}; see the logs of the nodes"
    reasons = sorted({f"{item.code}: {item.detail}" for item in done.measured.rejected})
    few = f"too few replies ({done.measured.accepted})" if done.measured.accepted else "no reply"
    return f"{few} counted in round {number}: " + "; ".join(reasons[:5])
