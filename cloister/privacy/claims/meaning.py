"""Meaning of a claim in plain words: three sentences, and a bound on the best guess about one person."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cloister.core.digits import at_most
from cloister.privacy.claims.claim import Claim, ClientClaim, DpSgdClaim, Figure, Statement
from cloister.privacy.claims.premises import condition
from cloister.privacy.claims.server import ALL_RUNS, ONE_UPDATE, RUN
from cloister.privacy.claims.words import (
    NOBODY_TRAINED,
    NOTHING_RELEASED,
    beyond_budget,
    render_largest,
    strength,
    uncounted,
)
from cloister.privacy.claims.worth import best_guess, tier

NO_BOUND = (
    "No number bounds how much a guess about one client or one person can improve: treat the models as if they had "
    "been trained without protection."
)
NO_GUESS = "There is nothing that anybody could guess from."
UNHELPED = "Whoever takes two datasets for equally likely guesses right with a probability of 50 %, as before (ε = 0)."
NEARLY_CERTAIN = 0.95
"""A guess that may be right more often than this is called nearly certain."""
LARGEST_OF_A_PART = 20.0
"""An ε of a client above this bounds no guess about a part of what it holds."""
HELD = {
    "client": "every client, with everything it holds",
    "example": "every single example of every client",
    "group": (
        "every group of examples of every client (all that one client has of one patient, or of one writer; a person "
        "at several clients loses what each of them costs, together)"
    ),
}
GROUPS_AT_ONE_CLIENT = "every group of examples (all examples of one patient, or of one writer); each is at one client"


KNOWN_SIZES = "By Rényi DP no client has a size that costs more."
UNKNOWN_SIZES = (
    "The server does not know how large its clients are, so that these are examples of sizes: what a client has spent "
    "stands in its own ledger, and `cloister plan --public-size N` says what one that states N comes to."
)
HARDLY = "A client as a whole is hardly protected"


@dataclass(frozen=True)
class Meaning:
    """Three sentences about one mechanism.

    Attributes:
        about: whose mechanism it is.
        guaranteed: whether anything is guaranteed.
        who: is protected.
        against: whom.
        how_much: in words, with its numbers.
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
    def sentences(self) -> tuple[str, str, str]:
        """Return the three in their order."""
        return self.who, self.against, self.how_much


def protected(figure: Figure) -> str:
    """Return who is protected: of a unit that several clients hold, all of it."""
    if figure.is_shared:
        what = "group of examples (all examples of one patient, or of one writer)"
        return (
            f"every {what if figure.unit == 'group' else figure.unit}, at all clients that hold data of it together: "
            f"up to {figure.holders}"
        )
    return GROUPS_AT_ONE_CLIENT if figure.unit == "group" and figure.holders else HELD.get(figure.unit, figure.unit)


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
            "Nobody is guaranteed anything: the run used no mechanism that protects privacy.",
            "The server, and any party that sees its records, sees every client's model.",
            NO_BOUND,
        )
    figure = next((figure for figure in claim.figures if figure.scope == RUN), None)
    if figure is None:
        return _without_guarantee(about, claim)
    if statement.released_nothing:
        return Meaning(about, True, f"{_sentence(NOTHING_RELEASED)}.", NO_GUESS, _of_other_runs(statement))
    how_much = _how_much(figure) + _if_premises_hold(figure) + _over_all_runs(statement)
    if told := uncounted(statement.ledger):
        how_much = f"{how_much.removesuffix('.')}; {told}."
    against = f"The claim holds against {figure.adversary}"
    if claim.is_against_server:
        against += f"; the server sees sums of updates alone{f'; {ONE_UPDATE}' * claim.counts_one_share}."
    else:
        against += ", and not against the server, which sees every update before it is noised."
    who, is_open = _on_condition(claim, _who(figure)), claim.status == "conditional"
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


def _if_premises_hold(figure: Figure) -> str:
    return f", if {found.removeprefix('it holds if ')}" if (found := condition(figure.premises)) else ""


