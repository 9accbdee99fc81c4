"""A member of the protocol: a client that trusts neither the server nor the other members."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import urandom
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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
from cloister.secure_aggregation.primitives import (
    KEY,
    SECRET,
    SeedChain,
    add_masks,
    agreed,
    pair_key,
    private_key,
    public_key,
    seal,
    split,
    unseal,
)
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.serialization import (
    SEVERAL_NAMES,
    TEXT,
    Names,
    Serializable,
    nested,
    nested_by_name,
    sized,
    text,
)
from cloister.secure_aggregation.session import HASH, Steps, Terms
from cloister.utils.errors import ProtocolError


@dataclass(frozen=True, repr=False)
class Shares(Serializable):
    """A member's shares of one peer's two secrets. It may reveal one of them, never both."""

    of_key: bytes = field(metadata=sized(SECRET))
    of_mask: bytes = field(metadata=sized(SECRET))


@dataclass(frozen=True)
class _New:
    """State before the first step."""


@dataclass(frozen=True, repr=False)
class _Advertised(Serializable):
    """State: the member's keys are sent."""

    mask_seed: bytes = field(metadata=sized(KEY))
    seal_seed: bytes = field(metadata=sized(KEY))
    advertisement: Advertisement = field(metadata=nested(Advertisement))


@dataclass(frozen=True, repr=False)
class _Shared(Serializable):
    """State: the member's shares are sent."""

    keys: _Advertised = field(metadata=nested(_Advertised))
    own_mask: bytes = field(metadata=sized(KEY))
    own: Shares = field(metadata=nested(Shares))
    cohort: Cohort = field(metadata=nested(Cohort))
    binding: bytes = field(metadata=sized(HASH))


@dataclass(frozen=True, repr=False)
class _Opened:
    """State: the member holds all shares and all mask keys. It needs no further data of another member.

    `plus` and `minus` are the keys of masks that are added and subtracted.
    """

    held: Mapping[str, Shares]
    sharers: Names
    plus: tuple[bytes, ...]
    minus: tuple[bytes, ...]
    binding: bytes


@dataclass(frozen=True, repr=False)
class _Masked(Serializable):
    """State: the masked input is sent. The member holds no key, only shares of others' secrets."""

    held: Mapping[str, Shares] = field(metadata=nested_by_name(Shares))
    sharers: Names = field(metadata=SEVERAL_NAMES)
    binding: bytes = field(metadata=sized(HASH))
    noise: bytes = field(metadata=TEXT)
    chain: SeedChain | None = field(metadata=nested(SeedChain, or_none=True))


@dataclass(frozen=True, repr=False)
class _Signed(Serializable):
    """State: the one list of survivors is signed. The member has deleted the shares that it must not reveal."""

    survivors: Names = field(metadata=SEVERAL_NAMES)
    signed: bytes = field(metadata=TEXT)
    shown: Unmasking = field(metadata=nested(Unmasking))


KEPT = (_Advertised, _Shared, _Masked, _Signed)
"""States of a member between two messages of the server."""


