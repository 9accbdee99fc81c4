"""Claims about mechanisms on the clients: local noise, and DP-SGD.

These claims do not rely on the server, which may choose everything that it sends to the node. The node bounds, noises
and chooses by itself. They need the node to run its own code: the premise `bundle`.

**DP-SGD.** The method of the thesis on end-to-end privacy adds noise while clients train. It claims this noise twice:
for an example, and for a client, whose update has the noise of k local steps. Its formulas are here to reproduce its
tables. `docs/end-to-end.md` derives the published and the sound formulas, and says what is wrong with the first.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import get_args

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER, Relation, units_of
from cloister.privacy.claims.claim import EVERYBODY, DpSgdClaim, Figure, LocalClaim, OfSize
from cloister.privacy.claims.premises import CARRIED, KEYS, known_by
from cloister.privacy.claims.server import adversary_of
from cloister.privacy.dpsgd.local_steps import Holders, LocalDpSgd, LocalSteps, OneStep, multiplier_of_each
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism, PublishedLaplace
from cloister.privacy.mechanisms.selection import ReleaseContext
from cloister.utils import check

NEIGHBOURS: dict[Relation, str] = {
    "add-or-remove": "what the client contributes counts, or a zero update and no preference in its place",
    "replace-one": "everything that the client holds is exchanged for anything else",
}
UNPROTECTED = "whether a client takes part, in which rounds it abstains, and how long it takes to reply"


def laplace_claim(
    mechanism: LocalLaplace | PublishedLaplace,
    parameters: int,
    rounds: int,
    circumstances: ReleaseContext,
    max_leakage: float = 0.0,
    counts: int = 1,
) -> LocalClaim:
    """Return the claim about one client under `privacy.client = 'laplace'`.

    With a radius, the claim is pure differential privacy for everything that the client holds. A release costs p/ν, and
    a private choice its ε. Costs add up over rounds. d-privacy within the radius is claimed beside it, and adds up
    alike (Galli et al., 2023, Theorem 4.2). Without a radius, the claim has no figures.

    Args:
        mechanism: of the client.
        parameters: p, of one model.
        rounds: the most rounds in which a client took part.
        circumstances: of the run.
        max_leakage: limit on a client's leakage over all rounds; 0 for none.
        counts: how often a client without a ledger may have restarted its count at zero.
    """
    multiplier = mechanism.noise_multiplier
    claim = _claim("laplace", mechanism, circumstances, {"privacy.max-leakage": max_leakage})
    # One release's leakage follows from the noise alone. So the claim has it even without a guarantee.
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


def gaussian_claim(mechanism: LocalGaussian, rounds: int, delta: float, circumstances: ReleaseContext) -> LocalClaim:
    """Return the claim about one client under `privacy.client = 'gaussian'`.

    Args:
        mechanism: of the client.
        rounds: the most rounds in which a client took part.
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


def _claim(name: str, mechanism: LocalMechanism, circumstances: ReleaseContext, limits: dict[str, float]) -> LocalClaim:
    """Return a claim about a local mechanism, without figures."""
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
    return f"a client that took part in all {rounds} rounds of this run"


UNITS_ARE_NEIGHBOURS = {
    "example": "the gradients of one {0} count or not; how many {0}s a client has is public",
    "group": "the gradients of all examples of one {0} count or not; how many {0}s a client has is public",
}
AT_ALL_HOLDERS = "{}; all clients that hold data of it count it, or none does"
CLIENTS_ARE_NEIGHBOURS = "the gradients of all examples of one client count or not; its noise is added in both cases"
PUBLISHED_CLIENT_REASONS = (
    "the noise N(0, σ²S²) is on the sum of a batch, and the formula takes it for noise on the mean of a batch: it "
    "counts the batch size times too much of it",
)


def recovered_multiplier(noise_multiplier: float, local_steps: float) -> float:
    """Return σ/√k, the multiplier that the thesis claims for a client.

    It divides noise of σS√k by a sensitivity of S·k.

    Args:
        noise_multiplier: σ.
        local_steps: k > 0.
    """
    check.positive(local_steps=local_steps)
    return noise_multiplier / math.sqrt(local_steps)


