"""Participation of a node in a secure aggregation: its identity, its stored state and its messages.

A store contains the state (`cloister.client.round_state`). Flower's state of the node never contains it: that may be
written to a disk. A restarted node has no attempt, and has dropped out.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.client.keys import Identity, identity
from cloister.client.node import Node
from cloister.client.request import NamedArrays, ProtocolRequest, Reply, Request, TrainRequest
from cloister.client.round_state import AttemptStore, FolderStore, MemoryStore
from cloister.client.trainers import model_and_trainer_of
from cloister.config.run import RunConfig
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.mechanisms.distributed.plan import Plan, add_noise
from cloister.privacy.mechanisms.distributed.shared import SharedRelease
from cloister.privacy.mechanisms.distributed.steps import DistributedStep
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.epoch import EpochList, EpochMember, Pads, RoundTerms
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.primitives import LINK, SeedChain, into_ring
from cloister.secure_aggregation.roster import Roster, encode_roster, public_bytes
from cloister.secure_aggregation.serialization import NUMBER, TEXT, Serializable, sized
from cloister.secure_aggregation.session import HASH, Complete, Terms
from cloister.utils.arrays import Layout
from cloister.utils.errors import ProtocolError
from cloister.utils.wire import ADVERTISE, ROSTER, SECURE_MESSAGE, SHARE, SIGN, UNMASK

AnyStep = TrainRequest | ProtocolRequest
"""Request within an attempt."""


@dataclass(frozen=True, repr=False)
class Attempt(Serializable):
    """Stored state of this node in a round, between two messages.

    Args:
        settings: hash of the run's settings at the start; the server may send others with each message.
        parameters: p, numbers of an update.
        member: this node in the protocol, serialised, with its secrets but without the long-term key.
    """

    settings: bytes = field(metadata=sized(HASH))
    parameters: int = field(metadata=NUMBER)
    member: bytes = field(metadata=TEXT)


@dataclass(frozen=True, repr=False)
class _Step:
    """This node's part in a round of an epoch.

    Args:
        plan: of the noise, for the list of the epoch.
        pads: the masks of one vector.
    """

    plan: Plan
    pads: Pads


@dataclass(frozen=True, repr=False)
class _Part:
    """State of this node in an attempt, during a step.

    Args:
        member: in the protocol.
        plan: of the noise.
        settings: as in `Attempt`.
    """

    member: Member
    plan: Plan
    settings: bytes

    @classmethod
    def of(cls, request: AnyStep, who: Identity, parameters: int, kept: bytes = b"") -> "_Part":
        """Return the new or restored state, by own files and request's settings."""
        plan = release_of(request).plan(parameters, request.round)
        parties = plan.shares.parties
        graph = Complete(parties.threshold, parties.colluding)
        terms = Terms(request.run, request.round, graph, plan.length, plan.bits)
        given = who.name, who.key, who.roster, terms
        member = Member.deserialize(*given, kept) if kept else Member(*given)
        return cls(member, plan, _digest(request.config))

    def serialize(self) -> bytes:
        """Serialise the state until the next message, and clear the member."""
        member = self.member.serialize()
        return Attempt(self.settings, self.plan.parameters, member).encode()


def take_part(request: ProtocolRequest, node: Node) -> Reply:
    """Make one step of the protocol that needs no training.

    The first step begins an attempt; its reply has this node's roster too.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        ProtocolError: the step is not the next one, or violates the protocol. The attempt is over.
    """
    if request.step == ADVERTISE:
        store, who = store_of(request, node), identity_of(request, node)
        store.begin(request.run, request.round)
        if request.config.sums_gradients:
            member = EpochMember(who.name, who.key, who.roster, request.run)
            key = member.advertise(request.round)
            store.keep(request.run, request.round, member.serialize())
            return _introduced(key, who)
        part = _Part.of(request, who, Layout.of(model_and_trainer_of(request.config).model.arrays()).size)
        advertisement = part.member.advertise()
        _kept(part, request, node)
        return _introduced(advertisement, who)
    part = _taken(request, node)
    answer = _stepped(part.member, request.step, request.content)
    if request.step != UNMASK:
        _kept(part, request, node)
    return Reply(_packed(answer))


def _introduced(keys: Serializable, who: Identity) -> Reply:
    """Return the reply with this node's keys and its roster."""
    return Reply({**_packed(keys), ROSTER: np.frombuffer(encode_roster(who.roster), np.uint8)})


def _epoch_stepped(request: TrainRequest, found: EpochList, who: Identity, kept: bytes) -> tuple[bytes, _Step]:
    """Return the state after this round, and this node's masks in it; after the last round of a run there is no state.

    Raises:
        ProtocolError: the node is in no epoch with this round, or refuses its list.
    """
    shared = release_of(request)
    if not kept or not isinstance(shared, DistributedStep):
        raise ProtocolError(f"this node is in no epoch with round {request.round}, or not any more")
    member = EpochMember.deserialize(who.name, who.key, who.roster, request.run, kept)
    if found.names:
        member.agree(found)
    (model,), parties = request.models, shared.dp_sgd.parties
    plan = shared.dp_sgd.plan(Layout.of(model).size, request.round, member.members)
    graph = Complete(parties.threshold, parties.colluding)
    pads = member.pads(RoundTerms.about(request.round, graph, plan.length, plan.bits, plan.terms(), model))
    is_last = request.round == request.config.num_rounds
    return b"" if is_last else member.serialize(), _Step(plan, pads)


