"""Claims about mechanisms on the clients: local noise, and DP-SGD.

A claim here does not need the server: the node bounds, noises and chooses by itself, and the server may have chosen
everything that it was sent. It needs the node to run its own code: the premise `bundle`.

**DP-SGD.** The method of the thesis on end-to-end privacy adds noise while clients train and claims it twice: for each
example, and again for each client, on whose whole update the noise of its k local steps lies. Its formulas are here to
reproduce its tables and to compare with; `docs/end-to-end.md` derives both sets and says what is wrong with the first.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from scipy import stats

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian, Pure
from cloister.privacy.accounting.vocabulary import MIN_MULTIPLIER, Relation, Sampling, units_of
from cloister.privacy.claims.claim import EVERYBODY, DpSgdClaim, Figure, LocalClaim, OfSize
from cloister.privacy.claims.premises import CARRIED
from cloister.privacy.dpsgd.local_steps import Holders, LocalDpSgd, LocalSteps
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


def gaussian_claim(mechanism: LocalGaussian, rounds: int, delta: float, circumstances: ReleaseContext) -> LocalClaim:
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


def _claim(name: str, mechanism: LocalMechanism, circumstances: ReleaseContext, limits: dict[str, float]) -> LocalClaim:
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


UNITS_ARE_NEIGHBOURS = {
    "example": "the gradients of one example count or not; how many examples a client has is public",
    "group": "the gradients of all examples of one group count or not; how many groups a client has is public",
}
AT_ALL_HOLDERS = "{}; it counts or not at all clients that hold data of it"
CLIENTS_ARE_NEIGHBOURS = "the gradients of all examples of one client count or not; its noise is added in both cases"
PUBLISHED_CLIENT_REASONS = (
    "the noise N(0, σ²S²) is on the sum of a batch, and the formula takes it for noise on the mean of a batch: it "
    "counts the batch size times too much of it",
)
PUBLISHED_EXAMPLE_REASONS = (
    "batches are parts of a shuffled order, and the formula takes them for Poisson draws",
    "it counts on the draw of clients, which the server knows, and which the steps of a round share",
)


@dataclass(frozen=True)
class Setting:
    """A federation of DP-SGD clients, as the published formulas see it.

    Attributes:
        noise_multiplier: σ.
        batch_size: B.
        examples: |P|, of each client.
        epochs: E, in each round.
        participation: C, the share of the clients that train in a round.
        rounds: T.
    """

    noise_multiplier: float
    batch_size: int
    examples: int
    epochs: int
    participation: float
    rounds: int

    @property
    def local_steps(self) -> float:
        """k = E·|P|/B."""
        return self.epochs * self.examples / self.batch_size


def published_example(setting: Setting) -> Account:
    """T·k Gaussians of multiplier σ, Poisson-sampled with q = C·B/|P|. Heuristic: `PUBLISHED_EXAMPLE_REASONS`."""
    rate = setting.participation * setting.batch_size / setting.examples
    event = Gaussian(setting.noise_multiplier, Sampling("poisson", rate))
    return Account().plus(event, round(setting.rounds * setting.local_steps))


def published_client(setting: Setting) -> Account:
    """T Gaussians of multiplier σ/√k, Poisson-sampled with q = C. Heuristic: `PUBLISHED_CLIENT_REASONS`."""
    multiplier = recovered_multiplier(setting.noise_multiplier, setting.local_steps)
    return Account().plus(Gaussian(multiplier, Sampling("poisson", setting.participation)), setting.rounds)


def recovered_multiplier(noise_multiplier: float, local_steps: float) -> float:
    """σ/√k, which the thesis claims for a client: noise of σS√k over a sensitivity of S·k.

    Args:
        noise_multiplier: σ.
        local_steps: k > 0.
    """
    check.positive(local_steps=local_steps)
    return noise_multiplier / math.sqrt(local_steps)


def client_multiplier(noise_multiplier: float, batch: int, local_steps: int) -> float:
    """σ/(b√k): what a client's own noise is worth for the client.

    Args:
        noise_multiplier: σ; the noise on the sum of a batch is N(0, σ²S²).
        batch: b, the most examples in a batch: together their clipped gradients move the sum by at most b·S.
        local_steps: k.

    Guarantee: k adaptive Gaussian mechanisms, each of multiplier σ/b, are together as hard to tell apart as one of
        multiplier σ/(b√k).
    """
    check.positive(batch=batch, local_steps=local_steps)
    return noise_multiplier / (batch * math.sqrt(local_steps))


def sound_unit(holders: Iterable[LocalSteps], noise_multiplier: float, rounds: int) -> Account:
    """Return what a unit loses to everybody else, at all clients that hold data of it together.

    Each client adds noise of its own, so that the releases of all of them compose as those of one client do.

    Args:
        holders: the steps in a round of each of these clients.
        noise_multiplier: σ.
        rounds: that each of them took part in.
    """
    account = Account()
    for steps, clients in Counter(holders).items():
        account = account.plus(steps.event(noise_multiplier), clients * rounds)
    return account


def sound_client(steps: LocalSteps, noise_multiplier: float, rounds: int, delta: float) -> tuple[float, float]:
    """ε at δ of a client that took part in so many rounds, against everybody, and the multiplier of a round.

    Half of δ is for the chance that some Poisson batch is larger than the size that is counted on: sizes do not depend
    on what the examples are, so that it is simply added.

    Args:
        steps: of a round.
        noise_multiplier: σ.
        rounds: how many.
        delta: at which ε is computed.
    """
    if steps.sampling == "shuffle" or steps.rate == 1:
        batch, rest = min(steps.batch_size, steps.examples), delta
    else:  # no batch of any round is larger than this one, except with a probability of half of δ
        tail = delta / 2 / max(1, rounds * steps.count)
        batch, rest = int(stats.binom.isf(tail, steps.examples, steps.rate)), delta / 2
    multiplier = client_multiplier(noise_multiplier, batch, steps.count)
    if rounds == 0:
        return 0.0, multiplier
    if multiplier < MIN_MULTIPLIER:
        return math.inf, multiplier
    return Account().plus(Gaussian(multiplier), rounds).epsilon(rest, "pld"), multiplier


def standing_for_all(
    sizes: Iterable[LocalSteps],
    mechanism: LocalDpSgd,
    rounds: int,
    delta: float,
    shared: Collection[Holders] = (),
) -> tuple[LocalSteps, ...]:
    """Return the private steps of the smallest, the middle, the largest, and the costliest of many clients.

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
    sizes: Sequence[LocalSteps],
    mechanism: LocalDpSgd,
    rounds: int,
    delta: float,
    shared: Collection[Holders] = (),
) -> LocalSteps:
    """The steps whose units a run costs most.

    Args: as `standing_for_all`.
    """

    def epsilon(steps: LocalSteps) -> float:
        holders = _holders(steps, shared, mechanism, rounds, delta)
        return sound_unit(holders, mechanism.noise_multiplier, rounds).epsilon(delta)

    return max(sizes, key=epsilon)