def client_multiplier(noise_multiplier: float, batch: int, local_steps: int) -> float:
    """Return σ/(b√k), the multiplier at which a client's own noise hides the whole client.

    Args:
        noise_multiplier: σ; the noise on the sum of a batch is N(0, σ²S²).
        batch: b, the most examples in a batch. Their clipped gradients move the sum by at most b·S.
        local_steps: k.

    Guarantee: composed adaptively, k Gaussian mechanisms of multiplier σ/b cost as much as one of multiplier σ/(b√k).
    """
    check.positive(batch=batch, local_steps=local_steps)
    return noise_multiplier / (batch * math.sqrt(local_steps))


def sound_unit(holders: Iterable[LocalSteps], noise_multiplier: float, rounds: int) -> Account:
    """Account for the loss of one unit over all clients that hold its data.

    Noise of several clients is independent, or split into independent parts (`multiplier_of_each`). So their releases
    compose like releases of one.

    Args:
        holders: the steps in a round of each of these clients.
        noise_multiplier: σ.
        rounds: that each of them took part in.
    """
    account, every = Account(), tuple(holders)
    multiplier = multiplier_of_each(every, noise_multiplier)
    for steps, clients in Counter(every).items():
        account = account.plus(steps.event(multiplier), clients * rounds)
    return account


def sound_client(steps: LocalSteps, noise_multiplier: float, rounds: int, delta: float) -> tuple[float, float]:
    """Return ε at δ of a whole client against all other parties, and the multiplier of a round.

    Half of δ covers the chance of a Poisson batch larger than assumed. Batch sizes do not depend on the examples. So
    this chance adds to δ.

    Args:
        steps: of a round.
        noise_multiplier: σ.
        rounds: how many.
        delta: at which ε is computed.
    """
    if steps.sampling == "shuffle" or steps.rate == 1:
        batch, rest = min(steps.batch_size, steps.examples), delta
    else:  # with probability at least 1 - δ/2, no batch of any round exceeds this size
        from scipy import stats  # takes a second, which most commands can do without

        tail = delta / 2 / max(1, rounds * steps.count)
        batch, rest = int(stats.binom.isf(tail, steps.examples, steps.rate)), delta / 2
    multiplier = client_multiplier(noise_multiplier, batch, steps.count)
    if rounds == 0:
        return 0.0, multiplier
    if multiplier < MIN_MULTIPLIER:
        return math.inf, multiplier
    return Account().plus(Gaussian(multiplier), rounds).epsilon(rest, "pld"), multiplier


