"""Epoch of secure sums: members agree on keys once, and each of up to 50 rounds is one exchange.

    advertise ─▶ a fresh X25519 key of each member, signed with its long-term key, the run and the roster
    round     ◀─ in the first round: all keys, the list of the epoch; in every round: what the sum is about
              ─▶ the vector, plus or minus one mask for each other member of the list

Any two members hold a chain of keys C. Its first link is derived from their two keys and the whole list. In round r its
link C_r gives one mask, for one context; then C_{r+1} replaces it. Both are HKDF of C_r:

    context = hash(list, r, t, c, length, ring, statement)        statement: noise, model
    mask    = stream(HKDF(C_r, "mask", context))                  C_{r+1} = HKDF(C_r, "next link")

It is all or nothing: if one member of the list sends no vector, the round has no sum, and the epoch is over. A member
reveals no secret in any case, so that a round needs no shares of secrets and no signatures. The list is fixed before
noise is made: a share is as large as this number of members needs, and no surplus is removed.

**One mask masks one vector.** `pads` gives the masks of a round once, and replaces all links before it returns. The
caller stores the new state before it computes the vector. So a message that comes twice, out of turn or after a kill
finds no link for it. A member without a state, such as one restored from a disk, can only advertise a fresh key.

**Sums of whole lists alone.** Let an honest member i send a vector in a context, with the list L of u ≥ t
members. At least u - c of them are honest. Let j be one of them that has sent no vector in the same context. Only i and
j can compute their C_r, and j uses it for another context, or not at all. So their mask is a value of a pseudorandom
function that appears in no other message, and i's vector is indistinguishable from random numbers. If all honest
members of L send vectors in this context, their masks cancel in the sum of these vectors, and in no sum of fewer. The
views of server and c members are then as in Bonawitz et al. (2017), Lemma 6.1: made from this sum alone. Each vector is
in one context, so in one such sum. Members with other lists, models or noise have other contexts: a server that splits
them learns nothing. Two lists of u and u' members at a time are two sums, of u - c and of u' - c honest vectors or
more. Each has its own noise.

**What the reuse of keys costs.** A party that reads a member's state, or puts an old one back, knows the member's masks
from that round to the end of the epoch, and counts as one of the c for these rounds. Masks of rounds before the
member's last message stay secret. So do those of other epochs: until it restarts, the caller lets a member sign one key
for each first round of a run, and other members take no key that is signed for another. So no key, read or put back, is
in lists of two first rounds. A signed key does not expire: one read before its first vector counts in each epoch that
begins at this round.

| edge case | result |
|---|---|
| a member of the list is silent | the round has no sum; the next round begins an epoch |
| contexts differ, by a hostile server or by unlike members | the coordinator finds no sum, a hostile server noise |
| a round out of turn, or after 50 rounds | the member refuses, and drops its state |
| a member sends a wrong vector | the sum is wrong; the server cannot see it |

Source: Bonawitz et al. (2017), for masks in pairs; HKDF by RFC 5869. Premises: HKDF is a random oracle, and gap
Diffie-Hellman is hard in X25519, for members that are corrupt from the start.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from os import urandom
from typing import Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from cloister.secure_aggregation.messages import FromMember
from cloister.secure_aggregation.primitives import (
    KEY,
    PUBLIC_KEY,
    RINGS,
    add_masks,
    agreed,
    can_agree,
    derived,
    private_key,
    public_key,
)
from cloister.secure_aggregation.roster import SIGNATURE, Roster
from cloister.secure_aggregation.serialization import (
    NUMBER,
    TEXT,
    ByName,
    Names,
    Serializable,
    nested,
    nested_by_name,
    sized,
    sized_by_name,
    text,
)
from cloister.secure_aggregation.session import HASH, Complete, Steps
from cloister.utils.errors import ProtocolError, RoundAbandoned

ROUNDS = 50
"""Most rounds of an epoch."""


@dataclass(frozen=True)
class EpochKey(FromMember):
    """A member's key for one epoch, signed with its long-term key.

    Args:
        key: public, 32 bytes.
        signature: 64 bytes.
    """

    key: bytes = field(metadata=sized(PUBLIC_KEY))
    signature: bytes = field(metadata=sized(SIGNATURE))


@dataclass(frozen=True)
class EpochList(Serializable):
    """The members of an epoch with their keys, as the server sends them to all: name -> key."""

    keys: Mapping[str, EpochKey] = field(metadata=nested_by_name(EpochKey))

    @property
    def names(self) -> Names:
        """Return the names of all members, in order."""
        return tuple(self.keys)

    def binding(self, run: str, roster: Roster, first: int) -> bytes:
        """Return the hash, 32 bytes, of the list, the run, the roster and the first round.

        Args:
            run: id of the run.
            roster: of permitted members.
            first: number of the first round.
        """
        return hashlib.sha256(text("epoch", run, roster.digest, first, self.encode())).digest()


@dataclass(frozen=True)
class MaskedVector(FromMember):
    """A member's masked vector of one round.

    Args:
        context: hash of what the vector is for, 32 bytes.
        payload: numbers in the ring, little-endian.
    """

    context: bytes = field(metadata=sized(HASH))
    payload: bytes = field(metadata=TEXT)


@dataclass(frozen=True)
class RoundTerms:
    """Parameters of one round, which every party takes from its own configuration and the model.

    Args:
        number: of the round.
        graph: threshold t and collusion c.
        length: p, numbers in a vector.
        bits: of the ring, 32 or 64. The caller ensures that every sum fits.
        statement: bytes that must be equal for all members: noise, and a hash of the model.
    """

    number: int
    graph: Complete
    length: int
    bits: int
    statement: bytes = b""

    @classmethod
    def about(
        cls, number: int, graph: Complete, length: int, bits: int, noise: bytes, model: Mapping[str, NDArray]
    ) -> Self:
        """Return the terms of a round with a statement about its noise and its model.

        Args:
            number, graph, length, bits: as above.
            noise: terms of the noise, and of the integers that a vector has.
            model: the arrays of which vectors are computed.
        """
        digest = hashlib.sha256()
        for name, array in model.items():
            digest.update(text("array", name, array.dtype.str, array.shape))
            digest.update(np.ascontiguousarray(array).data)
        return cls(number, graph, length, bits, text("statement", noise, digest.digest()))

    def context(self, binding: bytes) -> bytes:
        """Return the hash, 32 bytes, that every mask of the round depends on.

        Args:
            binding: of the epoch's list.
        """
        own = (self.number, self.graph.items(), self.length, self.bits, self.statement)
        return hashlib.sha256(text("context", binding, *own)).digest()


@dataclass(frozen=True, repr=False)
class Pads:
    """The masks of one member for one vector.

    Args:
        name: of the member.
        context: that they depend on.
        length: numbers in the vector.
        bits: of the ring.
        plus: keys of masks that are added.
        minus: keys of masks that are subtracted.
    """

    name: str
    context: bytes
    length: int
    bits: int
    plus: tuple[bytes, ...]
    minus: tuple[bytes, ...]

    def mask(self, values: NDArray) -> MaskedVector:
        """Mask a vector. The caller masks one vector only.

        Args:
            values: (p,) in the ring: the input with its noise. The masks are added in place.

        Raises:
            ProtocolError: shape or dtype differs from the terms.
        """
        if values.shape != (self.length,) or values.dtype != RINGS[self.bits]:
            raise ProtocolError(
                f"the vector must be {self.length} numbers of {RINGS[self.bits]}, found {values.shape} of"
                f" {values.dtype}"
            )
        add_masks(values, self.plus, self.minus)
        return MaskedVector(self.name, self.context, values.tobytes())


@dataclass(frozen=True)
class _New:
    """State before the first step."""


@dataclass(frozen=True, repr=False)
class _Advertised(Serializable):
    """State: the member's key is sent."""

    seed: bytes = field(metadata=sized(KEY))
    number: int = field(metadata=NUMBER)
    own: EpochKey = field(metadata=nested(EpochKey))


