"""Terms of the attempt at a round, the graph of its members, and the state machine of a party in it.

All parties agree on one text of the terms before any input is unmasked.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import NoReturn, Self, TypeVar, cast

import numpy as np

from cloister.secure_aggregation.messages import Cohort
from cloister.secure_aggregation.primitives import RINGS
from cloister.secure_aggregation.roster import Roster
from cloister.secure_aggregation.serialization import Item, Serializable, read, text
from cloister.utils import check
from cloister.utils.errors import ProtocolError


@dataclass(frozen=True)
class Complete:
    """The complete graph: every member shares with every other one. t shares recover a secret.

    Args:
        threshold: t. The sum is unmasked only if t survivors sign.
        colluding: c. The server together with up to c members learns only the sum.
    """

    threshold: int
    colluding: int

    def require(self, members: int) -> None:
        """Refuse a cohort without a guarantee.

        Two lists of survivors with t signatures each have at least 2t − n signers in common. If these are more than c,
        one of them is honest, and it signs once. So 2t > n + c permits one list only.

        Args:
            members: n, size of the cohort.

        Raises:
            ProtocolError: the threshold is larger than n, or 2t ≤ n + c.
        """
        if self.threshold > members or 2 * self.threshold <= members + self.colluding:
            raise ProtocolError(
                f"a cohort must have {self.threshold} to {2 * self.threshold - self.colluding - 1} members, for a"
                f" threshold of {self.threshold} with {self.colluding} colluding members; found {members}"
            )

    @property
    def honest(self) -> int:
        """Return the least number of honest inputs in a sum, t − c: of t survivors at most c collude."""
        return self.threshold - self.colluding

    def items(self) -> tuple[Item, ...]:
        """Return the items for the terms that members sign: the kind, t and c."""
        return "complete", self.threshold, self.colluding


HASH = 32
"""Bytes of a hash, by SHA-256."""


@dataclass(frozen=True)
class Terms:
    """Parameters of the one attempt at a round, fixed before it begins.

    Each party takes the terms from its own configuration. Members with different terms refuse each other's keys.

    Args:
        run: id of the run.
        round: number of the round.
        graph: the complete graph, with threshold and collusion.
        length: p, numbers in a vector.
        bits: of the ring, 32 or 64. The caller ensures that every sum fits.
        roster: digest of the roster. Each party sets that of its own roster, by `under`.
    """

    run: str
    round: int
    graph: Complete
    length: int
    bits: int = 32
    roster: bytes = b""

    def __post_init__(self) -> None:
        check.positive(length=self.length)
        check.one_of({"32", "64"}, bits=str(self.bits))

    def under(self, roster: Roster) -> Self:
        """Return these terms bound to the digest of `roster`.

        Another roster gives another text to sign.
        """
        return replace(self, roster=roster.digest)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of a number in the ring."""
        return RINGS[self.bits]

    @cached_property
    def encoded(self) -> bytes:
        """Encode the terms as bytes."""
        graph = self.graph.items()
        return text("terms", self.run, self.round, graph, self.length, self.bits, self.roster)

    def advertisement(self, name: str, mask_key: bytes, seal_key: bytes) -> bytes:
        """Return the text that a member signs with its keys for this attempt.

        Args:
            name: of the member.
            mask_key: its public key for masks.
            seal_key: its public key for sealed shares.
        """
        return text("advertisement", self.encoded, name, mask_key, seal_key)

    def binding(self, cohort: Cohort) -> bytes:
        """Return the hash, 32 bytes, of the terms and all members' keys.

        Every derived key depends on it.
        """
        return hashlib.sha256(text("binding", self.encoded, cohort.encode())).digest()

    def sharers(self, binding: bytes, noise: bytes, names: Sequence[str]) -> bytes:
        """Return the text that a member signs with its masked input.

        It contains the terms of the input's noise and the list of sharers.

        Args:
            binding: of the cohort.
            noise: terms of the noise.
            names: of the members that sent shares, as the server lists them.
        """
        return text("sharers", binding, noise, tuple(names))

    def survivors(self, binding: bytes, noise: bytes, names: Sequence[str]) -> bytes:
        """Return the text that survivors sign.

        It contains terms, keys, guarantee, noise and the list of survivors.

        Args:
            binding: of the cohort.
            noise: terms of the noise; opaque bytes that must be equal for all.
            names: of the survivors.
        """
        return text("survivors", self.encoded, binding, self.graph.honest, noise, tuple(names))


State = TypeVar("State")


class Steps:
    """The state of a protocol party, which each step takes and replaces.

    Guarantee:
        Of several concurrent threads, one receives the state. A step that raises leaves no state. So no step can run
        twice, in another order, or after a refusal, and the party keeps no secret.
    """

    def __init__(self, first: object) -> None:
        self._state: object = first
        self._taking = Lock()

    def take(self, kind: type[State]) -> State:
        """Take the state, which must be of the kind that the step needs.

        Raises:
            ProtocolError: this step is not the next one, has run already, or an earlier step has raised.
        """
        with self._taking:
            state, self._state = self._state, None
        if not isinstance(state, kind):
            raise ProtocolError("a step of the protocol was asked for out of turn; this attempt is over")
        return state

    def leave(self, state: object) -> None:
        """Set the state for the next step."""
        self._state = state

    def serialize(self, owner: bytes) -> bytes:
        """Return the state as bytes, and delete it here.

        Args:
            owner: hash of the party, and of what it takes part in.

        Raises:
            ProtocolError: the state has no encoding, or there is none.
        """
        state = self.take(Serializable)
        return text("state", owner, type(state).__name__, state.encode())

    def restore(self, owner: bytes, kept: bytes, kinds: Sequence[type[Serializable]]) -> None:
        """Set the state that `serialize` returned. The caller ensures that it is restored once only.

        Args:
            owner: as there.
            kept: output of `serialize`.
            kinds: of states that the party can have.

        Raises:
            ProtocolError: the bytes are no state of such a kind, or have another owner.
        """
        try:
            found, name, content = cast(tuple[bytes, str, bytes], read("state", kept))
            if found != owner:
                raise ProtocolError("this state belongs to another name, roster or run, or to other terms of a round")
            self._state = {kind.__name__: kind for kind in kinds}[name].decode(content)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ProtocolError("what was kept is no state of a member") from None

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: a copy could run a step again.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError("the state of an attempt cannot be copied or pickled: it could be used twice")
