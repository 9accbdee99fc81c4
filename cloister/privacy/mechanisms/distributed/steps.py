"""Step of DP-SGD under secure aggregation: each client sums clipped gradients, and adds its share of one noise.

    draw units ─▶ clip each to S ─▶ sum ─▶ whole steps ─▶ + share of the noise ─▶ (secure sum) ─▶ descend

A round is one step of central DP-SGD on the data of all clients, without a party that sees it.

**Sensitivity.** Let one unit of one client count or not. Without rounding, its clipped gradient moves the sum v of this
client by at most S, for each fixed choice of the other units' places and random numbers (`dpsgd.clipped_sums`; for
NumPy `dpsgd.noise`). The client sends integers k = rint(v·w), with w·S + √p + 1 = D. The integers of both
neighbours are rounded, so k moves by at most w·S + √p + 1 = D in L2 (`dpsgd.noise`, "Rounding to integers"). Then each
number is held within ±m·D. That moves two numbers no further apart. All other clients' integers stay the same.

**Noise.** A sum is over a whole list of u ≥ t members, which is fixed before its noise is made
(`secure_aggregation.epoch`). So each makes a share of variance ((σ·D)² + 25)/(u - c), rounded up: u - c honest shares
have (σ·D)² + 25 or more, for every u. The share of the protected client is among them, in both neighbours. The law of
these shares' sum is within 2^-700 of a discrete Gaussian's (`accounting.distributed`). A discrete Gaussian of variance
(σ·D)² + 25 is a continuous one of variance (σ·D)², rounded at random, within the same distance. This rounding commutes
with shifts by integers. So the sum is post-processing of the sum with continuous noise of multiplier σ.

**Sampling.** Let B be the other units that were drawn, and ω places and random numbers. Given B and ω, let a be the
sum's integers without the unit. With it they are a + g, ‖g‖ ≤ D, if it is drawn, which has probability q. So the
released sum is R(N(a)) without the unit, and (1 - q)·R(N(a)) + q·R(N(a + g)) with it: the pair of a Poisson-sampled
Gaussian mechanism, after the random rounding R. B and ω have the same law in both worlds, and the hockey-stick
divergence is jointly convex. So the mixture is no worse (`clipped_sums`, Proof). The server sees who takes part, and so
do all members. That weakens nothing: a client draws its units by its own secret numbers, after it agreed to take part.
It replies to an empty draw and to a failure alike, and sends no count. The time of a reply can follow the number of
drawn units, so it is a premise of the claim; `min-reply-seconds` covers it.
A draw that fills all places has no claim; its probability is part of δ (`vocabulary.OVERFLOW`).

| edge case | result |
|---|---|
| no unit is drawn, or training fails | the client's integers are 0, with its share of the noise |
| fewer units than the public size | the others do not exist; rate and places stay |
| more units than the public size | as many as it says take part, chosen at random |
| no noise | σ = 0: the sum is exact to half a step for each client and number; nothing is claimed |
| several clients hold data of one unit | `dpsgd.local_steps.multiplier_of_each` |

Source: Kairouz, Liu, Steinke (2021), arXiv:2102.06387; Abadi et al. (2016), arXiv:1607.00133, Algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cloister.privacy.accounting.events import Event, Unaccounted
from cloister.privacy.accounting.vocabulary import UNSAMPLED, Sampling
from cloister.privacy.claims.premises import (
    BUNDLE,
    COLLUSION,
    CRYPTOGRAPHY,
    KERNELS,
    KEY_AGREEMENT,
    KEYS,
    ROSTER,
    TIME,
)
from cloister.privacy.dpsgd.batches import places_of
from cloister.privacy.dpsgd.local_steps import MAX_BATCH, LocalDpSgd, OneStep
from cloister.privacy.dpsgd.noise import rounding_steps
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.shared import SharedRelease, SharedSum
from cloister.privacy.mechanisms.distributed.shares import Parties
from cloister.privacy.mechanisms.mechanism import Contributions, Parameter, Released
from cloister.utils.arrays import Layout, Row
from cloister.utils.errors import PrivacyError

RING = 64
"""Bits of the ring: 100 clients with 2^17 units of 2^26 steps each, and their noise, stay below 2^51."""
SAMPLING_RATE = "privacy.dp-sgd-sampling-rate"
"""Key of q in a configuration, and in the parameters of a claim."""
SMALLEST_RATE = 2.0**-40
"""Least q: a draw compares 64 random bits with it."""
NOT_OF_CLIENTS = "the noise of a step is for an example or a group, and for no whole client"


@dataclass(frozen=True, kw_only=True)
class SharedDpSgd(LocalDpSgd):
    """DP-SGD whose step is one secure sum of all clients, with noise of deviation σ·S on it.

    Args:
        sampling_rate: q, with which every client draws each of its units.
        parties: the largest cohort, the threshold of survivors, and the number of clients that may collude.

    Guarantee: for any list, a round costs one unit of one client at most the event of `local_steps.OneStep` with
        `multiplier`. That holds against the server together with as many clients as may collude, and recipients; if
        none may collude, against no client. It depends on a sum over a list of u members that holds at
        least u - c honest inputs, which the protocol has to ensure. The module has the proof.
    """

    sampling_rate: float
    parties: Parties

    premises = (BUNDLE, ROSTER, KEYS, CRYPTOGRAPHY, KEY_AGREEMENT, COLLUSION, KERNELS, TIME)

    def plan(self, parameters: int, server_round: int, members: int = 0) -> Plan:
        """Return the plan of a round, the same for all parties. C of the plan is D steps: S and the rounding.

        Args:
            parameters: p, numbers of the model.
            server_round: sets S.
            members: u, length of the list; 0: the largest, for what is the same for all.

        Raises:
            PrivacyError: the list is too short or too long, its noise is beyond the range of exact noise, or the model
                is too large for the grid.
        """
        members = members or self.parties.members
        if members not in self.parties.survivors():
            raise PrivacyError(
                f"a list must have {self.parties.threshold} to {self.parties.members} members, found {members}"
            )
        self._of_list(self.parties.threshold, parameters)  # it has the largest shares
        plan = self._of_list(members, parameters)
        left = plan.steps - rounding_steps(parameters)
        return plan.at(self.clipping_norm_in(server_round) * (plan.steps / left))

    def multiplier(self, parameters: int, by_provisioner: int = 0) -> float:
        """Return the noise multiplier of the sum, as it is charged.

        Args:
            parameters: p.
            by_provisioner: members of the roster whose keys the provisioner made; they count as colluding. If they are
                more than may collude, one share of the noise counts.

        Raises:
            PrivacyError: as `plan`.
        """
        if by_provisioner <= self.parties.colluding:
            return self.noise_multiplier
        event = self._of_list(self.parties.members, parameters).event(single=True)
        return min(self.noise_multiplier, event.multiplier("add-or-remove", insiders=True) or 0.0)

    def parameters(self) -> dict[str, float | str]:
        """Return the parameters, by configuration key."""
        return {**super().parameters(), SAMPLING_RATE: self.sampling_rate, **self.parties.parameters()}

    def _of_list(self, members: int, parameters: int) -> Plan:
        """Return the plan for a list of this length, of which all members send a vector."""
        return _planned(self.noise_multiplier, replace(self.parties, members=members, threshold=members), parameters)

    def sizes_shown(self, batch_size: int) -> tuple[int, ...]:
        """Return one size: a step costs clients of all sizes the same."""
        return (batch_size,)


def encode_clipped_sum(sums: Row, plan: Plan) -> NDArray[np.int64]:
    """Return a client's clipped sum in whole steps of the grid, without noise.

    Args:
        sums: flat arrays of float32 or float64, p numbers in all.
        plan: of the round.

    Returns:
        Shape (p,), each number within ±m·D.

    Raises:
        PrivacyError: the number of numbers is not p.

    Guarantee: if one unit moves the sums by at most S, it moves the integers by at most D in L2. The module has the
        proof.
    """
    flat = np.concatenate(sums, axis=None, dtype=np.float64)
    if flat.size != plan.parameters:
        raise PrivacyError(f"noise in shares is planned for a sum of {plan.parameters} numbers, found {flat.size}")
    flat *= 1 / (plan.bound / plan.steps)
    most = float(plan.units * plan.steps)
    np.clip(np.rint(flat, out=flat), -most, most, out=flat)
    flat[np.isnan(flat)] = 0
    return flat.astype(np.int64)


@dataclass(frozen=True)
class DistributedStep(SharedRelease):
    """Release of a round of `SharedDpSgd`: the model after one step, for the strategy around it.

    Args:
        dp_sgd: as clients compute it.
        rate: returns the learning rate of a round, which the server alone uses; by default it is 1.
    """

    dp_sgd: SharedDpSgd
    rate: Callable[[int], float] = lambda _: 1.0

    name = "dp-sgd"
    premises = SharedDpSgd.premises
    seen = "the sum of the clients' gradients"

    def plan(self, parameters: int, server_round: int = 1) -> Plan:
        """Return `SharedDpSgd.plan`."""
        return self.dp_sgd.plan(parameters, server_round)

    def bound_in(self, server_round: int) -> float:
        """Return S of a round."""
        return self.dp_sgd.clipping_norm_in(server_round)

    def encode(self, made: Row, sent: Row, layout: Layout, plan: Plan) -> NDArray[np.int64]:
        """Return `encode_clipped_sum` of the client's clipped sum."""
        return encode_clipped_sum(made, plan)

    def events(self, layout: Layout, sampling: Sampling = UNSAMPLED, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return one release without a bound for a whole client."""
        return (Unaccounted(NOT_OF_CLIENTS),)

    def unit_events(self, layout: Layout, by_provisioner: int = 0) -> tuple[Event, ...]:
        """Return the step of central DP-SGD with the noise that counts; see `SharedRelease.unit_events`."""
        if caveats := "; ".join(self.dp_sgd.caveats()):
            return (Unaccounted(caveats),)
        multiplier = self.dp_sgd.multiplier(layout.size, by_provisioner)
        return (OneStep.of(1, self.dp_sgd.sampling_rate).event(multiplier),)

    def release(self, contributions: Contributions) -> Released:
        """Raise PrivacyError: the server has no single sums.

        Args:
            contributions: of the round.
        """
        raise PrivacyError("under secure aggregation clients add the noise; there is nothing to noise here")

    def released(self, summed: SharedSum, sent: Row, layout: Layout, server_round: int) -> Released:
        """Return the model sent minus rate·sum/(q·N); see `SharedRelease.released`."""
        if not summed.units:
            raise PrivacyError(
                f"the {summed.survivors} survivors of round {server_round} attest no public size, and a step has no "
                "divisor without; state public-size at every site"
            )
        plan = self.dp_sgd.plan(layout.size, server_round)
        factor = self.rate(server_round) / (self.dp_sgd.sampling_rate * summed.units)
        step = factor * plan.bound / plan.steps
        pieces = (summed.total[start:end] for start, end in pairwise(layout.offsets))
        model = tuple((base - piece * step).astype(base.dtype) for base, piece in zip(sent, pieces, strict=True))
        bound = self.dp_sgd.clipping_norm_in(server_round)
        multiplier = self.dp_sgd.noise_multiplier
        return Released(
            (model,), factor * bound * multiplier, factor * bound, noise_multiplier=multiplier, clipping_norm=bound
        )

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters, by configuration key."""
        return dict(self.dp_sgd.parameters())


@lru_cache(maxsize=64)
def _planned(multiplier: float, parties: Parties, parameters: int) -> Plan:
    """Return the plan for S = 1, after its event: that refuses shares whose sum is no discrete Gaussian."""
    plan = Plan.of(1.0, multiplier, parties, parameters, bits=RING, units=places_of(MAX_BATCH))
    plan.event()
    return plan
