"""The names of everything that travels in a message, and how a number is read from one."""

import hashlib
from collections.abc import Mapping

from cloister.core.errors import FederationError

ARRAYS = "arrays"
"""The record of a model's arrays, there and back."""
CONFIG = "config"
"""The record of settings that the server sends along."""
METRICS = "metrics"
"""The record of numbers that a client sends back."""
ATTESTATION = "attestation"
"""The record, and the field in it, of what a node states that its client applied; absent: it states nothing."""

ROUND = "server-round"
SEED = "seed"
PROXIMAL_MU = "proximal-mu"
HYPOTHESES = "hypotheses"
"""How many models the record of arrays holds, one after the other; absent: one, under its own names."""
PROMISE = "privacy-events"
"""The releases that a client's update will go into, as events; absent: nothing is claimed."""
LEDGER_HEAD = "ledger-head"
"""The hash of the last line of the server's ledger; absent: the server keeps none of this run. Beside an attestation:
the hash of the last line about a release in the node's ledger; empty: the node keeps none."""

FROZEN = "frozen-sha256"
"""The digest of the weights that are not sent, as the server has them; absent: its model has none."""

SECURE = "query.secure"
"""The type of a message of a secure aggregation in which nobody trains."""
SECURE_STEP = "secure-step"
"""Which step of it is asked for; the vector itself is asked for by a training message."""
ADVERTISE, SHARE, SIGN, UNMASK = "advertise", "share", "sign", "unmask"
SECURE_MESSAGE = "secure-message"
"""What one party of a secure aggregation tells another, as bytes: among the settings there, an array of bytes back."""
SECURE_EARLY = "secure-early"
"""The same for a step of the next round that comes with a step of this one; absent: none does."""
CLIPPING_NORM = "clipping-norm"
"""C of a round, where clients clip for a secure aggregation and C adapts; absent: it is that of the configuration."""
DISTANCE = "distance"
"""How far the updates of the last round lay apart, where clients scale noise for a secure aggregation by it."""
ROSTER = "roster"
"""The roster that a node has, beside its keys for an attempt."""

EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
LEAKAGE = "leakage"
"""The record in which a simulated client counts what it has leaked; it stays with the client."""
NOISED_LEAKAGE = "noised"
"""What of it noised models have leaked, without choices among hypotheses."""


GATE = hashlib.sha256(b"cloister superlink").hexdigest()
"""What a server's app asks a SuperLink for to learn whether that is `cloister superlink`: the name of no object."""

ASSUMED = "assumed"
"""The record of a simulated client that has no memory of earlier rounds of its run; it stays with the client."""
ASSUMED_ROUNDS, HELD_OUT = "rounds", "held-out"
"""Each of so many rounds counts as if it had trained in it; whether it only ever scores models in place of that."""


def number(record: Mapping[str, object], name: str) -> float:
    """A number in one of Flower's records, whose values may also be lists and text.

    Raises:
        FederationError: the value is no number.
    """
    value = record[name]
    if not isinstance(value, int | float):
        raise FederationError(f"{name!r} in a message must be a number, found {type(value).__name__}")
    return float(value)
