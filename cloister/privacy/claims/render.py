"""Text of claims: tier and best guess of an ε, lines for console and reports, meaning in plain words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cloister.privacy.claims.claim import CLIENT_BUDGET, Claim, ClientClaim, DpSgdClaim, Figure, LedgerState, Statement
from cloister.privacy.claims.premises import condition, listed, named
from cloister.privacy.claims.server import ALL_RUNS, ONE_UPDATE, RUN
from cloister.privacy.mechanisms.distributed.shares import COLLUDING
from cloister.utils.keys import REMEDY, provisioner_of
from cloister.utils.text import at_least, at_most, counted

TIERS = {"strong": 1.0, "reasonable": 10.0, "weak": math.inf}
"""Largest ε of each tier, for the unit at hand.

Source: Ponomareva et al. (2023), How to DP-fy ML, arXiv:2303.00654, §5.2.
"""
LARGE_DELTA = 0.01
"""A guarantee of a larger δ is weak for any ε: with that probability it may not hold."""


def best_guess(epsilon: float, delta: float) -> float:
    """Return the largest probability that a guess between two equally likely, neighbouring datasets is right.

    The adversary has everything except which of the two datasets D and D' was used. Both are equally likely. It sees
    all releases, and guesses. Let A be the releases for which it guesses D'. With a = P(A | D) and b = P(not A | D')
    it is wrong with probability (a + b)/2. (ε, δ)-differential privacy, applied to A and to its complement, gives
    1 - b ≤ e^ε·a + δ and 1 - a ≤ e^ε·b + δ. Their sum is a + b ≥ 2(1 - δ)/(1 + e^ε). So it is right with probability
    at most

        1 - (1 - δ)/(1 + e^ε) = (e^ε + δ)/(1 + e^ε).

    Args:
        epsilon: ε ≥ 0; infinity promises nothing.
        delta: δ from 0 to 1.

    Returns:
        From 1/2 (ε = δ = 0: seeing the release does not help) to 1.

    Guarantee: it bounds every rule of guessing, on average over what is released. For δ = 0 it bounds the posterior
        probability after each single release too. For δ > 0 an event of probability δ may reveal the dataset.

    Source: Kairouz, Oh and Viswanath (2015), The Composition Theorem for Differential Privacy.

    Examples:
        >>> best_guess(0.0, 0.0), round(best_guess(1.0, 1e-5), 3)
        (0.5, 0.731)
    """
    wrong = math.exp(-epsilon) / (1 + math.exp(-epsilon))  # 1/(1 + e^ε), without an overflow
    return 1 - (1 - delta) * wrong


def tier(epsilon: float, delta: float = 0.0) -> str:
    """Return `strong`, `reasonable` or `weak`.

    Args:
        epsilon, delta: as in `best_guess`.

    Examples:
        >>> tier(1.0), tier(8.0, 1e-5), tier(12.0), tier(0.5, 0.1)
        ('strong', 'reasonable', 'weak', 'weak')
    """
    if delta > LARGE_DELTA:
        return "weak"
    return next(name for name, largest in TIERS.items() if epsilon <= largest)


NOT_KNOWN = (
    "client sizes are unknown here: figures are for sample sizes, each client's own ledger has its spending, and "
    "`cloister plan --public-size N` computes the figure of a site that states N"
)
KNOWN = "figures are for sizes that their nodes state: smallest, middle, largest and, by Rényi DP, costliest"
SIMULATED = (
    "simulation: one process played server and clients; the claims are about the protocol, not about people at sites"
)
NOTHING_RELEASED = "nothing was released: no round was run, and the model is the one that the run began with"
EARLIER_ADD = "earlier runs on the same data add to the ε of this run: each site's own ledger has the sum"
NOBODY_TRAINED = "no client trained: nothing that follows from its data left any of them"


def strength(claim: Claim, epsilon: float | None) -> str:
    """Return the status of a claim, and of a guarantee the tier of its ε; None: ε is not known."""
    return claim.status if epsilon is None or not claim.is_guaranteed else f"{claim.status}, {tier(epsilon)}"


def contract(claim: Claim, epsilon: float | None = None) -> str:
    """Return the promise before a run, in one line.

    Args:
        claim: of the mechanism on the server.
        epsilon: that the whole run comes to, where it is known.
    """
    if claim.mechanism == "none":
        return f"none on the server, which sees {'a sum' if claim.is_against_server else 'what every client sends'}"
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
    claim, simulated = statement.claim, [SIMULATED] if statement.simulated else []
    unprotected, clients = _unprotected(claim), render_clients(statement.clients) if statement.clients else []
    if claim.status == "none":
        seen = "every client's model" if statement.clients is None else "what every client sends"
        seen = "the sum of each round" if claim.is_against_server else seen
        none = f"privacy on the server: none. The server, and any party that sees its records, sees {seen}."
        return [*simulated, none, *unprotected, *clients]
    lines = [*simulated, f"privacy: {claim.mechanism}, {strength(claim, _of_run(claim))}{_if(claim)}", *_reasons(claim)]
    if statement.released_nothing:
        lines.append(f"  {NOTHING_RELEASED}")
    for figure in claim.figures:
        about = f"{figure.scope}: against {figure.adversary}; unit {figure.unit}, {figure.relation}"
        if figure.budget:
            told = (
                f"  ε ≤ {_amount(figure)}, {about}; also if later runs were chosen by what earlier ones released "
                f"(a budget, kept by {figure.filter}); {at_most(100 * (figure.spent or 0.0), 3)} % spent"
                f"{_condition(figure)}"
            )
        else:
            told = f"  ε = {_amount(figure)}, {about}; by {figure.accountant}{_condition(figure)}{_counts(figure)}"
        how = f"; {statement.rounds} rounds, sampling {statement.sampling}" if figure.scope == RUN else ""
        lines.append(told + how)
    if claim.is_guaranteed and statement.ledger.holds_releases_without_a_guarantee:
        lines.append("  no claim over all runs: the ledger holds releases of earlier runs without a guarantee")
    lines += [f"  {told}"] if (told := uncounted(statement.ledger)) else []
    if claim.is_against_server:
        lines.append("  the server sees sums of updates alone, and cannot check what a hostile client puts into them")
        if claim.by_provisioner:
            lines.append(f"  counted as working with the server: {provisioner_of(claim.by_provisioner)}; {REMEDY}")
        if claim.counts_one_share:
            lines.append(f"  {ONE_UPDATE}")
        if not claim.parameters[COLLUDING] and not claim.by_provisioner:
            why = f"{COLLUDING} = 0, and each knows its own share of the noise"
            lines.append(f"  no claim against the other clients: {why}")
    else:
        lines.append("  no claim against the server, which sees every update before it is noised")
    return [*lines, *_premises(claim), *unprotected, *clients]


def uncounted(ledger: LedgerState) -> str:
    """Return which ledgers of data at the same place a claim does not count; empty without any."""
    if not ledger.others:
        return ""
    return f"data at the same place had other names: what was released under {', '.join(ledger.others)} is not counted"


def _reasons(claim: Claim) -> list[str]:
    return [f"  not a guarantee: {reason}" for reason in claim.reasons]


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
    whose = f"that of a client with {high} {claim.word}s{fewest}"
    if high == low:
        return whose
    return f"{whose}; other sizes go down to ε = {at_most(found[low].epsilon)} with {low} {claim.word}s"


def beyond_budget(claim: ClientClaim) -> str:
    """Relate the budget of a run's clients to its figures; empty without a budget."""
    limit = claim.parameters.get(CLIENT_BUDGET)
    if not limit:
        return ""
    word = claim.word if isinstance(claim, DpSgdClaim) else "client"
    return (
        f"nodes were asked to stop training before ε = {limit:g} for one {word} is passed ({CLIENT_BUDGET}); the "
        "figures do not count on that, as each node keeps its budget itself"
    )