def _over_all_runs(statement: Statement) -> str:
    """Return the end of the last sentence: the total of all runs in the ledger, if it is more than this one's."""
    if not statement.ledger.lasting:
        return "; other runs on this data are not counted, as the ledger is of this run alone."
    this, others = (
        next((figure for figure in statement.claim.figures if figure.scope == scope), None) for scope in (RUN, ALL_RUNS)
    )
    if others is None or others.epsilon is None:
        return "; over all runs in the ledger nothing is bounded, as earlier ones released without a guarantee."
    if this is None or others.epsilon <= this.bound:
        return "."
    told = f", {found}" if (found := condition(others.premises)) else ""
    return f"; over all runs in the ledger {percent(_guess(others))} ({_parameters(others)}{told})."


def _of_clients(claim: ClientClaim) -> Meaning:
    about = "the clients' mechanism"
    figure = weakest(claim)
    if figure is None:
        return _without_guarantee(about, claim)
    if isinstance(claim, DpSgdClaim) and claim.nobody_trained:
        return Meaning(about, True, f"{_sentence(NOBODY_TRAINED)}.", NO_GUESS, UNHELPED)
    sizes = ""
    if isinstance(claim, DpSgdClaim):
        sizes = f"; this ε is {render_largest(claim)}. {KNOWN_SIZES if claim.known else UNKNOWN_SIZES} {HARDLY}"
    budget = f"; {told}" if (told := beyond_budget(claim)) else ""
    how_much = _how_much(figure) + _if_premises_hold(figure) + sizes + budget + "."
    against = f"The claim holds against {figure.adversary}."
    missing = f" There is no claim about {claim.not_covered}." if claim.not_covered else ""
    who, is_open = _on_condition(claim, _who(figure)) + missing, claim.status == "conditional"
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
        return f"{claim.mechanism} (nobody trained)"
    told = f"ε = {at_most(figure.epsilon)} for one {figure.unit}"
    if isinstance(claim, DpSgdClaim):
        found = claim.by_size
        told += f" of a client with {max(found, key=lambda size: found[size].bound)}"
    return f"{claim.mechanism} ({strength(claim, figure.epsilon)}; {told})"


def _without_guarantee(about: str, claim: Claim) -> Meaning:
    reasons = "; and ".join(claim.reasons) or "it released nothing that could be counted"
    against = f"The mechanism {claim.mechanism} adds noise, but this is no guarantee against anybody: {reasons}."
    return Meaning(about, False, f"Nobody is guaranteed anything by {about}.", against, NO_BOUND)


def _who(figure: Figure) -> str:
    whom = protected(figure)
    if _tier(figure) == "weak":
        return f"There is a weak claim for {whom}: it hardly hides {_secret(figure)}."
    return f"The run protects {whom}: it hides {_secret(figure)}."


def _tier(figure: Figure) -> str:
    return tier(figure.bound, figure.delta or 0.0)


def _secret(figure: Figure) -> str:
    if figure.relation == "replace-one":
        return f"which of any two versions of it was used for one {figure.unit}"
    return f"whether the data of one {figure.unit} was used at all"


def _how_much(figure: Figure) -> str:
    """Return the last sentence, without its end."""
    guess = _guess(figure)
    two = "the two versions" if figure.relation == "replace-one" else "that the data was used and that it was not"
    told = (
        f"Somebody who knows everything else, and takes {two} for equally likely, guesses right which of "
        f"the two it was with a probability of at most {percent(guess)} instead of 50 % ({_parameters(figure)}: "
        f"{_tier(figure)})"
    )
    if guess > NEARLY_CERTAIN:
        told += ", so that the guess may be nearly certain"
    if figure.unit == "client" and figure.relation == "add-or-remove":
        part = best_guess_of_a_part(figure.bound, figure.delta or 0.0)
        told += f", and at most {percent(part)} about one person whose data is a part of a client's"
    return told


def _guess(figure: Figure) -> float:
    return best_guess(figure.bound, figure.delta or 0.0)


def _parameters(figure: Figure) -> str:
    return f"ε = {at_most(figure.epsilon)}, δ = {at_most(figure.delta or 0.0)}"