def _stepped(member: Member, step: str, content: bytes) -> protocol.Message:
    """Return the member's answer to the server's data in a step."""
    if step == SHARE:
        return member.share(protocol.Cohort.decode(content))
    if step == SIGN:
        return member.sign(protocol.Survivors.decode(content))
    return member.unmask(protocol.Signatures.decode(content))


def open_masks(request: Request, node: Node) -> _Part | _Step | None:
    """Verify the other members' data for the masks of an update; return None without secure aggregation.

    It is verified before the reply is charged and computed, so that a refusal costs nothing.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        ProtocolError: the node takes part in no attempt at this round, or refuses the members that the server names.
    """
    if not request.config.secure_aggregation.enabled or not isinstance(request, TrainRequest):
        return None
    if request.delivery is None:
        raise ProtocolError("under secure aggregation a model leaves this node masked alone")
    if isinstance(request.delivery, EpochList):
        # The stored state is that of the next round before anything is computed: no mask is used twice.
        step = partial(_epoch_stepped, request, request.delivery, identity_of(request, node))
        return store_of(request, node).replace(request.run, step)
    part = _taken(request, node)
    part.member.open(request.delivery)
    return part


def mask_update(reply: Reply, part: _Part | _Step | None, request: Request, node: Node) -> Reply:
    """Reduce a training reply to the clipped and masked update in grid steps, with this node's share of noise.

    Args:
        reply: with the trained model, or with the clipped sum of gradients in its place.
        part: as `open_masks` returned it; None: the reply is returned as it is.
        request: of the server.
        node: that replies.
    """
    if part is None or not isinstance(request, TrainRequest):
        return reply
    (sent,) = request.models
    plan, layout, shared = part.plan, Layout.of(sent), release_of(request)
    made = reply.sums if request.config.sums_gradients else reply.arrays
    numbers = shared.encode(layout.rows(made or {}), layout.rows(sent), layout, plan)
    if isinstance(part, _Step):
        add_noise(numbers, plan, os.urandom, {})
        return Reply(_packed(part.pads.mask(into_ring(numbers, plan.bits))))
    parties = plan.shares.parties
    chain = SeedChain(os.urandom(LINK), parties.threshold + 1, parties.members) if plan.shares.components else None
    add_noise(numbers, plan, os.urandom, chain.seeds() if chain else {})
    vector = part.member.mask(into_ring(numbers, plan.bits), plan.terms(), chain)
    _kept(part, request, node)
    return Reply(_packed(vector))


def release_of(request: AnyStep) -> SharedRelease:
    """Return the release of a round, with the numbers that the server states in its message.

    Args:
        request: of the server.

    Raises:
        ProtocolError: the run has no secure aggregation.
    """
    if (shared := request.config.shared_release) is None:
        raise ProtocolError("this run has no secure aggregation")
    return shared.restated(request.bound, request.distance)


def _packed(message: Serializable) -> NamedArrays:
    """Return a message of the protocol as an array."""
    return {SECURE_MESSAGE: np.frombuffer(message.encode(), np.uint8)}


def _kept(part: _Part, request: Request, node: Node) -> None:
    """Store the state, if no other round has begun since."""
    store_of(request, node).keep(request.run, request.round, part.serialize())


def _taken(request: AnyStep, node: Node) -> _Part:
    """Remove the state from the store and return it; a failed step leaves none.

    Raises:
        ProtocolError: there is none in this round; or it began under other settings, so that the charge would differ
            from the added noise; or the node's name or roster has changed since.
    """
    kept = store_of(request, node).take(request.run, request.round)
    if not kept:
        raise ProtocolError(f"this node takes part in no attempt at round {request.round}, or not any more")
    attempt = Attempt.decode(kept)
    if attempt.settings != _digest(request.config):
        raise ProtocolError(f"the settings of the run have changed since the attempt at round {request.round} began")
    return _Part.of(request, identity_of(request, node), attempt.parameters, attempt.member)


def _digest(config: RunConfig) -> bytes:
    """Return the hash of all settings of a run."""
    return hashlib.sha256(json.dumps(config.flat(), sort_keys=True).encode()).digest()


def store_of(request: Request, node: Node) -> AttemptStore:
    """Return the store of attempts for this node.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        ProtocolError: its configuration names no folder for them, and its process ends with each message.
    """
    if node.config.secure_state:
        return FolderStore(node.config.secure_state)
    if request.run != str(LOCAL_RUN):
        raise ProtocolError("this node has no secure-state in its configuration to keep an attempt in between messages")
    return MemoryStore(node.state)


def identity_of(request: Request, node: Node) -> Identity:
    """Return the identity of this node.

    It is from its own files, or from keys of this process in a simulation.

    Args:
        request: of the server.
        node: that replies.

    Raises:
        NodeConfigError: one of its files is invalid.
        ProtocolError: the node has no key.
    """
    config = node.config
    if (own := identity(config)) is not None:
        return own
    simulated = request.run == str(LOCAL_RUN) and not config.data_path
    if simulated and config.partition_id is not None and config.num_partitions is not None:
        keys, roster = _simulated(config.num_partitions)
        name = _name(config.partition_id)
        return Identity(name, keys[name], roster)
    raise ProtocolError("this node has no signing key and no roster in its configuration, and cannot take part")


@lru_cache(maxsize=4)
def _simulated(clients: int) -> tuple[dict[str, Ed25519PrivateKey], Roster]:
    """Return the keys of this process's simulated clients, and their roster."""
    keys = {_name(number): Ed25519PrivateKey.generate() for number in range(clients)}
    return keys, Roster({name: public_bytes(key) for name, key in keys.items()}, frozenset(keys))


def _name(partition: int) -> str:
    return f"client-{partition:05}"
