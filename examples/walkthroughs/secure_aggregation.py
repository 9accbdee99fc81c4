"""Secure aggregation.

Ten clients train under a guarantee against the server: it receives sums of masked updates, and each client adds a
share of the noise. Seven clients must stay to the end of a round, and up to two may work with the server
([the protocol](../../docs/secure_aggregation.md)).
"""

import tempfile

from rich.console import Console

from cloister import simulate
from cloister.privacy.claims.render import render
from cloister.server.reports.console import ConsoleReporter

settings = {
    "num-rounds": 2,
    "seed": 1,
    "task.name": "digits",
    "task.model": "softmax",
    "strategy.min-nodes": 10,
    "privacy.server": "global-dp",
    "privacy.clipping-norm": 1.0,
    "privacy.noise-multiplier": 2.0,
    "secure-aggregation.enabled": True,
    "secure-aggregation.threshold": 7,
    "secure-aggregation.colluding": 2,
    "output-dir": tempfile.mkdtemp(),
}
outcome = simulate(settings, clients=10, narrator=ConsoleReporter(2, Console(quiet=True)))

# The claim is against the server:

print(*render(outcome.statement)[1:3], sep="\n")

# One process made all keys here. Between sites the claim also rests on premises that the sites see to: the code that
# they run, the roster and the keys.

print(", ".join(premise.name for premise in outcome.statement.claim.premises if not premise.standing))
