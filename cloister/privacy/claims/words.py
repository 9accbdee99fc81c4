"""Text of claims, for the console and every report."""

from cloister.core.digits import at_least, at_most
from cloister.core.keys import REMEDY, provisioner_of
from cloister.core.text import counted
from cloister.privacy.claims.claim import (
    CLIENT_BUDGET,
    Claim,
    ClientClaim,
    DpSgdClaim,
    Figure,
    LedgerState,
    LocalClaim,
    Statement,
)
from cloister.privacy.claims.premises import condition, listed, named
from cloister.privacy.claims.server import ONE_UPDATE, RUN
from cloister.privacy.claims.worth import tier
from cloister.privacy.mechanisms.distributed.shares import COLLUDING

NOT_KNOWN = (
    "how large they are is not known here: figures are for examples of sizes, what each client has spent stands in its "
    "own ledger, and `cloister plan --public-size N` says what a site that states N comes to"
)
KNOWN = "figures are for sizes that their nodes state: smallest, middle, largest and, by Rényi DP, costliest"
SIMULATED = (
    "simulation: one process played server and clients; the claims are about the protocol, not about people at sites"
)
NOTHING_RELEASED = "nothing was released: no round was run, and the model is the one that the run began with"
NOBODY_TRAINED = "no client trained: nothing that follows from its data left any of them"


def strength(claim: Claim, epsilon: float | None) -> str:
    """Return the status of a claim, and of a guarantee the tier of its ε; None: ε is not known."""
    return claim.status if epsilon is None or not claim.is_guaranteed else f"{claim.status}, {tier(epsilon)}"


def contract(claim: Claim, epsilon: float | None = None) -> str:
    """Return in one line the promise before a run.

    Args:
        claim: of the mechanism on the server.
        epsilon: that the whole run comes to, where it is known.
    """
    if claim.mechanism == "none":
        return "none on the server, which sees what every client sends"
    first = [(key.removeprefix("privacy."), value) for key, value in list(claim.parameters.items())[:3]]
    settings = ", ".join(f"{key} {setting(key, value)}" for key, value in first)
    if not claim.is_guaranteed:
        return f"{claim.mechanism} ({settings}); {claim.status}"
    whole = "" if epsilon is None else f"; ε at most {at_most(epsilon)} for the whole run"
    premises = f", if its premises hold: {found}" if (found := named(claim.premises)) else ""
    who = f"; secure aggregation, colluding {claim.parameters[COLLUDING]}" if claim.is_against_server else ""
    return (
        f"{claim.mechanism} ({settings}){who}; {strength(claim, epsilon)}; unit: {claim.unit}, {claim.relation}{whole}"
        f"{premises}"
    )


def setting(key: str, value: float | str | bool) -> str:
    """Format a parameter of a mechanism; noise is rounded down.

    Args:
        key: of the configuration.
        value: of the parameter.
    """
    if not isinstance(value, float):
        return str(value)
    return at_least(value) if key.endswith("noise-multiplier") else f"{value:.4g}"


def render_resumed(epsilon: float | None, budget: float) -> list[str]:
    """Explain in a line each ε that a resumed run shows; none without a promise.

    Args:
        epsilon: that the whole run comes to at most.
        budget: that is kept over all runs; 0: none.
    """
    if epsilon is None:
        return []
    everything = f"≤ {at_most(budget, 6)}, at the end: the budget, of all runs in the ledger" if budget else ""
    return [
        f"  ε at most {at_most(epsilon)}: of all planned rounds, and of one more for each time that the run was "
        "resumed",
        "  ε of a round: of everything in the ledger up to this round, earlier runs included",
        "  ε of this run, at the end: of what it has released",
        f"  ε {everything or 'of all runs, at the end: of what is in the ledger then'}",
    ]


def _of_run(claim: Claim) -> float | None:
    """Return ε of the run by itself, as the report judges it."""
    return next((figure.bound for figure in claim.figures if figure.scope == RUN), None)


def summary(claim: Claim) -> str:
    """Name the server's mechanism and the strength of its claim in a few words."""
    if claim.status == "none":
        return claim.mechanism
    return f"{claim.mechanism} ({strength(claim, _of_run(claim))})"