def render_clients(claim: ClientClaim) -> list[str]:
    """Return the claim about the clients' own mechanism as lines of plain text."""
    budget = [f"  {told}"] if (told := beyond_budget(claim)) else []
    if isinstance(claim, DpSgdClaim):
        if claim.nobody_trained and claim.is_guaranteed:
            return [f"clients: {claim.mechanism}; {NOBODY_TRAINED}"]
        dearest = max((figure.bound for figure in claim.by_size.values()), default=None)
        sizes_are = "no client trained" if claim.nobody_trained else KNOWN if claim.known else NOT_KNOWN
        first = f"clients: dp-sgd, {strength(claim, dearest)}{_if(claim)}; {sizes_are}"
        budget += [*_premises(claim), *_unprotected(claim)]
        sizes = [
            f"  ε = {_amount(figure)}, {RUN}: for one {claim.word} of a client with {size.size} {claim.word}s "
            f"that trained in {counted(size.rounds, 'round')}{at_holders(figure)}: against {figure.adversary}"
            f"{_condition(figure)}{_counts(figure)}"
            for size in claim.sizes
            for figure in size.figures
            if figure.unit == claim.unit
        ]
        largest = [f"  the largest ε is {told}"] if (told := render_largest(claim)) and sizes[1:] else []
        return [first, *_reasons(claim), *largest, *sizes, *([f"  {EARLIER_ADD}"] if sizes else []), *budget]
    lines = [f"clients: {claim.mechanism}, {claim.status}{_if(claim)}", *_reasons(claim)]
    if claim.leakage_of_a_release is not None:
        lines.append(f"  one release leaks {at_most(claim.leakage_of_a_release)} within its neighbourhood")
    lines += [
        f"  {_render_local_figure(figure)}: against {figure.adversary}{_condition(figure)}{_counts(figure)}"
        for figure in claim.figures
    ]
    lines += [f"  {EARLIER_ADD}"] if claim.figures else []
    return [*lines, *_premises(claim), *_unprotected(claim), *budget]


