"""Answers to the questions of NIST SP 800-226."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LocalClaim
from cloister.privacy.claims.premises import explained
from cloister.privacy.claims.render import NOBODY_TRAINED, protected, setting
from cloister.privacy.claims.to_json import NEIGHBOURS
from cloister.server.reports.html.data import Facts, Statements
from cloister.utils.text import at_most

SERVER_SUM = (
    "Server: bounded updates are truncated to whole steps of a public grid, and their bound is verified. Sums, counts "
    "and distances are whole numbers, and their noise has an exact discrete law, on AES-128 in counter mode under a "
    "key of the operating system: rounding is no part of the claim."
)
CLIENT_WHOLE = (
    "Clients: the bounded update is truncated to whole steps of a public grid, verified in whole numbers, and noised "
    "by an exact discrete law before the model that the server sent is added."
)
CLIENT_SUM = (
    "Clients: the bounded update is noised in double precision on a public grid before the model that the server sent "
    "is added; the claim is about the continuous law and does not count its rounding."
)
BATCH_SUM = (
    "Clients: sums over a batch are made in single precision; contributions are clipped lower by the proved bound on "
    "what rounding adds."
)
SHARED_SUM = (
    "Clients: the clipped update is truncated to whole steps of a public grid, verified in whole numbers, and gets a "
    "share of noise of an exact discrete law. The sum is taken modulo a power of two that has room for it: rounding is "
    "no part of the claim."
)
FLOATS: Mapping[str, str] = {
    "global-dp": SERVER_SUM,
    "metric": SERVER_SUM,
    "gaussian": CLIENT_WHOLE,
    "laplace": CLIENT_SUM,
    "dp-sgd": BATCH_SUM,
}
"""Numerical treatment by mechanism; docs/privacy.md has the details. A plugin's author describes its own."""


NO_MECHANISM = "Nothing is claimed: no mechanism was on, or the run has not ended in order."


OTHER_THAN_ROUNDS = (
    "Releases are not rounds: an adaptive bound, a distance or a loss of clients is a release beside the model, and "
    "what was written down counts even if its round was not finished."
)

ONE_FOR_ALL = (
    "Without a mechanism on the server an entry stands for all rounds that follow it: no number of them costs less."
)
SCORES = (
    "scores on the server's test data and the replies on this page: they are for the operator and the officer, and no "
    "claim counts them if this page is published"
)
"""Unprotected information that the page itself publishes."""
Answer = Callable[[Facts], Iterator[str]]


@dataclass(frozen=True)
class Question:
    """One question of the page.

    Attributes:
        key: of the operator's statement.
        title: subject of the question.
        facts: answers from the run itself.
        open: the part that only the operator can state.
        stated: the operator's statement; empty: not yet stated.
    """

    key: str
    title: str
    facts: tuple[str, ...]
    open: str
    stated: str


def questions(facts: Facts, statements: Statements) -> tuple[Question, ...]:
    """Return all questions with their answers.

    Args:
        facts: of the run.
        statements: of the operator.
    """
    return tuple(
        Question(key, title, tuple(answer(facts)), left, getattr(statements, key)) for key, title, left, answer in ASKED
    )


def claims_of(facts: Facts) -> tuple[Claim, ...]:
    """Return the claims about active mechanisms, the server's first.

    There are none before the run has ended.
    """
    if facts.statement is None:
        return ()
    both = (facts.statement.claim, facts.statement.clients)
    return tuple(claim for claim in both if claim is not None and claim.mechanism != "none")


def unprotected(facts: Facts) -> tuple[str, ...]:
    """Return the distinct unprotected releases; empty before the run's end."""
    if facts.statement is None:
        return ()
    claims = (facts.statement.claim, facts.statement.clients)
    left = dict.fromkeys(item for claim in claims if claim is not None for item in claim.unprotected)
    return (*left, SCORES) if left else ()


def figures_of(claim: Claim) -> tuple[tuple[str, Figure], ...]:
    """Return every figure with an ε, each with the client size it is about."""
    if isinstance(claim, DpSgdClaim):
        # Without training, the sizes are examples and nothing has an ε.
        sizes = [
            (f"{size.size} {claim.word}s, {size.rounds} rounds of this run", size.figures)
            for size in claim.sizes
            if size.rounds
        ]
    else:
        sizes = [("", claim.figures)]
    return tuple((about, figure) for about, figures in sizes for figure in figures if figure.epsilon is not None)