def _holders(
    steps: LocalSteps, shared: Collection[Holders], mechanism: LocalDpSgd, rounds: int, delta: float
) -> Holders:
    """Return who holds the unit, of those of a client with these steps, that a run costs most."""
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
) -> DpSgdClaim:
    """Return the claim about the data of clients of a run with `privacy.client = "dp-sgd"`.

    Args:
        mechanism: of the run.
        sizes: the steps in a round of clients of several sizes.
        rounds: that a client trained in; more can only cost more.
        delta: at which ε is computed.
        circumstances: of the run; each private choice is one more release about a unit.
        shared: who holds a unit of which several clients have data, for each such combination; None: it is not known.

    Returns:
        Figures for each size: sound ones, none where nothing is; and `heuristic` ones that are not guarantees, each
        with its reasons.
    """
    claim = DpSgdClaim(
        mechanism="dp-sgd",
        reasons=(*mechanism.caveats(), *circumstances.caveats()),
        unit=mechanism.unit,
        parameters=dict(mechanism.parameters()),
        unprotected=(UNPROTECTED,),
        seeded=circumstances.seeded,
        premises=(*mechanism.premises, *CARRIED),
    )
    of_sizes = []
    for steps in sizes:
        holders = _holders(steps, shared or (), mechanism, rounds, delta)
        figures = () if claim.reasons else _sound_figures(mechanism, steps, holders, rounds, delta, circumstances)
        if shared is not None:
            most = max(map(len, shared), default=1)
            figures = tuple(replace(each, holders=most) if each.unit == claim.unit else each for each in figures)
        sigma = mechanism.noise_multiplier
        heuristic = (_published_figure(steps, sigma, rounds, delta),) if sigma else ()
        of_sizes.append(OfSize(steps.examples, rounds, figures, heuristic))
    return replace(claim, sizes=tuple(of_sizes))


def _sound_figures(
    mechanism: LocalDpSgd,
    steps: LocalSteps,
    holders: Holders,
    rounds: int,
    delta: float,
    circumstances: ReleaseContext,
) -> tuple[Figure, ...]:
    """For one unit, at all clients that hold data of it, and for the client as a whole."""
    sigma, account = mechanism.noise_multiplier, sound_unit(holders, mechanism.noise_multiplier, rounds)
    if circumstances.chooses_privately:
        account = account.plus(Pure(circumstances.choice_epsilon), len(holders) * rounds)
    neighbours = UNITS_ARE_NEIGHBOURS[mechanism.unit]
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
    # What a choice tells of one unit, it tells of each of a client's.
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
    """The thesis' figure for a client, without the amplification that it takes from the draw of clients."""
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