def at_holders(figure: Figure) -> str:
    """Return the number of clients over which the loss of one unit is added up; empty for one client."""
    return f", and at all clients that hold data of it together, up to {figure.holders}" if figure.is_shared else ""


def _premises(claim: Claim) -> list[str]:
    """Return the premises of a guarantee in one line; none without a guarantee."""
    return [f"  premises: {listed(claim.premises)} (docs/threat-model.md)"] if claim.is_guaranteed else []


def _if(claim: Claim) -> str:
    """Return the open premises of a claim, for its first line; empty without any."""
    told = condition(claim.premises) if claim.is_guaranteed else ""
    return f"; {told}" if told else ""


def limits_of(claim: Claim) -> list[str]:
    """Return the open premises of a claim and those it does not cover, each as a sentence without its full stop."""
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


NO_BOUND = (
    "No number bounds how much a guess about one client or one person can improve: treat the models as if they had "
    "been trained without protection."
)
NO_GUESS = "There is nothing to guess from."
UNHELPED = "A guess between two equally likely datasets is right with a probability of 50 %, as before (ε = 0)."
NEARLY_CERTAIN = 0.95
"""A guess that may be right more often than this is called nearly certain."""
REASONABLE = "An ε up to 10 is called reasonable since attacks in practice know less, and guess far worse"
"""Why a tier and a bound on guesses differ. Source: as `TIERS`."""
LARGEST_OF_A_PART = 20.0
"""An ε of a client above this bounds no guess about a part of what it holds."""
HELD = {
    "client": "every client, with everything it holds",
    "example": "every single example of every client",
    "group": "every {0} of every client; one at several clients loses what each of them costs, together",
}
SHARED_NOISE = "every {0} of every client; one at k clients loses what k times as many rounds cost at σ/√k"
"""Protected units if clients share the noise of a step: their sums add up under one noise."""
SOME_GROUP = "group of examples (all of one patient, or of one writer)"
"""Words for a group whose column is not known."""


KNOWN_SIZES = ("By Rényi DP no client has a size that costs more",)
UNKNOWN_SIZES = (
    "Client sizes are unknown to the server: these are sample sizes",
    "A client's own ledger has its spending",
    "`cloister plan --public-size N` computes the figure of a client that states N",
)
HARDLY = "A client as a whole is hardly protected"