def render(statement: Statement) -> list[str]:
    """Return a statement as lines of plain text: about the server's mechanism, then about the clients'."""
    simulated = [SIMULATED] if statement.simulated else []
    return [*simulated, *_render_server(statement), *(render_clients(statement.clients) if statement.clients else ())]


def _render_server(statement: Statement) -> list[str]:
    claim = statement.claim
    unprotected = _unprotected(claim)
    if claim.status == "none":
        seen = "every client's model" if statement.clients is None else "what every client sends"
        return [
            f"privacy on the server: none. The server, and any party that sees its records, sees {seen}.",
            *unprotected,
        ]
    lines = [f"privacy: {claim.mechanism}, {strength(claim, _of_run(claim))}{_if(claim)}", *_reasons(claim)]
    if statement.released_nothing:
        lines.append(f"  {NOTHING_RELEASED}")
    for figure in claim.figures:
        how = f"; {statement.rounds} rounds, sampling {statement.sampling}" if figure.scope == RUN else ""
        lines.append(_render_figure(figure) + how)
    if claim.is_guaranteed and statement.ledger.holds_releases_without_a_guarantee:
        lines.append("  no claim over all runs: the ledger holds releases of earlier runs without a guarantee")
    lines += [f"  {told}"] if (told := uncounted(statement.ledger)) else []
    lines += [*_about_server(claim), *_premises(claim)]
    return lines + unprotected


def uncounted(ledger: LedgerState) -> str:
    """Return which ledgers of data at the same place a claim does not count; empty without any."""
    if not ledger.others:
        return ""
    return f"data at the same place had other names: what was released under {', '.join(ledger.others)} is not counted"


def _about_server(claim: Claim) -> list[str]:
    """Return lines about the single updates that the server sees."""
    if not claim.is_against_server:
        return ["  no claim against the server, which sees every update before it is noised"]
    told = ["  the server sees sums of updates alone, and cannot check what a hostile client puts into them"]
    if claim.by_provisioner:
        told.append(f"  counted as working with the server: {provisioner_of(claim.by_provisioner)}; {REMEDY}")
    if claim.counts_one_share:
        told.append(f"  {ONE_UPDATE}")
    if not claim.parameters[COLLUDING] and not claim.by_provisioner:
        told.append(f"  no claim against the other clients: {COLLUDING} = 0, and each knows its own share of the noise")
    return told


def _reasons(claim: Claim) -> list[str]:
    return [f"  not a guarantee: {reason}" for reason in claim.reasons]


def _render_figure(figure: Figure) -> str:
    """Return a figure about the server's mechanism as a line of plain text."""
    about = f"{figure.scope}: against {figure.adversary}; unit {figure.unit}, {figure.relation}"
    condition, counts = _condition(figure), _counts(figure)
    if figure.budget:
        return (
            f"  ε ≤ {_amount(figure)}, {about}; "
            "also if later runs were chosen by what earlier ones released "
            f"(a budget, kept by {figure.filter}); {at_most(100 * (figure.spent or 0.0), 3)} % spent{condition}"
        )
    return f"  ε = {_amount(figure)}, {about}; by {figure.accountant}{condition}{counts}"


def _amount(figure: Figure) -> str:
    return f"{at_most(figure.epsilon)} at δ = {at_most(figure.delta)}"


def _condition(figure: Figure) -> str:
    return f"; {found}" if (found := condition(figure.premises)) else ""


def _counts(figure: Figure) -> str:
    return f"; {figure.counts}" if figure.counts else ""


def render_largest(claim: DpSgdClaim) -> str:
    """Name the clients with the largest ε, and the smallest ε of others; empty without figures.

    Args:
        claim: of clients of several sizes.
    """
    found = claim.by_size
    if not found:
        return ""
    high, low = (choose(found, key=lambda size: found[size].bound) for choose in (max, min))
    is_fewest = not claim.known and high == min(found) and found.keys() - {high}
    fewest = ", the fewest that figures are given for" if is_fewest else ""
    whose = f"that of a client with {high} {claim.unit}s{fewest}"
    if high == low:
        return whose
    return f"{whose}; other sizes go down to ε = {at_most(found[low].epsilon)} with {low} {claim.unit}s"


