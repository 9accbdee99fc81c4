"""Names of the fields in messages, and the reading of a number from a record."""

import hashlib
from collections.abc import Mapping

from cloister.core.errors import FederationError

ARRAYS = "arrays"
"""The record of a model's arrays, in both directions."""
CONFIG = "config"
"""The record of settings from the server."""
METRICS = "metrics"
"""The record of numbers in a client's reply."""
ATTESTATION = "attestation"
"""The record, and the field in it, with a node's attestation of its client's mechanism; absent: no attestation."""

ROUND = "server-round"
SEED = "seed"
PROXIMAL_MU = "proximal-mu"
HYPOTHESES = "hypotheses"
"""Number of models in the record of arrays; absent: one, under its own array names."""
PROMISE = "privacy-events"
"""The releases that will contain a client's update, as events; absent: nothing is claimed."""
LEDGER_HEAD = "ledger-head"
"""The hash of the last line of the server's ledger; absent: the server keeps none of this run. Beside an attestation:
the hash of the last line about a release in the node's ledger; empty: the node keeps none."""

FROZEN = "frozen-sha256"
"""The digest of the frozen weights in the server's model, which are not sent; absent: it has none."""

SECURE = "query.secure"
"""The type of a secure aggregation message for a step without training."""
SECURE_STEP = "secure-step"
"""The requested step of it; a training message requests the vector itself."""
ADVERTISE, SHARE, SIGN, UNMASK = "advertise", "share", "sign", "unmask"
SECURE_MESSAGE = "secure-message"
"""Protocol message of a secure aggregation: bytes in the settings to a node, an array of bytes in its reply."""
CLIPPING_NORM = "clipping-norm"
"""C of a round, if clients clip for a secure aggregation and C adapts; absent: C of the configuration."""
DISTANCE = "distance"
"""Distance between the updates of the last round, if clients scale noise for a secure aggregation by it."""
ROSTER = "roster"
"""The roster of a node, sent with its keys for an attempt."""

EXAMPLES = "num-examples"
TRAIN_LOSS = "train-loss"
LEAKAGE = "leakage"
"""The record in which a simulated client counts its leakage; it stays with the client."""
NOISED_LEAKAGE = "noised"
"""The part of the leakage from noised models, without choices among hypotheses."""


GATE = hashlib.sha256(b"cloister superlink").hexdigest()
"""Object id that identifies `cloister superlink`: a server's app requests it, and no object has this name."""

ASSUMED = "assumed"
"""The record of a simulated client without memory of earlier rounds of its run; it stays with the client."""
ASSUMED_ROUNDS, HELD_OUT = "rounds", "held-out"
"""Number of rounds in which the client is assumed to have trained; True if it only evaluates models instead."""


def number(record: Mapping[str, object], name: str) -> float:
    """Return a number in one of Flower's records, whose values may also be lists and text.

    Raises:
        FederationError: the value is not a number.
    """
    value = record[name]
    if not isinstance(value, int | float):
        raise FederationError(f"{name!r} in a message must be a number, found {type(value).__name__}")
    return float(value)