@dataclass(frozen=True, repr=False)
class _Chained(Serializable):
    """State: the member holds one link for each other member, that of round `number`."""

    binding: bytes = field(metadata=sized(HASH))
    number: int = field(metadata=NUMBER)
    end: int = field(metadata=NUMBER)
    links: ByName = field(metadata=sized_by_name(HASH))


class EpochMember:
    """One member in an epoch: advertise; then, in the first round, agree; then pads in every round.

    A step that raises ends the epoch, and drops the member's state.

    Args:
        name: of the member, as on the roster.
        key: its long-term key.
        roster: permitted members; from a source other than the server, or signed by another party.
        run: id of the run.
    """

    def __init__(self, name: str, key: Ed25519PrivateKey, roster: Roster, run: str) -> None:
        self.name, self._key, self._roster, self._run = name, key, roster, run
        self._steps = Steps(_New())

    def serialize(self) -> bytes:
        """Return the state as bytes for `deserialize`, and delete it here.

        Returns:
            Secrets: a party with a copy knows this member's masks until the epoch ends.

        Raises:
            ProtocolError: the epoch is over, or has not begun.
        """
        return self._steps.serialize(self._owner())

    @classmethod
    def deserialize(cls, name: str, key: Ed25519PrivateKey, roster: Roster, run: str, kept: bytes) -> Self:
        """Return a member in the state that `serialize` returned.

        The caller ensures that the state is restored once only.

        Args:
            name, key, roster, run: as for the original member.
            kept: output of `serialize`.

        Raises:
            ProtocolError: as in `Steps.restore`; the owner is the member with this roster in this run.
        """
        member = cls(name, key, roster, run)
        member._steps.restore(member._owner(), kept, (_Advertised, _Chained))
        return member

    def advertise(self, first: int) -> EpochKey:
        """Draw the key of this epoch and sign it.

        The caller ensures that a member signs one key for each first round of a run.

        Args:
            first: number of the first round.

        Raises:
            ProtocolError: this step has run already.
        """
        self._steps.take(_New)
        seed = urandom(KEY)
        public = public_key(seed)
        signature = self._key.sign(_advertised(self._run, self._roster, first, self.name, public))
        own = EpochKey(self.name, public, signature)
        self._steps.leave(_Advertised(seed, first, own))
        return own

    def agree(self, found: EpochList) -> None:
        """Derive the first link in common with each other member of the list, and delete the private key.

        Args:
            found: the keys of all members, from the server.

        Raises:
            ProtocolError: the list lacks this member or its key. Or a member is not on the roster, has not signed its
                key for this epoch, or has a key of low order.
        """
        state = self._steps.take(_Advertised)
        if found.keys.get(self.name) != state.own:
            raise ProtocolError("the list lacks this member, or has another key for it")
        for name, one in found.keys.items():
            if one.name != name or not is_genuine(one, self._roster, self._run, state.number):
                raise ProtocolError(f"{name!r} is not on the roster, or has not signed its key for this epoch")
        private, binding = private_key(state.seed), found.binding(self._run, self._roster, state.number)
        links = {
            name: agreed(private, one.key, text("first link", binding, *sorted((self.name, name))), HASH)
            for name, one in found.keys.items()
            if name != self.name
        }
        self._steps.leave(_Chained(binding, state.number, state.number + ROUNDS, links))

    @property
    def members(self) -> int:
        """Return the number of members on the list.

        Raises:
            ProtocolError: there is no list yet, or the epoch is over.
        """
        state = self._steps.take(_Chained)
        self._steps.leave(state)
        return len(state.links) + 1

    def pads(self, terms: RoundTerms) -> Pads:
        """Return the masks of a round, and replace each link by the next.

        Args:
            terms: of the round.

        Raises:
            ProtocolError: the round is not the next one, the epoch has had all its rounds, or the list is too short or
                too long for the terms.
        """
        state = self._steps.take(_Chained)
        if not state.number == terms.number < state.end:
            raise ProtocolError(f"round {terms.number} of an epoch in which round {state.number} is next")
        terms.graph.require(len(state.links) + 1)
        context = terms.context(state.binding)
        keys = {name: derived(link, text("mask", context)) for name, link in state.links.items()}
        after = {name: derived(link, text("next link"), HASH) for name, link in state.links.items()}
        self._steps.leave(_Chained(state.binding, state.number + 1, state.end, after))
        plus = tuple(key for name, key in keys.items() if name > self.name)
        minus = tuple(key for name, key in keys.items() if name < self.name)
        return Pads(self.name, context, terms.length, terms.bits, plus, minus)

    def _owner(self) -> bytes:
        """Return the hash of run, roster and name."""
        return hashlib.sha256(text("member of an epoch", self._run, self._roster.digest, self.name)).digest()