def beyond_budget(claim: ClientClaim) -> str:
    """Relate the budget of a run's clients to its figures; empty without a budget."""
    limit = claim.parameters.get(CLIENT_BUDGET)
    if not limit:
        return ""
    unit = claim.unit if isinstance(claim, DpSgdClaim) else "client"
    return (
        f"nodes were asked to stop training before ε = {limit:g} for one {unit} is passed ({CLIENT_BUDGET}); the "
        "figures do not count on that, as each node keeps its budget itself"
    )


def render_clients(claim: ClientClaim) -> list[str]:
    """Return the claim about the clients' own mechanism as lines of plain text."""
    budget = [f"  {told}"] if (told := beyond_budget(claim)) else []
    if isinstance(claim, DpSgdClaim):
        dearest = max((figure.bound for figure in claim.by_size.values()), default=None)
        first = f"clients: dp-sgd, {strength(claim, dearest)}{_if(claim)}; {KNOWN if claim.known else NOT_KNOWN}"
        if claim.nobody_trained:
            return [first, f"  {NOBODY_TRAINED}", *_reasons(claim), *budget]
        budget += [*_premises(claim), *_unprotected(claim)]
        sizes = [
            f"  ε = {_amount(figure)} for one {claim.unit} of a client with {size.size} {claim.unit}s that trained in "
            f"{counted(size.rounds, 'round')}{at_holders(figure)}: against {figure.adversary}{_condition(figure)}"
            f"{_counts(figure)}"
            for size in claim.sizes
            for figure in size.figures
            if figure.unit == claim.unit
        ]
        largest = [f"  the largest ε is {told}"] if (told := render_largest(claim)) and sizes[1:] else []
        return [first, *_reasons(claim), *largest, *sizes, *budget]
    return [f"clients: {claim.mechanism}, {claim.status}{_if(claim)}", *_reasons(claim), *_render_local(claim), *budget]


def at_holders(figure: Figure) -> str:
    """Return at how many clients what one unit loses is counted together; empty for one client."""
    return f", and at all clients that hold data of it together, up to {figure.holders}" if figure.is_shared else ""


def _render_local(claim: LocalClaim) -> list[str]:
    lines = []
    if claim.leakage_of_a_release is not None:
        lines.append(f"  one release leaks {at_most(claim.leakage_of_a_release)} within its neighbourhood")
    lines += [
        f"  {_render_local_figure(figure)}: against {figure.adversary}{_condition(figure)}{_counts(figure)}"
        for figure in claim.figures
    ]
    return [*lines, *_premises(claim), *_unprotected(claim)]


def _premises(claim: Claim) -> list[str]:
    """Return the premises of a guarantee in one line; none without a guarantee."""
    return [f"  premises: {listed(claim.premises)} (docs/threat-model.md)"] if claim.is_guaranteed else []


def _if(claim: Claim) -> str:
    """Return the open premises of a claim, for its first line; empty without any."""
    told = condition(claim.premises) if claim.is_guaranteed else ""
    return f"; {told}" if told else ""


def limits_of(claim: Claim) -> list[str]:
    """Return what the figures of a claim rest on, and whom they are not about, each as a sentence without its end."""
    told = [condition(claim.premises) if claim.is_guaranteed else ""]
    return [*filter(None, told), *([f"no claim about {claim.not_covered}"] if claim.not_covered else [])]


def _unprotected(claim: Claim | ClientClaim) -> list[str]:
    missing = [f"  no claim about {claim.not_covered}"] if claim.not_covered else []
    return [*missing, *(f"  leaves without noise: {item}" for item in claim.unprotected)]


def _render_local_figure(figure: Figure) -> str:
    if figure.leakage is not None:
        return f"leakage of at most {at_most(figure.leakage)} within distance {figure.radius:.4g}, {figure.scope}"
    at = f" at δ = {at_most(figure.delta)}" if figure.delta else ", pure"
    worth = "" if figure.epsilon is None else f", {tier(figure.epsilon, figure.delta or 0.0)}"
    return f"ε = {at_most(figure.epsilon)}{at} for everything a client holds, {figure.relation}, {figure.scope}{worth}"
