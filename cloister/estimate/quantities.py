"""Quantities of a planned run: its nodes and their sizes, noise, curves of ε, bytes and seconds.

A node here is a simulated client with its part of the task's data, or a site that states its size. Its answers come
from the node's own code: request parsing, policy, charges.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from cloister.client.costs import planned_steps, unit_of
from cloister.client.enforce import enforce_policy
from cloister.client.node import Node
from cloister.client.policy import CHECKED_BUNDLE, read_policy
from cloister.client.request import TrainRequest, request_of
from cloister.config.io import Scalar
from cloister.config.run import RunConfig
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.claims.claim import ClientClaim, DpSgdClaim, Figure, Statement
from cloister.privacy.claims.client import costliest_of, standing_for_all
from cloister.privacy.claims.render import at_holders
from cloister.privacy.claims.server import RUN
from cloister.privacy.dpsgd.local_steps import Holders, LocalDpSgd, LocalSteps
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace
from cloister.server.prepare import Prepared
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import Layout, from_record
from cloister.utils.errors import ConfigError, FederationError, PolicyError


@dataclass(frozen=True)
class Asked:
    """Node that is asked to train in the first round.

    Attributes:
        request: of the server, as the node parses it.
        node: as it is before the run.
    """

    request: TrainRequest
    node: Node

    @property
    def unit(self) -> Unit:
        """Return the unit that the node protects in addition to itself."""
        return unit_of(self.request, self.node)

    @property
    def steps(self) -> LocalSteps:
        """Return the private steps of a round.

        They follow from the node's stated size, or from its part in a simulation.

        Raises:
            PrivacyError: batches would reveal the true size.
        """
        return planned_steps(self.request, self.node)

    @property
    def refusal(self) -> str:
        """Return the reason for which the node's policy refuses the run.

        It is empty if the policy allows the run, or if there is no policy.
        """
        # A plan has no bundle: act as if the node's executor had verified an allowed one.
        before, allowed = environ.get(CHECKED_BUNDLE), self.node.policy.allowed_fabs if self.node.policy else []
        try:
            if allowed:
                environ[CHECKED_BUNDLE] = allowed[0]
            enforce_policy(self.request, self.node)
            return ""
        except PolicyError as error:
            return str(error)
        finally:
            if before is None:
                environ.pop(CHECKED_BUNDLE, None)
            else:
                environ[CHECKED_BUNDLE] = before


def configurations(
    config: RunConfig, clients: int, sizes: Sequence[int], policy: Path | None
) -> list[dict[str, Scalar]]:
    """Return the node configurations of a run.

    Args:
        config: of the run.
        clients: number of clients.
        sizes: that sites state of their data; empty: clients are simulated, or the policy states a size.
        policy: of every node; None: no policy.

    Raises:
        ConfigError: the policy cannot be read, or states another size.
    """
    rules = {} if policy is None else {"policy": str(policy)}
    read = read_policy(policy) if policy else None
    stated = read.public_size if read and config.privacy.client.clips_gradients else 0
    if sizes and stated:
        raise ConfigError(f"--public-size {sizes[0]} has no effect: the policy states public-size = {stated}")
    if sizes or stated:
        # Only the stated size of a site is used: its data is not read.
        return [{"data-path": "not-read", "public-size": size, **rules} for size in sizes or [stated]]
    return [{"partition-id": index, "num-partitions": clients, **rules} for index in range(clients)]


def asked(config: RunConfig, message: Message, nodes: Sequence[dict[str, Scalar]], folder: Path) -> list[Asked]:
    """Return the nodes with these configurations, each asked to train by this message.

    Args:
        config: of the run.
        message: of the first round.
        nodes: their configurations.
        folder: replaces the ledger folder of nodes with a policy.
    """
    own: dict[str, Scalar] = {"ledger-dir": str(folder)}
    settings = config.flat()
    contexts = [
        Context(LOCAL_RUN, number, node | (own if "policy" in node else {}), RecordDict(), dict(settings))
        for number, node in enumerate(nodes, start=1)
    ]
    return [Asked(request_of(TrainRequest, message, context), Node.of(context)) for context in contexts]


@dataclass(frozen=True)
class Sizes:
    """Clients of several sizes.

    Attributes:
        counts: number of clients for each number and rate of private steps in a round.
        shown: one client of each size with figures: the smallest, the middle, the largest and the costliest.
        costliest: the size whose units have the largest cost in a run.
    """

    counts: Counter[LocalSteps]
    shown: dict[LocalSteps, Asked]
    costliest: LocalSteps

    @property
    def are_dealt(self) -> bool:
        """Return whether all sizes come from a simulation's partition, by the run's seed."""
        return all(asked.node.config.partition_id is not None for asked in self.shown.values())

    @classmethod
    def of(
        cls, nodes: Sequence[Asked], mechanism: LocalDpSgd, rounds: int, delta: float, shared: Collection[Holders]
    ) -> "Sizes":
        """Return the sizes of these nodes.

        Args:
            nodes: at least one.
            mechanism: of the run.
            rounds: in which all of them train.
            delta: at which ε is computed.
            shared: as in `dp_sgd_claim`.
        """
        by_steps = {node.steps: node for node in nodes}
        shown = standing_for_all(by_steps, mechanism, rounds, delta, shared)
        costliest = costliest_of(shown, mechanism, rounds, delta, shared)
        return cls(Counter(node.steps for node in nodes), {steps: by_steps[steps] for steps in shown}, costliest)


@dataclass(frozen=True)
class NoiseOnClient:
    """Noise of a client.

    Attributes:
        mechanism: its name.
        multiplier: in units of the bound.
        std: standard deviation on one number; None: it depends on the data.
        on: description of that number.
    """

    mechanism: str
    multiplier: float
    std: float | None
    on: str


def noise_on_clients(prepared: Prepared) -> Iterator[NoiseOnClient]:
    """Yield the noise of a client in the first round; empty if clients add none.

    Args:
        prepared: the run.
    """
    client = prepared.plan.config.privacy.client
    if not client.is_on:
        return
    z, mechanism = client.noise_multiplier, client.noise_on_update
    if client.clips_gradients:
        yield NoiseOnClient(client.name, z, z * client.bound, "a number of the sum of a batch's gradients")
    elif isinstance(mechanism, LocalGaussian):
        yield NoiseOnClient(client.name, z, z * client.bound, "a weight that a client sends")
    elif isinstance(mechanism, LocalLaplace):
        layout = Layout.of(prepared.plan.strategy.expected_reply(from_record(prepared.initial)))
        joint = zip(layout.names, layout.sizes, strict=True) if mechanism.per_layer else [("the model", layout.size)]
        for name, size in joint:
            std = math.sqrt(size + 1) / size * z * mechanism.radius
            yield NoiseOnClient(client.name, z, std, f"a weight of {name} that a client sends")
    else:
        yield NoiseOnClient(client.name, z, None, "a weight that a client sends")


POINTS = 10
"""Largest number of points of a curve."""


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        mechanism: of the figure.
        of: protected unit, in words.
        relation: which datasets are neighbours; for d-privacy, the guarantee.
        adversary: of the figure.
        delta: at which ε is stated; None for a leakage.
        points: each round with ε after it, or the leakage.
    """

    mechanism: str
    of: str
    relation: str
    adversary: str
    delta: float | None
    points: tuple[tuple[int, float], ...]