class Member:
    """One member in the one attempt at a round: advertise, share, open, mask, sign, unmask.

    Each step runs once, in this order. A step that raises ends the attempt and drops the member's state.

    Args:
        name: of the member, as on the roster.
        key: its long-term key.
        roster: permitted members; from a source other than the server, or signed by another party.
        terms: of the attempt, from the member's own configuration.
    """

    def __init__(self, name: str, key: Ed25519PrivateKey, roster: Roster, terms: Terms) -> None:
        self.name, self._key, self._roster, self._terms = name, key, roster, terms.under(roster)
        self._steps = Steps(_New())

    def serialize(self) -> bytes:
        """Return the attempt's state as bytes for `deserialize`, and delete it here.

        Returns:
            Secrets: a party with a copy can act as this member in the attempt. The long-term key is not included.

        Raises:
            ProtocolError: the member is not between two messages of the server, or the attempt is over.
        """
        return self._steps.serialize(self._owner())

    @classmethod
    def deserialize(cls, name: str, key: Ed25519PrivateKey, roster: Roster, terms: Terms, kept: bytes) -> Self:
        """Return a member in the state that `serialize` returned.

        The caller ensures that the state is restored once only.

        Args:
            name, key, roster, terms: as for the original member.
            kept: output of `serialize`.

        Raises:
            ProtocolError: as in `Steps.restore`; the owner is the member in the attempt with these terms.
        """
        member = cls(name, key, roster, terms)
        member._steps.restore(member._owner(), kept, KEPT)
        return member

    def advertise(self) -> Advertisement:
        """Draw the keys of this attempt and sign them.

        Raises:
            ProtocolError: this step has run already.
        """
        self._steps.take(_New)
        seeds = urandom(KEY), urandom(KEY)
        mask_key, seal_key = map(public_key, seeds)
        signature = self._key.sign(self._terms.advertisement(self.name, mask_key, seal_key))
        advertisement = Advertisement(self.name, mask_key, seal_key, signature)
        self._steps.leave(_Advertised(*seeds, advertisement))
        return advertisement

    def share(self, cohort: Cohort) -> SealedShares:
        """Split this member's secrets into shares, one for each other member.

        Args:
            cohort: the keys of all members, from the server.

        Raises:
            ProtocolError: the cohort is too small or too large for the terms, or lacks this member or its keys. Or a
                member is not on the roster, has not signed for this attempt, or has another member's key.
        """
        state = self._steps.take(_Advertised)
        self._terms.graph.require(len(cohort.names))
        if state.advertisement not in cohort.advertisements:
            raise ProtocolError("the cohort lacks this member, or has other keys for it")
        for one in cohort.advertisements:
            signed = self._terms.advertisement(one.name, one.mask_key, one.seal_key)
            if not self._roster.has_signed(one.name, one.signature, signed):
                raise ProtocolError(f"{one.name!r} is not on the roster, or has not signed its keys for this attempt")
        keys = {key for one in cohort.advertisements for key in (one.mask_key, one.seal_key)}
        if len(keys) < 2 * len(cohort.names):
            raise ProtocolError("two members of the cohort have the same key")
        own_mask, threshold = urandom(KEY), self._terms.graph.threshold
        of_key = split(state.mask_seed, cohort.names, threshold)
        of_mask = split(own_mask, cohort.names, threshold)
        own = Shares(of_key[self.name], of_mask[self.name])
        shared = _Shared(state, own_mask, own, cohort, self._terms.binding(cohort))
        sealed = {
            one.name: seal(*self._seal_key(shared, one, mine=True), of_key[one.name] + of_mask[one.name])
            for one in cohort.advertisements
            if one.name != self.name
        }
        self._steps.leave(shared)
        return SealedShares(self.name, sealed)

    def open(self, delivery: Delivery) -> None:
        """Open the other members' shares, and derive the mask keys.

        Faulty keys and shares of other members fail in this step.

        Shares that cannot be opened are dropped. The mask in common with their sender stays.

        Args:
            delivery: the remaining members, and their shares, from the server.

        Raises:
            ProtocolError: fewer members than the threshold are left, some are not of the cohort, or the key of one is
                unfit for key agreement.
        """
        state = self._steps.take(_Shared)
        sharers, senders = frozenset(delivery.sharers), frozenset(delivery.sealed)
        self._require_enough(sharers, state.cohort.names, "members left")
        if not senders <= sharers - {self.name}:
            raise ProtocolError("shares have come from a sender that is not among the members that have sent some")
        held = {self.name: state.own, **dict(self._opened(state, delivery))}
        masks = self._masks(state, sharers - {self.name})
        self._steps.leave(_Opened(held, delivery.sharers, *masks, state.binding))

    def mask(self, values: NDArray, noise: bytes = b"", chain: SeedChain | None = None) -> MaskedInput:
        """Mask this member's vector.

        Args:
            values: (p,) in the ring: the input with its noise. It stays unchanged.
            noise: terms of the noise in it, which must be equal for all survivors.
            chain: seeds of the components of this noise that may be removed later.

        Raises:
            ProtocolError: shape or dtype of the vector differs from the terms.
        """
        state = self._steps.take(_Opened)
        if values.shape != (self._terms.length,) or values.dtype != self._terms.dtype:
            raise ProtocolError(
                f"the vector must be {self._terms.length} numbers of {self._terms.dtype}, found {values.shape} of"
                f" {values.dtype}"
            )
        masked = self._masked(state, values)
        told = self._terms.sharers(state.binding, noise, state.sharers)
        self._steps.leave(_Masked(state.held, state.sharers, state.binding, noise, chain))
        return MaskedInput(self.name, masked.tobytes(), self._key.sign(told))

    def sign(self, survivors: Survivors) -> SurvivorSignature:
        """Sign the list of survivors, together with all terms.

        Args:
            survivors: members whose masked inputs have arrived, from the server.

        Raises:
            ProtocolError: the survivors are fewer than the threshold, lack this member, or include one that sent no
                shares. Or a survivor has not signed this member's terms of the noise and list of sharers.
        """
        state = self._steps.take(_Masked)
        names = frozenset(survivors.names)
        self._require_enough(names, state.sharers, "survivors")
        self._require_told_the_same(survivors, self._terms.sharers(state.binding, state.noise, state.sharers))
        signed = self._terms.survivors(state.binding, state.noise, survivors.names)
        shares = {name: one.of_mask if name in names else one.of_key for name, one in state.held.items()}
        shown = Unmasking(self.name, shares, state.chain.reveal(len(names)) if state.chain else b"")
        self._steps.leave(_Signed(survivors.names, signed, shown))
        return SurvivorSignature(self.name, self._key.sign(signed))

    def unmask(self, signatures: Signatures) -> Unmasking:
        """Reveal one share of each member: of its mask if it survived, else of its key.

        The state is deleted.

        Args:
            signatures: of the survivors on the text that this member has signed, from the server.

        Raises:
            ProtocolError: fewer than the threshold have signed the identical text.
        """
        state = self._steps.take(_Signed)
        named = [(name, one) for name, one in signatures.signatures.items() if name in state.survivors]
        signers = sum(self._roster.has_signed(name, one, state.signed) for name, one in named)
        if signers < self._terms.graph.threshold:
            raise ProtocolError(
                f"{signers} survivors have signed what this member has signed; the threshold is"
                f" {self._terms.graph.threshold}"
            )
        return state.shown

    def _owner(self) -> bytes:
        """Return the hash of terms and name."""
        return hashlib.sha256(text("member of an attempt", self._terms.encoded, self.name)).digest()

    def _require_enough(self, names: frozenset[str], known: Iterable[str], what: str) -> None:
        """Refuse a list that is too short, has unknown members, or lacks this member."""
        if len(names) < self._terms.graph.threshold:
            raise ProtocolError(f"{len(names)} {what}; the threshold is {self._terms.graph.threshold}")
        if self.name not in names or not names <= frozenset(known):
            raise ProtocolError(f"the list of {what} lacks this member, or has a member that was not there before")

    def _require_told_the_same(self, survivors: Survivors, told: bytes) -> None:
        """Refuse a survivor that has not signed this member's noise terms and sharers.

        Its vector may contain other noise, or lack masks that it should have.
        """
        for name in survivors.names:
            if not self._roster.has_signed(name, survivors.signatures.get(name, b""), told):
                raise ProtocolError(f"{name!r} has not signed the noise and the sharers that this member was told")

    def _seal_key(self, state: _Shared, peer: Advertisement, mine: bool) -> tuple[bytes, bytes]:
        """Return the key and the context of shares between this member and a peer."""
        way = (self.name, peer.name) if mine else (peer.name, self.name)
        context = text("sealed shares", state.binding, *way)
        return agreed(private_key(state.keys.seal_seed), peer.seal_key, context), context

    def _opened(self, state: _Shared, delivery: Delivery) -> Iterator[tuple[str, Shares]]:
        """Yield each owner with the shares that it sent to this member, if they can be opened.

        The server can omit any share. So a share that cannot be opened reveals no more than an omitted one.
        """
        known = {one.name: one for one in state.cohort.advertisements}
        for name, sealed in delivery.sealed.items():
            with suppress(ProtocolError):
                both = unseal(*self._seal_key(state, known[name], mine=False), sealed)
                yield name, Shares(both[:SECRET], both[SECRET:])

    def _masks(self, state: _Shared, partners: frozenset[str]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Return the keys of the masks to add and to subtract, for this member and partners."""
        own = private_key(state.keys.mask_seed)
        keys = {
            one.name: pair_key(own, one.mask_key, state.binding, self.name, one.name)
            for one in state.cohort.advertisements
            if one.name in partners
        }
        above = [key for name, key in keys.items() if name > self.name]
        below = [key for name, key in keys.items() if name < self.name]
        return (state.own_mask, *above), tuple(below)

    def _masked(self, state: _Opened, values: NDArray) -> NDArray:
        """Return the vector with all masks."""
        masked = values.copy()
        add_masks(masked, state.plus, state.minus)
        return masked
