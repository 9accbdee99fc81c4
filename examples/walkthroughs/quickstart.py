"""Quickstart in Python.

40 simulated clients train a softmax regression on handwritten digits. Each client as a whole is protected.
`simulate` takes the settings of `cloister run`; with `"auto"` the server adds the least noise with which all rounds
fit the budget. A narrator with a quiet console prints nothing.
"""

import tempfile

from rich.console import Console

from cloister import simulate
from cloister.privacy.claims.render import render
from cloister.server.reports.console import ConsoleReporter

settings = {
    "num-rounds": 3,
    "seed": 1,
    "task.name": "digits",
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.clipping-norm": 1.0,
    "privacy.max-epsilon": 4.0,
    "privacy.noise-multiplier": "auto",
    "output-dir": tempfile.mkdtemp(),
}
outcome = simulate(settings, clients=40, narrator=ConsoleReporter(3, Console(quiet=True)))

# The outcome has the scores of each round, and the
# [claim](../../docs/privacy.md#what-the-claims-on-the-server-are-about). Its text begins:

print(f"accuracy {outcome.rounds[-1].central['accuracy']:.3f}")
print(*render(outcome.statement)[:3], sep="\n")

# The budget belongs to the data, and is nearly spent: another run in the same ledger would be refused.

print(f"spent: {outcome.plan.budget.share():.1%} of the budget")

# `report.html` in the run directory explains the claim.

print((outcome.directory.path / "report.html").is_file())