def shown_rounds(rounds: int) -> list[int]:
    """Return the rounds at which curves have points.

    These are all rounds, or `POINTS` of them with the last one.
    """
    count = min(rounds, POINTS)
    return sorted({round(1 + number * (rounds - 1) / max(1, count - 1)) for number in range(count)})


def series_of_server(statements: Mapping[int, Statement]) -> list[Series]:
    """Return the curves of the run's own figures, one for each adversary.

    Args:
        statements: by number of rounds.
    """
    found = {
        number: [(said.claim.mechanism, f"one {figure.unit}", figure) for figure in said.claim.figures]
        for number, said in statements.items()
    }
    return _joined({number: [item for item in items if item[2].scope == RUN] for number, items in found.items()})


def series_of_clients(claim: Callable[[int], ClientClaim | None], rounds: Iterable[int]) -> list[Series]:
    """Return the curves of the clients' own mechanism, one for each unit and relation.

    Args:
        claim: maps a number of rounds to the claim after them.
        rounds: at which the curves have points.
    """
    found: dict[int, list[Named]] = {}
    for number in rounds:
        made = claim(number)
        if not isinstance(made, DpSgdClaim):
            found[number] = [(made.mechanism, f"one {figure.unit}", figure) for figure in made.figures] if made else []
            continue
        found[number] = []
        for size in made.sizes:
            client = f"a client with {size.size} {made.word}s"
            for figure in size.figures:
                protected = f"one {made.word_for(figure.unit)} of {client}{at_holders(figure)}"
                found[number].append((made.mechanism, protected if figure.unit == made.unit else client, figure))
    return _joined(found)