@dataclass(frozen=True)
class Meaning:
    """Text of a page about one mechanism: who, against whom, how much.

    Attributes:
        about: whose mechanism it is.
        guaranteed: whether anything is guaranteed.
        who: is protected.
        against: whom.
        how_much: in words, with its numbers; empty, as `against` is, if the mechanism had nothing to protect.
        practical: whether its tier is not weak.
        conditional: whether it rests on an open premise.
    """

    about: str
    guaranteed: bool
    who: str
    against: str
    how_much: str
    practical: bool = True
    conditional: bool = False

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the paragraphs in their order."""
        return tuple(filter(None, (self.who, self.against, self.how_much)))


def protected(claim: Claim, figure: Figure | None = None) -> str:
    """Return who is protected: of a unit that several clients hold, all of it.

    Args:
        claim: about the unit.
        figure: of the claim; None: it has none, and who would be protected is returned.
    """
    unit = claim.unit if figure is None else figure.unit
    word = claim.word_for(unit) if claim.word_for(unit) != "group" else SOME_GROUP
    if figure is not None and figure.is_shared:
        return f"every {word}, at all clients that hold data of it together: up to {figure.holders}"
    if figure is not None and unit == "group" and figure.holders:
        return f"every {word}; each is at one client"
    if unit == "group" and claim.is_against_server:
        return SHARED_NOISE.format(word)
    return HELD.get(unit, unit).format(word)


def best_guess_of_a_part(epsilon: float, delta: float) -> float:
    """Return the `best_guess` about one person with a part of a client's data, if a client may be left out.

    With and without the person are two datasets that are each a neighbour of the one without the client: two steps
    apart. (ε, δ)-DP for one step is (2ε, (1 + e^ε)δ)-DP for two.

    Args:
        epsilon: ε ≥ 0 under add-or-remove, of a client.
        delta: δ from 0 to 1.
    """
    if epsilon > LARGEST_OF_A_PART:
        return 1.0
    return best_guess(2 * epsilon, min(1.0, (1 + math.exp(epsilon)) * delta))


def percent(probability: float) -> str:
    """Format a bound in percent, rounded up."""
    digits = 1 if probability < 0.99 else 2
    rounded = math.ceil(probability * 100 * 10**digits) / 10**digits
    return f"{rounded:.{digits}f} %" if rounded < 100 else "100 %"


def meanings(statement: Statement) -> tuple[Meaning, ...]:
    """Return the meaning of each mechanism of a run, those with a guarantee first."""
    found = [_of_server(statement)] if statement.claim.mechanism != "none" or statement.clients is None else []
    if statement.clients is not None:
        found.append(_of_clients(statement.clients))
    return tuple(sorted(found, key=lambda meaning: not meaning.guaranteed))


def _of_server(statement: Statement) -> Meaning:
    claim, about = statement.claim, "the server's mechanism"
    if claim.status == "none":
        return Meaning(
            about,
            False,
            "There is no guarantee: the run used no mechanism that protects privacy.",
            "The server, and any party that sees its records, sees every client's model.",
            NO_BOUND,
        )
    figure = next((figure for figure in claim.figures if figure.scope == RUN), None)
    if figure is None:
        return _without_guarantee(about, claim)
    if statement.released_nothing:
        return Meaning(about, True, f"{_sentence(NOTHING_RELEASED)}.", NO_GUESS, _of_other_runs(statement))
    how_much = _paragraph(*_how_much(figure), _over_all_runs(statement), uncounted(statement.ledger))
    against = f"The claim holds against {figure.adversary}"
    if claim.is_against_server:
        against += f"; the server sees sums of updates alone{f'; {ONE_UPDATE}' * claim.counts_one_share}."
    else:
        against += ", and not against the server, which sees every update before it is noised."
    who, is_open = _on_condition(claim, _who(claim, figure)), claim.status == "conditional"
    return Meaning(about, True, who, against, how_much, _tier(figure) != "weak", is_open)


def _on_condition(claim: Claim, sentence: str) -> str:
    """Return the first sentence, behind the open premises of the claim."""
    told = condition(claim.premises).removeprefix("it holds if ")
    return f"If {told}, {sentence[0].lower()}{sentence[1:]}" if told else sentence


def _of_other_runs(statement: Statement) -> str:
    """Return a sentence about all runs in the ledger, for a run that adds nothing to them."""
    others = next((figure for figure in statement.claim.figures if figure.scope == ALL_RUNS), None)
    if not statement.ledger.lasting or others is None or not others.bound:
        return UNHELPED
    kept = (
        f" (a budget, {at_most(100 * (others.spent or 0.0), 3)} % of it spent by earlier runs)" if others.budget else ""
    )
    return f"Earlier runs in the ledger keep their own claims: all together {_parameters(others)}{kept}."


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _paragraph(*sentences: str) -> str:
    """Return sentences without their ends as one text; empty ones are left out."""
    return " ".join(f"{_sentence(each)}." for each in sentences if each)


def _over_all_runs(statement: Statement) -> str:
    """Return a sentence about the total of all runs in the ledger; empty if it is not more than this one's."""
    if not statement.ledger.lasting:
        return "other runs on this data are not counted, as the ledger is of this run alone"
    this, others = (
        next((figure for figure in statement.claim.figures if figure.scope == scope), None) for scope in (RUN, ALL_RUNS)
    )
    if others is None or others.epsilon is None:
        return "over all runs in the ledger nothing is bounded, as earlier ones released without a guarantee"
    if this is None or others.epsilon <= this.bound:
        return ""
    told = f", {found}" if (found := condition(others.premises)) else ""
    return f"over all runs in the ledger it is at most {percent(_guess(others))} ({_parameters(others)}{told})"


