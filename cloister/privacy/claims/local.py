"""What may be said about clients that noise their own updates: as `privacy.json` holds it, and in words.

A claim here does not need the server: the node bounds, noises and chooses by itself, and the server may have chosen
everything that it was sent. It needs the node to run its own code.
"""

from collections.abc import Iterator
from typing import Any

from cloister.config.privacy import PrivacyConfig
from cloister.config.variants import GaussianPrivacy, LaplacePrivacy
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian, Relation
from cloister.privacy.accounting.leakage import EVERYBODY
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism, PublishedLaplace

AGAINST = f"{EVERYBODY}, as long as the client's node runs its own code (a pinned bundle)"
NEIGHBOURS: dict[Relation, str] = {
    "add-or-remove": "what the client contributes counts, or a zero update and no preference in its place",
    "replace-one": "everything that the client holds is exchanged for anything else",
}
UNPROTECTED = "whether a client takes part, in which rounds it abstains, and how long it takes to reply"
LARGE = 20.0
"""Above this ε a guarantee holds and promises next to nothing."""


def mechanism_of(privacy: PrivacyConfig) -> LocalMechanism | None:
    """What `privacy.client` does to an update before it leaves; None where it does nothing to it.

    Raises:
        ConfigError, PrivacyError: a number is out of range.
    """
    client = privacy.client
    if isinstance(client, GaussianPrivacy):
        return LocalGaussian(client.clipping_norm, client.noise_multiplier)
    if not isinstance(client, LaplacePrivacy):
        return None
    if not client.radius:
        return PublishedLaplace(client.noise_multiplier, client.per_layer)
    return LocalLaplace(client.radius, client.noise_multiplier, client.per_layer)


def laplace_statement(privacy: PrivacyConfig, parameters: int, rounds: int, hypotheses: int = 1) -> dict[str, Any]:
    """The claims about one client under `privacy.client = 'laplace'`, for `privacy.json`.

    With a radius: pure differential privacy for everything that the client holds, p/ν a release and ε of a private
    choice where there are hypotheses, added up over rounds; and beside it d-privacy within the radius, where releases
    add up too (Galli et al., 2023, Theorem 4.2). Without one nothing.

    Args:
        privacy: of the run, with `client = 'laplace'`.
        parameters: p, of one model.
        rounds: in which a client took part at most.
        hypotheses: k that a client chooses among.
    """
    multiplier = privacy.client.noise_multiplier
    facts = _facts(privacy, hypotheses)
    # What is stated per release is a figure about the noise, whatever it is worth.
    facts["leakage-of-a-release"] = parameters / multiplier if multiplier else None
    if not facts["reasons"]:
        most = rounds * parameters / multiplier
        leakage = min(most, privacy.client.max_leakage) if privacy.client.max_leakage else most
        pure = leakage + _choices(privacy, rounds, hypotheses)
        facts["claims"] = [
            _claim("add-or-remove", rounds, pure, 0.0, "pure"),
            _claim("replace-one", rounds, 2 * pure, 0.0, "pure"),
            {
                "guarantee": "d-privacy, Euclidean distance of models",
                "unit": "neighbourhood",
                "adversary": AGAINST,
                "radius": privacy.client.bound,
                "scope": _scope(rounds),
                "leakage": leakage,
            },
        ]
    return facts


def gaussian_statement(privacy: PrivacyConfig, rounds: int, hypotheses: int = 1) -> dict[str, Any]:
    """The claims about one client under `privacy.client = 'gaussian'`, at `privacy.target-delta`.

    Args:
        privacy: of the run, with `client = 'gaussian'`.
        rounds: in which a client took part at most.
        hypotheses: k that a client chooses among; a private choice adds its ε to that of the releases.
    """
    facts = _facts(privacy, hypotheses)
    if not facts["reasons"]:
        event = Gaussian(privacy.client.noise_multiplier)
        choices = _choices(privacy, rounds, hypotheses)
        relations: tuple[tuple[Relation, int], ...] = (("add-or-remove", 1), ("replace-one", 2))
        for relation, units in relations:
            epsilon, by = best_epsilon(Account(relation=relation).plus(event, rounds), privacy.target_delta)
            facts["claims"].append(_claim(relation, rounds, epsilon + units * choices, privacy.target_delta, by))
    return facts


def _facts(privacy: PrivacyConfig, hypotheses: int) -> dict[str, Any]:
    """What every statement about a local mechanism holds, without its claims."""
    mechanism = mechanism_of(privacy)
    assert mechanism is not None, "there is no statement without a mechanism"
    reasons = [*mechanism.caveats(), *_caveats(privacy, hypotheses)]
    parameters: dict[str, Any] = mechanism.parameters()
    if isinstance(privacy.client, LaplacePrivacy):
        parameters["privacy.max-leakage"] = privacy.client.max_leakage
    if hypotheses > 1:
        parameters |= {"privacy.choice": privacy.choice, "privacy.choice-epsilon": privacy.choice_epsilon}
    return {
        "mechanism": privacy.client.name,
        "status": "heuristic" if reasons else "sound",
        "reasons": reasons,
        "parameters": parameters,
        "unit": "client",
        "adversary": AGAINST,
        "claims": [],
        "unprotected": [UNPROTECTED],
    }


def _caveats(privacy: PrivacyConfig, hypotheses: int) -> Iterator[str]:
    if privacy.noise_seed != -1:
        yield "the noise is seeded: whoever knows privacy.noise-seed can remove it"
    if hypotheses > 1 and privacy.choice == "exact":
        yield "privacy.choice is 'exact': each client chooses among hypotheses by its own examples, without noise"


def _choices(privacy: PrivacyConfig, rounds: int, hypotheses: int) -> float:
    """ε of all private choices of a client."""
    return rounds * privacy.choice_epsilon if hypotheses > 1 else 0.0


def _claim(relation: Relation, rounds: int, epsilon: float, delta: float, accountant: str) -> dict[str, Any]:
    return {
        "unit": "client",
        "relation": relation,
        "neighbours": NEIGHBOURS[relation],
        "adversary": AGAINST,
        "scope": _scope(rounds),
        "epsilon": epsilon,
        "delta": delta,
        "accountant": accountant,
    }


def _scope(rounds: int) -> str:
    return f"a client that took part in all {rounds} rounds"


def render_local(facts: dict[str, Any]) -> list[str]:
    """A statement as lines of plain text."""
    lines = [f"clients: {facts['mechanism']}, {facts['status']}"]
    lines += [f"  not a guarantee: {reason}" for reason in facts["reasons"]]
    if facts.get("leakage-of-a-release") is not None:
        lines.append(f"  one release leaks {facts['leakage-of-a-release']:.4g} within its neighbourhood")
    lines += [f"  {_render_claim(claim)}: against {claim['adversary']}" for claim in facts["claims"]]
    return lines + [f"  leaves without noise: {item}" for item in facts["unprotected"]]


def _render_claim(claim: dict[str, Any]) -> str:
    if "leakage" in claim:
        return f"leakage of at most {claim['leakage']:.4g} within distance {claim['radius']:.4g}, {claim['scope']}"
    at = f" at δ = {claim['delta']:g}" if claim["delta"] else ", pure"
    worth = ", which promises next to nothing" if not claim["epsilon"] <= LARGE else ""
    return f"ε = {claim['epsilon']:.4g}{at} for everything a client holds, {claim['relation']}, {claim['scope']}{worth}"
