"""Claims about clients that noise their own updates.

A claim here does not need the server: the node bounds, noises and chooses by itself, and the server may have chosen
everything that it was sent. It needs the node to run its own code: the premise `bundle`.
"""

from dataclasses import replace
from typing import get_args

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.vocabulary import Relation, units_of
from cloister.privacy.claims.claim import EVERYBODY, Figure, LocalClaim
from cloister.privacy.claims.premises import CARRIED
from cloister.privacy.mechanisms.circumstances import Circumstances
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism, PublishedLaplace

NEIGHBOURS: dict[Relation, str] = {
    "add-or-remove": "what the client contributes counts, or a zero update and no preference in its place",
    "replace-one": "everything that the client holds is exchanged for anything else",
}
UNPROTECTED = "whether a client takes part, in which rounds it abstains, and how long it takes to reply"


def laplace_claim(
    mechanism: LocalLaplace | PublishedLaplace,
    parameters: int,
    rounds: int,
    circumstances: Circumstances,
    max_leakage: float = 0.0,
    counts: int = 1,
) -> LocalClaim:
    """The claim about one client under `privacy.client = 'laplace'`.

    With a radius: pure differential privacy for everything that the client holds, p/ν a release and ε of a private
    choice where there are hypotheses, added up over rounds; and beside it d-privacy within the radius, where both add
    up too (Galli et al., 2023, Theorem 4.2). Without one nothing.

    Args:
        mechanism: of the client.
        parameters: p, of one model.
        rounds: in which a client took part at most.
        circumstances: of the run.
        max_leakage: that a client lets out over all rounds; 0: no limit.
        counts: how often a client without a ledger may have begun to count.
    """
    multiplier = mechanism.noise_multiplier
    claim = _claim("laplace", mechanism, circumstances, {"privacy.max-leakage": max_leakage})
    # The figure of one release is about the noise alone, with or without a guarantee.
    claim = replace(claim, leakage_of_a_release=parameters / multiplier if multiplier else None)
    if claim.reasons or not isinstance(mechanism, LocalLaplace):
        return claim
    maximum = rounds * parameters / multiplier + circumstances.epsilon_of_choices(rounds)
    leakage = min(maximum, counts * max_leakage) if max_leakage else maximum
    added, replaced = (
        _figure(relation, rounds, units_of(relation) * leakage, 0.0, "pure") for relation in get_args(Relation)
    )
    d_privacy = Figure(
        "neighbourhood",
        guarantee="d-privacy, Euclidean distance of models",
        adversary=EVERYBODY,
        scope=_scope(rounds),
        radius=mechanism.radius,
        leakage=leakage,
    )
    return replace(claim, figures=(added, replaced, d_privacy))


def gaussian_claim(mechanism: LocalGaussian, rounds: int, delta: float, circumstances: Circumstances) -> LocalClaim:
    """The claim about one client under `privacy.client = 'gaussian'`.

    Args:
        mechanism: of the client.
        rounds: in which a client took part at most.
        delta: at which ε is computed.
        circumstances: of the run; a private choice adds its ε to that of the releases.
    """
    claim = _claim("gaussian", mechanism, circumstances, {})
    if claim.reasons:
        return claim
    choices, figures = circumstances.epsilon_of_choices(rounds), []
    for relation in get_args(Relation):
        account = Account(relation=relation).plus(Gaussian(mechanism.noise_multiplier), rounds)
        epsilon, by = best_epsilon(account, delta)
        figures.append(_figure(relation, rounds, epsilon + units_of(relation) * choices, delta, by))
    return replace(claim, figures=tuple(figures))


def _claim(name: str, mechanism: LocalMechanism, circumstances: Circumstances, limits: dict[str, float]) -> LocalClaim:
    """Return the claim about a local mechanism without its figures."""
    return LocalClaim(
        mechanism=name,
        reasons=(*mechanism.caveats(), *circumstances.caveats()),
        parameters={**mechanism.parameters(), **limits, **circumstances.parameters()},
        unprotected=(UNPROTECTED,),
        seeded=circumstances.seeded,
        premises=(*mechanism.premises, *CARRIED),
        adversary=EVERYBODY,
    )


def _figure(relation: Relation, rounds: int, epsilon: float, delta: float, accountant: str) -> Figure:
    return Figure("client", relation, NEIGHBOURS[relation], EVERYBODY, _scope(rounds), epsilon, delta, accountant)


def _scope(rounds: int) -> str:
    return f"a client that took part in all {rounds} rounds"