def _of_clients(claim: ClientClaim) -> Meaning:
    about = "the clients' mechanism"
    figure = weakest(claim)
    if figure is None:
        return _without_guarantee(about, claim)
    if isinstance(claim, DpSgdClaim) and claim.nobody_trained:
        return Meaning(about, True, f"{_sentence(NOBODY_TRAINED)}.", "", "")
    sizes: tuple[str, ...] = ()
    if isinstance(claim, DpSgdClaim):
        known = KNOWN_SIZES if claim.known else UNKNOWN_SIZES
        sizes = (f"the ε of {RUN} is {render_largest(claim)}", *known, HARDLY)
    how_much = _paragraph(*_how_much(figure), *sizes, EARLIER_ADD, beyond_budget(claim))
    against = f"The claim holds against {figure.adversary}."
    missing = f" There is no claim about {claim.not_covered}." if claim.not_covered else ""
    who, is_open = _on_condition(claim, _who(claim, figure)) + missing, claim.status == "conditional"
    return Meaning(about, True, who, against, how_much, _tier(figure) != "weak", is_open)


def weakest(claim: ClientClaim) -> Figure | None:
    """Return the figure about the unit with the largest ε, which under local noise is that for exchanging all data."""
    figures: Iterable[Figure] = claim.by_size.values() if isinstance(claim, DpSgdClaim) else claim.figures
    found = [figure for figure in figures if figure.unit == claim.unit and figure.epsilon is not None]
    return max(found, key=lambda figure: figure.bound, default=None) if claim.is_guaranteed else None


def summary_of_clients(claim: ClientClaim) -> str:
    """Name the clients' mechanism and its largest ε in a few words."""
    figure = weakest(claim)
    if figure is None or figure.epsilon is None:
        return f"{claim.mechanism} ({claim.status})"
    if isinstance(claim, DpSgdClaim) and claim.nobody_trained:
        return f"{claim.mechanism} (no client trained)"
    told = f"{RUN}: ε = {at_most(figure.epsilon)} for one {claim.word_for(figure.unit)}"
    if isinstance(claim, DpSgdClaim):
        found = claim.by_size
        told += f" of a client with {max(found, key=lambda size: found[size].bound)}"
    return f"{claim.mechanism} ({strength(claim, figure.epsilon)}; {told})"


def _without_guarantee(about: str, claim: Claim) -> Meaning:
    reasons = "; and ".join(claim.reasons) or "it released nothing that could be counted"
    against = f"The mechanism {claim.mechanism} adds noise, but this is no guarantee against anybody: {reasons}."
    return Meaning(about, False, f"There is no guarantee from {about}.", against, NO_BOUND)


def _who(claim: Claim, figure: Figure) -> str:
    whom, secret = protected(claim, figure), f"whether the data of one {claim.word_for(figure.unit)} was used at all"
    if figure.relation == "replace-one":
        secret = f"which of any two versions of it was used for one {claim.word_for(figure.unit)}"
    if _tier(figure) == "weak":
        return f"There is a weak claim for {whom}: it hardly hides {secret}."
    return f"The run protects {whom}: it hides {secret}."


def _tier(figure: Figure) -> str:
    return tier(figure.bound, figure.delta or 0.0)


def _how_much(figure: Figure) -> list[str]:
    """Return sentences about the best guess, each without its end."""
    guess = _guess(figure)
    cases = "either version was used" if figure.relation == "replace-one" else "the data was used, or it was not"
    told = [
        f"an adversary may know everything else, and take two cases for equally likely: {cases}",
        f"a guess which of the two it was is right with a probability of at most {percent(guess)} instead of 50 % "
        f"({_parameters(figure)}: {_tier(figure)})",
    ]
    if guess > NEARLY_CERTAIN:
        told.append("in this worst case the guess may be nearly certain")
        told += [REASONABLE] if _tier(figure) == "reasonable" else []
    if figure.unit == "client" and figure.relation == "add-or-remove":
        part = best_guess_of_a_part(figure.bound, figure.delta or 0.0)
        told.append(f"about one person whose data is a part of a client's, it is at most {percent(part)}")
    return [*told, condition(figure.premises).replace("it holds", "this holds", 1)]


def _guess(figure: Figure) -> float:
    return best_guess(figure.bound, figure.delta or 0.0)


def _parameters(figure: Figure) -> str:
    return f"ε = {at_most(figure.epsilon)}, δ = {at_most(figure.delta or 0.0)}"