def variant(figure: Figure) -> str:
    """Return the kind of differential privacy of a figure."""
    return (
        f"(ε, δ)-differential privacy, δ = {at_most(figure.delta)}" if figure.delta else "pure ε-differential privacy"
    )


ASKED: list[tuple[str, str, str, Answer]] = []
"""Questions in the order of the pyramid of NIST SP 800-226, top down: key, title, open part, answers."""


def _asked(key: str, title: str, left: str) -> Callable[[Answer], Answer]:
    """Add a question with its answers from a run to the page."""

    def added(answer: Answer) -> Answer:
        ASKED.append((key, title, left, answer))
        return answer

    return added


@_asked("parameters", "ε, δ and the variant", "why these values, and who decided on them")
def _parameters(facts: Facts) -> Iterator[str]:
    for claim in claims_of(facts):
        found = [figure for _, figure in figures_of(claim) if figure.unit == claim.unit]
        if isinstance(claim, DpSgdClaim) and claim.nobody_trained and claim.is_guaranteed:
            yield f"{claim.mechanism}: {NOBODY_TRAINED}."
            continue
        if not found:
            yield f"{claim.mechanism}: no ε is claimed; its status is {claim.status}."
            continue
        values = sorted({figure.bound for figure in found})
        if isinstance(claim, DpSgdClaim) and values[1:]:
            epsilons = f"ε from {at_most(values[0])} to {at_most(values[-1])}, by the size of a client,"
        else:
            scoped = [at_most(figure.epsilon) + (f" ({figure.scope})" if values[1:] else "") for figure in found]
            epsilons = f"ε = {' and '.join(scoped if values[1:] else scoped[:1])}"
        told = f"{epsilons} for one {claim.word}, {variant(found[0])}"
        beside = ", those for whole clients in privacy.json" if isinstance(claim, DpSgdClaim) else ""
        yield f"{claim.mechanism}: {told}; all figures are on page 1{beside}."
    if not claims_of(facts):
        yield NO_MECHANISM


@_asked("unit", "Unit of privacy and neighbours", "who or what a unit is, and how many one person has")
def _unit(facts: Facts) -> Iterator[str]:
    if not claims_of(facts):
        yield NO_MECHANISM
    for claim in claims_of(facts):
        found = [figure for _, figure in figures_of(claim) if figure.unit == claim.unit][:1]
        if not isinstance(claim, DpSgdClaim | LocalClaim):
            relation = found[0].relation if found else claim.relation
            told = (found[0].neighbours if found else None) or NEIGHBOURS
            yield f"{claim.mechanism}: {protected(claim)}. Neighbours, {relation}: {told}."
        elif found:
            told = f"Neighbours, {found[0].relation}: {found[0].neighbours}"
            yield f"{claim.mechanism}: {protected(claim, found[0])}. {told}."
        else:
            yield f"{claim.mechanism}: {protected(claim)}; nothing is claimed for it."


@_asked("mechanism", "Mechanism", "what else is done to the data before or after it")
def _mechanism(facts: Facts) -> Iterator[str]:
    if not claims_of(facts):
        yield NO_MECHANISM
    for claim in claims_of(facts):
        values = [f"{key.removeprefix('privacy.')} {setting(key, value)}" for key, value in claim.parameters.items()]
        noise = "noise from a seed, with which it can be removed" if claim.seeded else "noise that no seed repeats"
        yield f"{claim.mechanism} ({claim.status}), {noise}: {', '.join(values)}."


@_asked("utility", "Utility and bias", "what accuracy the purpose needs, and which groups were looked at")
def _utility(facts: Facts) -> Iterator[str]:
    found = facts.evaluation
    if found is None:
        yield "Nothing was measured on test data of the server."
        return
    scores = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
    yield f"On {found.examples} test examples of the server: {scores}."
    if found.classification is not None:
        worst = min((one for one in found.classification.classes if one.support), key=lambda one: one.recall)
        yield (
            f"Macro F1 {found.classification.macro_f1:.4g}; the lowest recall is that of class {worst.name}: "
            f"{worst.recall:.3g} of {worst.support} examples. Clipping and noise cost rare classes the most."
        )


