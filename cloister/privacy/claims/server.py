"""The claim about a run: what its releases amount to, against whom, and on which conditions."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from cloister.privacy.accounting.account import composed
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import DistributedGaussian, Event
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Claim, ClientClaim, Figure, LedgerState, Statement
from cloister.privacy.claims.premises import BUDGET_FIXED, EARLIER, UNCHOSEN
from cloister.privacy.mechanisms.distributed.shares import COLLUDING
from cloister.utils.keys import provisioner_of

RUN = "this run"
ALL_RUNS = "all runs in the ledger"
ALL_PLANNED = "counted for all rounds that were planned: what was released may have decided when the run ended"
STRANGERS = "any party that sees the models of the run, is no client, and knows of no draw"
OUTSIDERS = "the other clients, and any party that sees the models of the run"

ONE_UPDATE = "with these keys the server can see one update alone, with one share of the noise"
ZEROED = (
    "one client's update is there or is zero; that it takes part is public, and its share of the noise is there in both"
)
NO_CLIENT = "any party that sees the models of the runs, and is no client of them"


def visible(draw_amplifies: bool) -> tuple[str, ...]:
    """Return what no claim covers, however clients are drawn: who replies, and when.

    Args:
        draw_amplifies: whether the claim rests on a Poisson draw of clients.
    """
    time = "how long a round takes, to every client of the next one: a client that is silent or slow shows in it"
    if draw_amplifies:
        time += (
            ", and where that tells that a client was drawn the draw amplifies nothing against clients who measure it"
        )
    return "which nodes are connected, which of them replied, and when, to the server and its network", time


Planned = Mapping[Event, int]
"""Everything that a run would have released: each event, and how often."""


def statement(
    claim: Claim,
    budget: PrivacyBudget[Ledger],
    rounds: int,
    sampling: str,
    clients: ClientClaim | None = None,
    planned: Planned | None = None,
    resumed: bool = False,
    lasting: bool = True,
) -> Statement:
    """Everything that may be said about a run.

    Args:
        claim: of the run's strategy wrapper.
        budget: of the run.
        rounds: how many there were.
        sampling: how their cohorts were drawn, in words.
        clients: what may be said about a mechanism on the clients; None without one.
        planned: everything that the run would have released, if a person who sees the models, or a rule about them,
            ended it before; None elsewhere.
        resumed: whether the run broke off and went on: rounds that were released twice are counted twice.
        lasting: whether the ledger is that of other runs on the data too.
    """
    figures = _figures(claim, budget, planned, resumed) if claim.is_guaranteed else ()
    ledger = LedgerState(
        "ledger.jsonl",
        budget.ledger.head,
        sum(entry.run == budget.run for entry in budget.ledger.entries),
        math.isinf(budget.epsilon()),
        lasting,
        budget.ledger.others or None,
    )
    unreleased: tuple[tuple[Event, int], ...] = ()
    if planned and figures:  # with the ledger, it counts as the run's own claim does
        unreleased = tuple((Counter(planned) - Counter(budget.opened())).items())
    return Statement(replace(claim, figures=figures), rounds, sampling, ledger, clients, unreleased)


def _figures(claim: Claim, budget: PrivacyBudget[Ledger], planned: Planned | None, resumed: bool) -> tuple[Figure, ...]:
    """Return a figure for this run, one for everything in the ledger, and one against those who are no clients.

    The parameters of a run are fixed before it, so that its own figure is that of the tightest accountant. How many
    rounds there are is one of them: a run that is ended for what it released is counted as if it had not been.
    """
    neighbours = ZEROED if claim.is_against_server else None
    about = (entry.event.parts()[0] for entry in budget.ledger.entries if entry.unit == budget.unit)
    shared = claim.is_against_server or any(isinstance(event, DistributedGaussian) for event in about)
    base = Figure(claim.unit, claim.relation, neighbours, delta=budget.delta, counts=ALL_PLANNED if planned else None)
    of_run = budget.account_of_run if planned is None else partial(composed, planned, budget.relation)
    own = replace(base, scope=RUN)

    def counted(adversary: str, insiders: bool) -> Figure:
        figure = replace(own, adversary=adversary).counted(of_run(insiders), budget.delta)
        if not (planned and resumed):
            return figure
        # A directory that was put back to an earlier state does not know how often the run was resumed.
        recorded = figure.counted(budget.account_of_run(insiders), budget.delta)
        return max(figure, recorded, key=lambda counted: counted.bound)

    run = counted(adversary_of(claim), True)
    figures = [run]
    if math.isfinite(budget.epsilon()):
        # Other runs may have shown their updates to the server; in those with secure aggregation clients know their own
        # shares of the noise, which may be no fewer than may collude.
        adversary, relation = (NO_CLIENT, ZEROED) if shared else (OUTSIDERS, None)
        of_all = replace(base, adversary=adversary, neighbours=relation, scope=ALL_RUNS)
        figures.append(_everything(of_all, budget, planned))
    strangers = counted(STRANGERS, False)
    if strangers.bound < run.bound:
        figures.append(strangers)
    return tuple(figures)


def adversary_of(claim: Claim) -> str:
    """Return the adversary of the figure of a run. Under secure aggregation a client knows its share of the noise."""
    if not claim.is_against_server:
        return OUTSIDERS
    colluding, client, partners = int(claim.parameters[COLLUDING]), "client", []
    if claim.by_provisioner:
        # These members are among those who may collude. Where they are more, one share counts: all others may collude.
        colluding, client = max(colluding - len(claim.by_provisioner), 0), "other client"
        partners.append(provisioner_of(claim.by_provisioner))
    if claim.counts_one_share:
        partners.append("all clients but one")
    elif colluding:
        partners.append(f"one {client}" if colluding == 1 else f"up to {colluding} {client}s")
    together = f" together with {' and '.join(partners)}" if partners else ""
    apart = "" if colluding or claim.counts_one_share else " and is none of its clients"
    return f"the server{together}, and any party that sees the models of the run{apart}"


def _everything(figure: Figure, budget: PrivacyBudget[Ledger], planned: Planned | None) -> Figure:
    """Return the figure over all runs: the budget where one is kept, otherwise a figure with one more premise."""
    has_others = any(entry.unit == budget.unit and entry.run != budget.run for entry in budget.ledger.entries)
    of_others = (EARLIER,) if has_others else ()
    if not budget.max_epsilon or budget.share() > 1:
        if planned is None:
            account = budget.account()
        else:
            account = budget.account_with(composed(planned, budget.relation, insiders=True))
        return replace(figure, premises=(UNCHOSEN, *of_others)).counted(account, budget.delta)
    beforehand = budget.ledger.was_set_beforehand(budget.unit)
    return replace(
        figure,
        epsilon=budget.max_epsilon,
        budget=True,
        filter=str(budget.filter),
        spent=budget.share(),
        premises=(BUDGET_FIXED.known_as("enforced") if beforehand else BUDGET_FIXED, *of_others),
    )
