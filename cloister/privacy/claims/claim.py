"""What may be said about a run's privacy, and what not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cloister.privacy.accounting.account import Account, by_accountant
from cloister.privacy.accounting.budget import PrivacyBudget

RUN = "this run"
ALL_RUNS = "all runs in the ledger"
IF_FIXED = "it holds if no run was chosen by what earlier ones released"
IF_BUDGET_FIXED = "and if no budget was set or changed because of what had been released"
ALL_PLANNED = "counted for all rounds that were planned: what was released may have decided when the run ended"
STRANGERS = "whoever sees the models of the run, is no client, and knows of no draw"
NEIGHBOURS = (
    "one client's contributions count or not (or, under replace-one, are exchanged for others); the roster of "
    "connected nodes is public and the same in both"
)
OUTSIDERS = "the other clients, and whoever sees the models of the run"


@dataclass(frozen=True)
class Claim:
    """The guarantee of one mechanism, or why there is none.

    Attributes:
        mechanism: its name, as in `privacy.server`.
        reasons: why the claim is only heuristic; empty if it is sound.
        unit: whose data the claim is about.
        relation: which cohorts count as neighbours.
        unprotected: what leaves without noise.
        parameters: of the mechanism, by their configuration keys.
        seeded: whether the noise can be repeated by whoever knows its seed.
    """

    mechanism: str
    reasons: tuple[str, ...] = ()
    unit: str = "client"
    relation: str = "add-or-remove"
    unprotected: tuple[str, ...] = ()
    parameters: dict[str, float | str | bool] = field(default_factory=dict)
    seeded: bool = False

    @property
    def status(self) -> str:
        """`none`, `sound` or `heuristic`."""
        if self.mechanism == "none":
            return "none"
        return "heuristic" if self.reasons else "sound"


def running(claim: Claim) -> dict[str, Any]:
    """What `privacy.json` says until the run has ended: nothing that a crash could make false."""
    return {"status": "running", "mechanism": claim.mechanism, "claims": [], "see": "the ledger"}


def statement(
    claim: Claim,
    budget: PrivacyBudget,
    rounds: int,
    sampling: str,
    clients: dict[str, Any] | None = None,
    planned: Callable[[bool], Account] | None = None,
) -> dict[str, Any]:
    """The content of `privacy.json`.

    Args:
        claim: of the run's decorator.
        budget: of the run.
        rounds: how many there were.
        sampling: how their cohorts were drawn, in words.
        clients: what may be said about a mechanism on the clients; None without one.
        planned: everything that the run would have released, with insiders or without, where somebody who sees the
            models, or a rule about them, ended it before; None elsewhere.
    """
    facts: dict[str, Any] = {
        "status": claim.status,
        "mechanism": claim.mechanism,
        "reasons": list(claim.reasons),
        "parameters": claim.parameters,
        "noise": "seeded" if claim.seeded else "from the operating system's entropy",
        "rounds": rounds,
        "sampling": sampling,
        "neighbours": NEIGHBOURS,
        "claims": _claims(claim, budget, planned) if claim.status == "sound" else [],
        "unprotected": list(claim.unprotected),
        "ledger": {
            "file": "ledger.jsonl",
            "head": budget.ledger.head,
            "releases-of-this-run": sum(entry.run == budget.run for entry in budget.ledger.entries),
            "holds-releases-without-a-guarantee": math.isinf(budget.epsilon()),
        },
    }
    return facts if clients is None else {**facts, "clients": clients}


def _claims(claim: Claim, budget: PrivacyBudget, planned: Callable[[bool], Account] | None) -> list[dict[str, Any]]:
    """One claim for this run, one for everything in the ledger, and one against those who are no clients.

    The parameters of a run are fixed before it, so that its own figure is that of the tightest accountant. How many
    rounds there are is one of them: a run that is ended for what it released is counted as if it had not been.
    """
    common = {"unit": claim.unit, "relation": claim.relation, "delta": budget.delta}
    common |= {"counts": ALL_PLANNED} if planned else {}
    of_run = planned or budget.account_of_run
    run = _numbers(of_run(True), budget.delta)
    claims = [{**common, "adversary": OUTSIDERS, "scope": RUN, **run}]
    if math.isfinite(budget.epsilon()):
        claims.append({**common, "adversary": OUTSIDERS, "scope": ALL_RUNS, **_everything(budget, planned)})
    strangers = _numbers(of_run(False), budget.delta)
    if strangers["epsilon"] < run["epsilon"]:
        claims.append({**common, "adversary": STRANGERS, "scope": RUN, **strangers})
    return claims


def _everything(budget: PrivacyBudget, planned: Callable[[bool], Account] | None) -> dict[str, Any]:
    """What holds over all runs: the budget, where one is kept, and otherwise a figure that rests on a condition."""
    if not budget.max_epsilon or budget.share() > 1:
        account = budget.account_with(planned(True)) if planned else budget.account()
        return {**_numbers(account, budget.delta), "condition": IF_FIXED}
    kept = {"epsilon": budget.max_epsilon, "budget": True, "filter": str(budget.filter), "spent": budget.share()}
    return kept if budget.ledger.was_set_beforehand(budget.unit) else {**kept, "condition": IF_BUDGET_FIXED}


def _numbers(account: Account, delta: float) -> dict[str, Any]:
    """ε by the tightest accountant, and by every other that applies."""
    found = by_accountant(account, delta)
    tightest = min(found, key=lambda name: found[name])
    return {"epsilon": found[tightest], "accountant": tightest, "by-accountant": found}


def _render_claim(claim: dict[str, Any]) -> str:
    """One claim as a line of plain text."""
    about = f"{claim['scope']}: against {claim['adversary']}; unit {claim['unit']}, {claim['relation']}"
    condition = f"; {claim['condition']}" if "condition" in claim else ""
    if claim.get("budget"):
        return (
            f"  ε ≤ {claim['epsilon']:.4g} at δ = {claim['delta']:g}, {about}; whatever later runs were chosen by "
            f"(a budget, kept by {claim['filter']}), {100 * claim['spent']:.3g} % spent{condition}"
        )
    counts = f"; {claim['counts']}" if "counts" in claim else ""
    return (
        f"  ε = {claim['epsilon']:.4g} at δ = {claim['delta']:g}, {about}; by {claim['accountant']}{condition}{counts}"
    )


def render(facts: dict[str, Any]) -> list[str]:
    """The statement as lines of plain text."""
    if facts["status"] == "none":
        seen = "what every client sends" if "clients" in facts else "every client's model"
        first = f"privacy on the server: none. The server, and whoever sees its records, sees {seen}."
        return [first, *(f"  leaves without noise: {item}" for item in facts["unprotected"])]
    lines = [f"privacy: {facts['mechanism']}, {facts['status']}"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    for claim in facts["claims"]:
        how = f"; {facts['rounds']} rounds, sampling {facts['sampling']}" if claim["scope"] == RUN else ""
        lines.append(_render_claim(claim) + how)
    if facts["status"] == "sound" and facts["ledger"]["holds-releases-without-a-guarantee"]:
        lines.append("  no claim over all runs: the ledger holds releases of earlier runs without a guarantee")
    lines.append("  no claim against the server, which sees every update before it is noised")
    return lines + [f"  leaves without noise: {item}" for item in facts["unprotected"]]
