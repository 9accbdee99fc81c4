"""What a node states that its client applied, as a message carries it."""

import json

import pytest

from cloister.privacy.accounting.events import Gaussian, Pure, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.attestation import MAX_BYTES, Attestation

EVENTS = (Repeated(Gaussian(1.1, Sampling("bounded-poisson", 0.3)), 7), Pure(0.1 + 0.2))
STATED = Attestation("dp-sgd", "group", EVENTS, 40, "patient", True)


def changed(**fields):
    return json.dumps(json.loads(STATED.to_bytes()) | fields).encode()


def test_it_is_read_as_it_was_written_to_the_last_bit():
    assert Attestation.from_bytes(STATED.to_bytes()) == STATED


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 60_000,
        STATED.to_bytes() + b" " * MAX_BYTES,
        changed(more=1),
        changed(size="40"),
        changed(size=True),
        changed(size=-1),
        changed(checked=1),
        changed(events=None),
        changed(events=[{"kind": "pure", "epsilon": -1.0}]),
        changed(events=[{"kind": "none"}]),
    ],
)
def test_what_is_none_is_not_read_as_one(content):
    assert Attestation.from_bytes(content) is None
