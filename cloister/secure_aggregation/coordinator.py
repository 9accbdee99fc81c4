"""Server side of the protocol: relay messages, add masked inputs, and remove the masks from the sum."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cloister.secure_aggregation.messages import (
    Advertisement,
    Cohort,
    Delivery,
    MaskedInput,
    SealedShares,
    Signatures,
    Survivors,
    SurvivorSignature,
    Unmasking,
)
from cloister.secure_aggregation.primitives import add_masks, can_agree, combine, pair_key, private_key, public_key
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.session import Steps, Terms
from cloister.utils.errors import ProtocolError, RoundAbandoned


@dataclass(frozen=True)
class Total:
    """Result of an attempt on the server.

    Args:
        values: (p,) in the ring, the sum of the survivors' vectors.
        survivors: their names.
        revealed: survivor -> the link of its chain of seeds. A survivor that dropped out in the last step is missing:
            its surplus noise stays in the sum.
    """

    values: NDArray
    survivors: tuple[str, ...]
    revealed: Mapping[str, bytes]


@dataclass(frozen=True)
class _Advertising:
    """State: the server collects keys."""


@dataclass(frozen=True)
class _Sharing:
    """State: the server collects shares."""

    cohort: Cohort


@dataclass
class _Collecting:
    """State: the server adds masked inputs, and drops each."""

    cohort: Cohort
    binding: bytes
    sharers: frozenset[str]
    total: NDArray
    arrived: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class _Signing:
    """State: the server collects signatures."""

    collected: _Collecting
    survivors: Survivors


@dataclass(frozen=True)
class _Unmasking:
    """State: the server collects revealed shares."""

    collected: _Collecting
    survivors: Survivors


class Coordinator:
    """Server side of one attempt at one round, for the members that answer in time.

    Each step runs once, in the order of the methods; `add` runs at most once per member. A member without a valid
    answer to a step has dropped out. With fewer members than the threshold the attempt is abandoned. An attempt is
    never repeated: members would refuse it. The caller ensures that a message comes from the member that it names.

    Args:
        roster: permitted members, equal to the members' own roster.
        terms: of the attempt, equal to the members' own.
        noise: terms of the noise, equal to the members' own.
    """

    def __init__(self, roster: Roster, terms: Terms, noise: bytes = b"") -> None:
        self._roster, self._terms, self._noise = roster, terms.under(roster), noise
        self._steps = Steps(_Advertising())

    def is_genuine(self, one: Advertisement) -> bool:
        """Return True if a member on the roster signed these keys for this attempt."""
        signed = self._terms.advertisement(one.name, one.mask_key, one.seal_key)
        return self._roster.has_signed(one.name, one.signature, signed)

    def cohort(self, advertisements: Iterable[Advertisement]) -> Cohort:
        """Select the members with keys that are signed, distinct and usable for key agreement.

        All other members would refuse a cohort that contains other keys.

        Raises:
            RoundAbandoned: the cohort is too small or too large for the terms.
        """
        self._steps.take(_Advertising)
        genuine = {one.name: one for one in advertisements if self.is_genuine(one)}
        keys = Counter(key for one in genuine.values() for key in (one.mask_key, one.seal_key))
        # Members with a key in common are all excluded: the server cannot tell which of them copied it.
        usable = {key for key, count in keys.items() if count == 1 and can_agree(key)}
        fit = [name for name in sorted(genuine) if {genuine[name].mask_key, genuine[name].seal_key} <= usable]
        cohort = Cohort(tuple(map(genuine.__getitem__, fit)))
        try:
            self._terms.graph.require(len(cohort.names))
        except ProtocolError as error:
            raise RoundAbandoned(str(error)) from error
        self._steps.leave(_Sharing(cohort))
        return cohort

    def deliveries(self, replies: Iterable[SealedShares]) -> dict[str, Delivery]:
        """Sort the sealed shares by receiver.

        Returns:
            Name -> delivery for this member, for each member that sent shares.

        Raises:
            RoundAbandoned: fewer members than the threshold have sent shares.
        """
        state = self._steps.take(_Sharing)
        members = set(state.cohort.names)
        sent = {
            one.name: one.sealed for one in replies if one.name in members and set(one.sealed) == members - {one.name}
        }
        self._require_enough(sent, "sent shares")
        total = np.zeros(self._terms.length, self._terms.dtype)
        self._steps.leave(_Collecting(state.cohort, self._terms.binding(state.cohort), frozenset(sent), total))
        sharers = tuple(sorted(sent))
        return {
            name: Delivery(sharers, {sender: sealed[name] for sender, sealed in sent.items() if sender != name})
            for name in sent
        }

    def add(self, masked: MaskedInput) -> None:
        """Add one masked input to the sum.

        Raises:
            ProtocolError: its length is not that of the terms, its sender is not expected or has sent one already, or
                it lacks the signature that the others need. The attempt continues without it.
        """
        state = self._steps.take(_Collecting)
        self._steps.leave(state)
        if masked.name in state.arrived or masked.name not in state.sharers:
            raise ProtocolError(f"a masked input of {masked.name!r} is not expected, or not any more")
        if len(masked.payload) != state.total.nbytes:
            raise ProtocolError(f"a masked input must have {state.total.nbytes} bytes, found {len(masked.payload)}")
        told = self._terms.sharers(state.binding, self._noise, sorted(state.sharers))
        if not self._roster.has_signed(masked.name, masked.signature, told):
            raise ProtocolError(f"{masked.name!r} has not signed the noise and the sharers of this attempt")
        state.arrived[masked.name] = masked.signature
        state.total += np.frombuffer(masked.payload, self._terms.dtype)

    def survivors(self) -> Survivors:
        """Close the list of survivors: later masked inputs are refused.

        Raises:
            RoundAbandoned: fewer inputs than the threshold have arrived.
        """
        state = self._steps.take(_Collecting)
        self._require_enough(state.arrived, "sent a masked input")
        survivors = Survivors(tuple(sorted(state.arrived)), state.arrived)
        self._steps.leave(_Signing(state, survivors))
        return survivors

    def signatures(self, replies: Iterable[SurvivorSignature]) -> Signatures:
        """Collect the signatures on the list of survivors.

        Raises:
            RoundAbandoned: fewer survivors than the threshold have signed.
        """
        state = self._steps.take(_Signing)
        collected, names = state.collected, state.survivors.names
        signed = self._terms.survivors(collected.binding, self._noise, names)
        valid = {
            one.name: one.signature
            for one in replies
            if one.name in names and self._roster.has_signed(one.name, one.signature, signed)
        }
        self._require_enough(valid, "signed the list of survivors")
        self._steps.leave(_Unmasking(collected, state.survivors))
        return Signatures(valid)

    def total(self, replies: Iterable[Unmasking]) -> Total:
        """Remove the masks from the sum.

        Raises:
            RoundAbandoned: the shares do not recover all secrets needed for it, or give another key of a member that
                dropped out than its advertised one.
        """
        state = self._steps.take(_Unmasking)
        collected, names = state.collected, state.survivors.names
        answers = {one.name: one for one in replies if one.name in names}
        holders, needed = collected.cohort.names, self._terms.graph.threshold
        secrets: dict[str, bytes] = {}
        for name in collected.sharers:
            shares = {one: answer.shares[name] for one, answer in answers.items() if name in answer.shares}
            if len(shares) < needed:
                raise RoundAbandoned(f"{len(shares)} shares of a secret of {name!r} were shown; it takes {needed}")
            # The seed of its own mask if it survived, else of its key.
            secrets[name] = combine(shares, holders, needed)
        # The masks that stay in the sum: the survivors' own, and those in common with members that dropped out.
        advertised = {one.name: one for one in collected.cohort.advertisements}
        plus: list[bytes] = []
        minus = [secrets[name] for name in names]
        for gone in sorted(collected.sharers - set(names)):
            private = private_key(secrets[gone])
            if public_key(secrets[gone]) != advertised[gone].mask_key:
                raise RoundAbandoned(
                    f"the shares that were shown of the key of {gone!r} do not give the key that it has advertised"
                )
            for name in names:
                key = pair_key(private, advertised[name].mask_key, collected.binding, name, gone)
                # The survivor has added it if its own name comes first.
                (minus if name < gone else plus).append(key)
        add_masks(collected.total, plus, minus)
        revealed = {name: one.revealed for name, one in sorted(answers.items()) if one.revealed}
        return Total(collected.total, names, revealed)

    def _require_enough(self, names: Iterable[str], what: str) -> None:
        found, threshold = len(set(names)), self._terms.graph.threshold
        if found < threshold:
            raise RoundAbandoned(f"{found} members have {what}; the threshold is {threshold}")