Named = tuple[str, str, Figure]
"""Figure with its mechanism and its protected unit."""


def _joined(found: Mapping[int, list[Named]]) -> list[Series]:
    """Return one curve for each figure, over the rounds."""
    curves: dict[tuple[str, str, str, str, float | None], list[tuple[int, float]]] = {}
    for number, items in found.items():
        for mechanism, whom, figure in items:
            value = figure.epsilon if figure.leakage is None else figure.leakage
            key = (mechanism, whom, figure.relation or figure.guarantee or "", figure.adversary or "", figure.delta)
            curves.setdefault(key, []).append((number, value or 0.0))
    return [Series(*key, tuple(points)) for key, points in curves.items()]


@dataclass(frozen=True)
class Traffic:
    """Bytes of models and masked vectors in training messages, without headers, keys and scores.

    Attributes:
        cohort: expected number of clients that train in a round.
        rounds: number of rounds.
        down, up: bytes of one message to a client, and of its reply.
    """

    cohort: float
    rounds: int
    down: int
    up: int

    @property
    def total(self) -> float:
        """Return the bytes of all rounds, both ways."""
        return (self.down + self.up) * self.cohort * self.rounds


def traffic(prepared: Prepared, nodes: int) -> Traffic:
    """Return the size of the training messages of a run.

    Args:
        prepared: the run.
        nodes: number of connected nodes.
    """
    plan, sent = prepared.plan, from_record(prepared.initial)
    down = sum(array.nbytes for array in sent.values())
    return Traffic(plan.cohort(nodes), plan.config.num_rounds, down, plan.strategy.reply_bytes(sent))


@dataclass(frozen=True)
class Timing:
    """Seconds in which a client on this machine answers a training message, with its noise.

    Attributes:
        first: for the first message of its process, which also loads libraries and builds the trainer.
        each: for every later message.
    """

    first: float
    each: float

    def one_by_one(self, traffic: Traffic) -> float:
        """Return the seconds of all training messages, one after the other.

        This is the time in one process, as in a simulation.
        """
        return self.first + self.each * max(0.0, traffic.cohort * traffic.rounds - 1)

    def side_by_side(self, traffic: Traffic) -> float:
        """Return the seconds of all training messages, in parallel.

        Every client has a machine like this one.
        """
        return self.first + self.each * max(0, traffic.rounds - 1)


def timed(prepared: Prepared, message: Message, clients: int) -> Timing:
    """Time one simulated client that trains twice, as it would in the first round.

    Args:
        prepared: the run.
        message: of the first round.
        clients: number of clients.

    Raises:
        FederationError: the client answered with an error.
    """
    return Timing(_seconds(prepared, message, clients), _seconds(prepared, message, clients))


def _seconds(prepared: Prepared, message: Message, clients: int) -> float:
    from cloister.client.app import app

    # A separate grid: the spending of this client is discarded with it.
    grid = LocalGrid.simulated(app, prepared.plan.config.flat(), clients)
    started = time.perf_counter()
    (reply,) = grid.send_and_receive([message])
    if reply.has_error():
        raise FederationError(f"the client that was to be timed failed: {reply.error.reason}")
    return time.perf_counter() - started
