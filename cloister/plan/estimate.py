"""Estimates of a run's time and traffic, from one message that a client in this process answers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Message
from numpy.typing import NDArray

from cloister.core.arrays import from_record
from cloister.core.errors import FederationError
from cloister.local.grid import LocalGrid
from cloister.server.prepare import Prepared


@dataclass(frozen=True)
class Traffic:
    """Bytes of the models' arrays in training messages, without headers and scores.

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
    return Traffic(plan.cohort(nodes), plan.config.num_rounds, _bytes(sent), _bytes(plan.strategy.expected_reply(sent)))


def _bytes(arrays: Mapping[str, NDArray]) -> int:
    return sum(array.nbytes for array in arrays.values())


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