def standing_for_all(
    sizes: Iterable[LocalSteps], mechanism: LocalDpSgd, rounds: int, delta: float, shared: Collection[Holders] = ()
) -> tuple[LocalSteps, ...]:
    """Return the steps of four clients that stand for all: the smallest, middle, largest and costliest.

    Args:
        sizes: the steps in a round of each client; at least one.
        mechanism: of the run.
        rounds: that all of them train in.
        delta: at which ε is computed.
        shared: as in `dp_sgd_claim`.
    """
    ordered = sorted(set(sizes), key=lambda steps: steps.examples)
    costliest = costliest_of(ordered, mechanism, rounds, delta, shared)
    chosen = {ordered[0], ordered[len(ordered) // 2], ordered[-1], costliest}
    return tuple(steps for steps in ordered if steps in chosen)


def costliest_of(
    sizes: Sequence[LocalSteps], mechanism: LocalDpSgd, rounds: int, delta: float, shared: Collection[Holders] = ()
) -> LocalSteps:
    """Return the steps of the clients whose units lose most in a run.

    Args: as `standing_for_all`.
    """

    def epsilon(steps: LocalSteps) -> float:
        holders = _holders(steps, shared, mechanism, rounds, delta)
        return sound_unit(holders, mechanism.noise_multiplier, rounds).epsilon(delta)

    return max(sizes, key=epsilon)


def _holders(
    steps: LocalSteps, shared: Collection[Holders], mechanism: LocalDpSgd, rounds: int, delta: float
) -> Holders:
    """Return the holders of the costliest unit of a client with these steps."""
    sigma = mechanism.noise_multiplier
    found = [(steps,), *(holders for holders in shared if steps in holders)]
    return max(found, key=lambda holders: sound_unit(holders, sigma, rounds).epsilon(delta)) if found[1:] else found[0]


def dp_sgd_claim(
    mechanism: LocalDpSgd,
    sizes: Sequence[LocalSteps],
    rounds: int,
    delta: float,
    circumstances: ReleaseContext,
    shared: Collection[Holders] | None = None,
    by_provisioner: tuple[str, ...] | None = None,
) -> DpSgdClaim:
    """Return the claim about the data of clients of a run with `privacy.client = "dp-sgd"`.

    Args:
        mechanism: of the run.
        sizes: the steps in a round of clients of several sizes.
        rounds: in which a client trained. An upper bound is safe.
        delta: at which ε is computed.
        circumstances: of the run; each private choice is one more release about a unit.
        shared: each combination of clients that hold data of one unit. None: the combinations are unknown.
        by_provisioner: members whose keys the provisioner made, if noise is in shares; None: they are not known.

    Returns:
        Figures for each size. Sound ones are absent if the claim has reasons against them. A `heuristic` figure is no
        guarantee, and has its reasons.
    """
    claim = DpSgdClaim(
        mechanism="dp-sgd",
        reasons=(*mechanism.caveats(), *circumstances.caveats()),
        unit=mechanism.unit,
        parameters=dict(mechanism.parameters()),
        unprotected=(UNPROTECTED,),
        seeded=circumstances.seeded,
        premises=(*mechanism.premises, *CARRIED),
        by_provisioner=by_provisioner,
    )
    if by_provisioner is not None:  # the roster states who made each key
        claim = replace(claim, premises=known_by(claim.premises, [KEYS.known_as("attested")]))
    adversary = adversary_of(claim) if claim.is_against_server else EVERYBODY
    of_sizes = []
    for steps in sizes:
        holders = _holders(steps, shared or (), mechanism, rounds, delta)
        figures = () if claim.reasons else _sound_figures(mechanism, steps, holders, rounds, delta, circumstances)
        figures = tuple(replace(each, adversary=adversary) for each in figures)
        if shared is not None:
            most = max(map(len, shared), default=1)
            figures = tuple(replace(each, holders=most) if each.unit == claim.unit else each for each in figures)
        sigma = mechanism.noise_multiplier
        of_client_alone = sigma and not isinstance(steps, OneStep)
        heuristic = (_published_figure(steps, sigma, rounds, delta),) if of_client_alone else ()
        of_sizes.append(OfSize(steps.examples, rounds, figures, heuristic))
    return replace(claim, sizes=tuple(of_sizes))


def _sound_figures(
    mechanism: LocalDpSgd, steps: LocalSteps, holders: Holders, rounds: int, delta: float, circumstances: ReleaseContext
) -> tuple[Figure, ...]:
    """Return the sound figures: for one unit over all its holders, and for the whole client."""
    sigma, account = mechanism.noise_multiplier, sound_unit(holders, mechanism.noise_multiplier, rounds)
    if circumstances.chooses_privately:
        account = account.plus(Pure(circumstances.choice_epsilon), len(holders) * rounds)
    neighbours = UNITS_ARE_NEIGHBOURS[mechanism.unit].format(mechanism.word)
    rates = ", ".join(dict.fromkeys(f"{each.rate:.4g}" for each in holders))
    unit = Figure(
        mechanism.unit,
        "add-or-remove",
        AT_ALL_HOLDERS.format(neighbours) if holders[1:] else neighbours,
        EVERYBODY,
        noise_multiplier=sigma,
        steps=rounds * sum(each.count for each in holders),
        sampling=f"poisson, {rates}" if steps.sampling == "poisson" else "shuffle, no amplification claimed",
    )
    epsilon, multiplier = sound_client(steps, sigma, rounds, delta)
    # A choice costs ε for each unit of a client. So for the whole client these costs add up.
    choices = rounds * steps.examples * circumstances.choice_epsilon if circumstances.chooses_privately else 0.0
    client = Figure(
        "client",
        "add-or-remove",
        CLIENTS_ARE_NEIGHBOURS,
        EVERYBODY,
        epsilon=epsilon + choices,
        delta=delta,
        accountant="pld",
        noise_multiplier=multiplier,
        releases=rounds,
    )
    return unit.counted(account, delta), client


def _published_figure(steps: LocalSteps, sigma: float, rounds: int, delta: float) -> Figure:
    """Return the thesis' figure for a client, without its amplification by the draw of clients."""
    multiplier = recovered_multiplier(sigma, steps.epochs * steps.examples / steps.batch_size)
    return Figure(
        "client",
        status="heuristic",
        reasons=PUBLISHED_CLIENT_REASONS,
        formula="σ/√k",
        epsilon=Account().plus(Gaussian(multiplier), rounds).epsilon(delta, "published"),
        delta=delta,
        accountant="published",
        noise_multiplier=multiplier,
        releases=rounds,
    )
