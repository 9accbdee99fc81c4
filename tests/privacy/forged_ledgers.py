"""Ledgers to read, and to tamper with."""

import json

from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.ledger import GENESIS, Ledger, line_hash
from cloister.privacy.accounting.vocabulary import Sampling

EVENTS = [
    Gaussian(1.5),
    Gaussian(0.7, Sampling("poisson", probability=0.1)),
    Gaussian(2.0, Sampling("without-replacement", cohort=3, population=9)),
    Unaccounted("the noise is seeded: ε is ∞"),
]


def write(path, events=EVENTS, finish=True):
    """A ledger with these releases, one a round."""
    ledger = Ledger(path)
    for number, event in enumerate(events, start=1):
        release = ledger.open(event, "client", "run", number, allow=lambda: None)
        if finish:
            ledger.done(release)
    return ledger


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def chained(lines):
    """The lines with their numbers and hashes made right: what somebody forges who knows how."""
    previous = GENESIS
    for number, line in enumerate(lines):
        line |= {"seq": number, "previous": previous}
        line["hash"] = previous = line_hash(line)
    return lines


def rewrite(path, lines):
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))