@dataclass(frozen=True)
class _Ready:
    """State: the coordinator can begin a round."""


@dataclass(frozen=True)
class _Summing:
    """State: the coordinator adds vectors, and drops each."""

    context: bytes
    total: NDArray
    missing: set[str]


class EpochCoordinator:
    """Server side of an epoch: select the list; then, in each round, `begin`, `add` for each member, and `total`.

    The caller ensures that a message comes from the member that it names.

    Args:
        run: id of the run.
        roster: permitted members, equal to the members' own roster.
        first: number of the first round.
        keys: that members have advertised, each name once. Those that other members would refuse are left out.

    Attributes:
        list: the members of the epoch.
    """

    def __init__(self, run: str, roster: Roster, first: int, keys: Iterable[EpochKey]) -> None:
        fit = [one for one in keys if is_genuine(one, roster, run, first) and can_agree(one.key)]
        self.list, self._rounds = EpochList({one.name: one for one in fit}), range(first, first + ROUNDS)
        self._binding = self.list.binding(run, roster, first)
        self._next, self._steps = first, Steps(_Ready())

    def takes(self, number: int) -> bool:
        """Return True if this round can begin.

        Args:
            number: of the round.
        """
        return self._next == number and number in self._rounds

    def begin(self, terms: RoundTerms) -> EpochList:
        """Begin a round, and return the list that its members need: empty after the first round.

        Args:
            terms: equal to the members' own.

        Raises:
            ProtocolError: the round is not the next one, the epoch is over, or the list is too short or too long.
        """
        self._steps.take(_Ready)
        if not self.takes(terms.number):
            raise ProtocolError(f"round {terms.number} of an epoch in which round {self._next} is next")
        terms.graph.require(len(self.list.names))
        total = np.zeros(terms.length, RINGS[terms.bits])
        self._steps.leave(_Summing(terms.context(self._binding), total, set(self.list.names)))
        return self.list if terms.number == self._rounds.start else EpochList({})

    def add(self, masked: MaskedVector) -> None:
        """Add a masked vector to the sum.

        Raises:
            ProtocolError: its length or context differs from the round's, or its sender is not expected, or has sent
                one already. The round has no sum unless a valid one of this sender follows.
        """
        state = self._steps.take(_Summing)
        self._steps.leave(state)
        if masked.name not in state.missing:
            raise ProtocolError(f"a masked vector of {masked.name!r} is not expected, or not any more")
        if masked.context != state.context or len(masked.payload) != state.total.nbytes:
            raise ProtocolError(f"{masked.name!r} has masked another number of numbers, or for another context")
        state.missing.remove(masked.name)
        np.add(state.total, np.frombuffer(masked.payload, state.total.dtype), out=state.total)

    def total(self) -> NDArray:
        """Return the sum of all members' vectors, (p,) in the ring.

        Raises:
            RoundAbandoned: a member has sent none. The epoch is over.
        """
        state = self._steps.take(_Summing)
        if state.missing:
            raise RoundAbandoned(f"no masked vector has come from {', '.join(sorted(state.missing))}")
        self._next += 1
        self._steps.leave(_Ready())
        return state.total


def is_genuine(one: EpochKey, roster: Roster, run: str, first: int) -> bool:
    """Return True if a member on the roster has signed this key for this epoch.

    Args:
        one: the key.
        roster: of permitted members.
        run: id of the run.
        first: number of the first round.
    """
    return roster.has_signed(one.name, one.signature, _advertised(run, roster, first, one.name, one.key))


def _advertised(run: str, roster: Roster, first: int, name: str, key: bytes) -> bytes:
    """Return the text that a member signs with its key."""
    return text("key of an epoch", run, roster.digest, first, name, key)