@_asked("trust", "Trust model", "who runs the server, and why the sites believe them")
def _trust(facts: Facts) -> Iterator[str]:
    claims = claims_of(facts)
    of_server = [claim for claim in claims if not isinstance(claim, DpSgdClaim | LocalClaim)]
    if any(claim.is_against_server for claim in of_server):
        yield "The clients add the noise in shares: they trust no server, and each other but for those who may collude."
    elif of_server:
        yield "The server adds its noise itself: it sees every update before, and the sites believe it."
    for claim in claims:
        if isinstance(claim, DpSgdClaim | LocalClaim) and claim.is_guaranteed:
            yield "The clients add noise before anything leaves them: they trust their own nodes, and no server."
    if not any(claim.is_guaranteed for claim in claims):
        yield "The run promises nothing: each party that sees what clients send, or the models, is trusted."
    for claim in claims:
        if claim.is_guaranteed:
            yield f"Premises of {claim.mechanism}: {explained(claim.premises)}."
    yield "No claim is about clients that send false updates."


@_asked("composition", "Composition", "other releases about the same data, outside of this ledger")
def _composition(facts: Facts) -> Iterator[str]:
    statement = facts.statement
    if statement is None:
        return
    yield f"Rounds: {statement.rounds}; sampling {statement.sampling}."
    ledger = statement.ledger
    yield f"Releases of this run in the ledger: {ledger.releases_of_this_run}, each written down before it was made."
    if statement.claim.mechanism == "none":
        yield ONE_FOR_ALL
    elif ledger.releases_of_this_run != statement.rounds:
        yield OTHER_THAN_ROUNDS
    if not ledger.lasting:
        yield "The ledger is of this run alone: other runs on the same data are not in it, and not in any figure."
    for figure in statement.claim.figures:
        if figure.budget:
            spent = at_most(100 * (figure.spent or 0.0), 3)
            yield f"A budget of ε = {at_most(figure.epsilon, 6)} over all runs in it was kept; {spent} % is spent."
    if ledger.holds_releases_without_a_guarantee:
        yield "The ledger holds releases without a guarantee about whole clients: no ε bounds all runs for a client."
        if any(isinstance(claim, DpSgdClaim) and claim.is_guaranteed for claim in claims_of(facts)):
            yield "What a client's own noise protects is counted over all runs by that client, in its own ledger."


@_asked("implementation", "Floating point and side channels", "who can measure the machines; reviews")
def _implementation(facts: Facts) -> Iterator[str]:
    sound = [claim for claim in claims_of(facts) if claim.is_guaranteed]
    for claim in sound:
        unknown = f"{claim.mechanism} is of another package: its author states what rounding does."
        yield SHARED_SUM if claim.is_against_server else FLOATS.get(claim.mechanism, unknown)
    if not sound:
        yield "Nothing is claimed that rounding could break."
    if facts.secret_cohorts:
        yield (
            "Cohorts were drawn in secret: records of the run contain no numbers of replies, and no times of rounds. "
            "Dates of files, and of a saved Keras model, are exact."
        )
    else:
        yield "How long a round takes, and who replies, can be seen on the network."


@_asked("access", "Access", "who may see the model, this page and the run directory")
def _access(facts: Facts) -> Iterator[str]:
    if any(claim.is_guaranteed for claim in claims_of(facts)):
        yield "The models may be seen by those against whom the claim holds."
    else:
        yield "Nothing bounds what the models tell: each recipient may learn about the data."
    yield (
        "The run directory, and in it rounds.jsonl and the ledger, is for the operator of the server alone; the "
        "replies and the scores on this page are for the operator and the officer."
    )
    if left := len(unprotected(facts)):
        yield f"{left} kinds of facts left without noise: they are listed on page 1."


@_asked("collection", "Data collection", "how, on what grounds and for how long data is kept")
def _collection(facts: Facts) -> Iterator[str]:
    identity = facts.config.get("privacy.data-identity") or "none given"
    yield f"Task {facts.config.get('task.name')}; name of the data in the ledger: {identity}."
    yield "Examples stay with the clients, who send what the run agreed on and nothing else."
