"""DP-SGD for each patient.

Two hospitals train a linear model; each patient has ten rows. `task.group` names the patients: here the users of a
synthetic task. The noise is added while a hospital trains. If the hospital pins the code that it runs, the claim holds
against the server too.
"""

import tempfile

from rich.console import Console

from cloister import simulate
from cloister.server.reports.console import ConsoleReporter
from cloister.utils.text import at_most

settings = {
    "num-rounds": 5,
    "seed": 1,
    "task.name": "linear",
    "task.group": "user",
    "task.partition": "iid",
    "task.test-fraction": 0.0,
    "client.batch-size": 10,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.group-cap": 10,
    "privacy.client-max-epsilon": 4.0,
    "privacy.dp-sgd-noise-multiplier": "auto",
    "output-dir": tempfile.mkdtemp(),
}
outcome = simulate(settings, clients=2, narrator=ConsoleReporter(5, Console(quiet=True)))

# `"auto"` is the least noise with which a hospital can train in all rounds within its budget.

client = outcome.plan.config.privacy.client
print(f"noise multiplier {client.noise_multiplier}")

# The claim has figures for each size of a hospital: for a patient, and for the whole hospital, which has next to no
# protection ([why](../../docs/end-to-end.md#for-a-client-what-the-same-noise-is-worth)).

claim = outcome.statement.clients
for size in claim.sizes:
    for figure in size.figures:
        whose = f"one {figure.unit} of a client with {size.size} {claim.word}s"
        print(f"{claim.status}: ε = {at_most(figure.epsilon)} at δ = {figure.delta} for {whose}")

# Without `task.group` the claim would be about a row, and not about a patient with ten.

print(f"rmse {outcome.rounds[-1].central['rmse']:.2f}, before {outcome.rounds[0].central['rmse']:.2f}")
