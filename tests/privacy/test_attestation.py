"""A node's statement about the mechanism that its client applied, as a message carries it."""

import json

from support import failures

from cloister.privacy.accounting.events import Gaussian, Pure, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.premises import MAX_SIZE, Attestation, size_and_checked

EVENTS = (Repeated(Gaussian(1.1, Sampling("bounded-poisson", 0.3)), 7), Pure(0.1 + 0.2))
STATED = Attestation("dp-sgd", "group", EVENTS, 40, "patient", True)


def changed(**fields):
    return json.dumps(json.loads(STATED.to_bytes()) | fields).encode()


def test_its_size_and_its_word_about_the_bundle_are_read():
    assert size_and_checked(STATED.to_bytes()) == (40, True)


def test_what_is_none_is_not_read_as_one():
    def check(content):
        assert size_and_checked(content) is None

    cases = [
        b"",
        b"\xff",
        b"7",
        b"[]",
        b"{}",
        b"[" * 60_000,
        b'{"checked": true, "size": ' + b"9" * 5000 + b"}",
        changed(size="40"),
        changed(size=True),
        changed(size=-1),
        changed(size=MAX_SIZE + 1),
        changed(size=1e400),
        changed(checked=1),
    ]
    assert failures(cases, check) == []
