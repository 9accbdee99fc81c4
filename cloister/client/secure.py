"""A node's part in a secure aggregation: who it is, what it keeps from one message to the next, and what it sends.

What it keeps is with a store (`cloister.client.attempts`), and never in the state that Flower keeps for the node: that
may be written to a disk. A node that is started anew knows of no attempt, and has dropped out.
"""

import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from functools import lru_cache
from logging import WARNING

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cloister.client.attempts import AttemptStore, MemoryStore, Stage, Turn
from cloister.client.attempts_folder import FolderStore
from cloister.client.mods.enforce import Handler
from cloister.client.mods.errors import log_text
from cloister.client.node import Node
from cloister.client.request import NamedArrays, ProtocolRequest, Reply, Request, TrainRequest
from cloister.client.signing import Identity, identity
from cloister.client.workbench import workbench_of
from cloister.config.run import RunConfig
from cloister.config.secure import shared_mean
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ProtocolError
from cloister.core.wire import ADVERTISE, ROSTER, SECURE_EARLY, SECURE_MESSAGE, SHARE, SIGN, UNMASK
from cloister.flower.messages import LOCAL_RUN
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.whole import add_noise, whole_input
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.chain import LINK, SeedChain
from cloister.secure_aggregation.graph import Complete
from cloister.secure_aggregation.introduction import told
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.ring import into_ring
from cloister.secure_aggregation.roster import Roster, public_bytes
from cloister.secure_aggregation.terms import HASH, Terms
from cloister.secure_aggregation.written import NUMBER, TEXT, Written, sized

logger = logging.getLogger("cloister.client")
AnyStep = TrainRequest | ProtocolRequest
"""What a node is asked for in an attempt."""


@dataclass(frozen=True, repr=False)
class Attempt(Written):
    """What is kept of a round that this node takes part in, between two messages.

    Args:
        number: which attempt at the round it is, `Stage.EARLY` or `Stage.ORDINARY`.
        settings: hash of the run's, by which the attempt began; the server may send others with each message.
        terms: hash of the terms: the round, who may take part, and who this node is.
        parameters: p, numbers of an update.
        member: this node in the protocol, put down; it holds the secrets, but not the long-term key.
    """

    number: int = field(metadata=NUMBER)
    settings: bytes = field(metadata=sized(HASH))
    terms: bytes = field(metadata=sized(HASH))
    parameters: int = field(metadata=NUMBER)
    member: bytes = field(metadata=TEXT)


@dataclass(frozen=True, repr=False)
class _Part:
    """This node in an attempt, while it makes a step.

    Args:
        member: in the protocol.
        plan: of the noise.
        stage: of the attempt, `Stage.EARLY` or `Stage.ORDINARY`.
        settings, terms: as in `Attempt`.
    """

    member: Member
    plan: Plan
    stage: Stage
    settings: bytes
    terms: bytes

    @classmethod
    def of(cls, request: AnyStep, who: Identity, stage: Stage, parameters: int, kept: bytes = b"") -> "_Part":
        """The part of this node by its own files and the settings of the request, at the start or where it was put."""
        mechanism = shared_mean(request.config).told(request.distance)
        plan = mechanism.plan(parameters)
        graph = Complete(mechanism.parties.threshold, mechanism.parties.colluding)
        terms = Terms(request.run, request.round, stage.value, graph, plan.length, plan.bits).under(who.roster)
        given = who.name, who.key, who.roster, terms
        member = Member.taken_up(*given, kept) if kept else Member(*given)
        named = hashlib.sha256(terms.encoded + who.name.encode()).digest()
        return cls(member, plan, stage, _digest(request.config), named)

    def put_down(self) -> bytes:
        """What is to be kept until the next message; the member has forgotten it."""
        member = self.member.put_down()
        return Attempt(self.stage.value, self.settings, self.terms, self.plan.parameters, member).encode()


def with_early_step(request: ProtocolRequest, node: Node, call_next: Handler) -> Reply:
    """Make the step that is asked for, and then the one of the next round that came with it.

    Whatever speaks against the early step, or goes wrong in it, does not touch this round: its answer is left out, and
    the server begins the next round by itself, where it hears why. The two steps share the time of one message: where
    it ends in the early step, both are lost.

    Args:
        request: of the server.
        node: that answers.
        call_next: makes one step.
    """
    own, early = request.apart()
    reply = call_next(own, node)
    if early is None:
        return reply
    try:
        found = dict(call_next(early, node).arrays or {})
    except Exception as error:
        why = log_text(error) or f": {type(error).__name__}"
        logger.log(WARNING, "run %s: round %d does not begin early%s", request.run, early.round, why)
        return reply
    answer = found.pop(SECURE_MESSAGE)
    return Reply({**(reply.arrays or {}), SECURE_EARLY: answer, **found})


def take_part(request: ProtocolRequest, node: Node) -> Reply:
    """Make one step of the protocol that takes no training.

    Args:
        request: of the server.
        node: that answers.

    Raises:
        ProtocolError: the step is not the next one, or asks for what the protocol does not allow. The attempt is over.
    """
    if request.step == ADVERTISE:
        return _advertised(request, node)
    part = _taken(request, node)
    answer = _stepped(part.member, request.step, request.content)
    if request.step != UNMASK:
        _kept(part, request, node, part.stage if request.step == SHARE else Stage.VECTOR)
    return Reply(_packed(answer))


def _stepped(member: Member, step: str, content: bytes) -> protocol.Message:
    """What a member answers in a step, told what the server tells in it."""
    if step == SHARE:
        return member.share(protocol.Cohort.decode(content))
    if step == SIGN:
        return member.sign(protocol.Survivors.decode(content))
    return member.unmask(protocol.Signatures.decode(content))


def mask_update(request: Request, node: Node, call_next: Handler) -> Reply:
    """Let nothing of a training reply through but the update, clipped, with its share of the noise, and masked.

    What other members have sent is looked at before the reply is charged and made: it spends nothing if it is refused.

    Args:
        request: of the server.
        node: that answers.
        call_next: trains.

    Raises:
        ProtocolError: the node takes part in no attempt at this round, or not with those whom the server tells it.
    """
    if not request.config.secure_aggregation.enabled or not isinstance(request, TrainRequest):
        return call_next(request, node)
    if request.delivery is None:
        raise ProtocolError("under secure aggregation a model leaves this node masked alone")
    part = _taken(request, node)
    begun = Turn(request.round, part.stage)
    store_of(request, node).begin(request.run, Turn(request.round, Stage.VECTOR), after=begun)
    part.member.open(request.delivery)
    trained = call_next(request, node).arrays or {}
    vector = _masked(part, request, trained)
    _kept(part, request, node, Stage.VECTOR)
    return Reply(_packed(vector))


def _masked(part: _Part, request: TrainRequest, trained: NamedArrays) -> protocol.MaskedInput:
    """The update in steps of the grid, with this node's share of the noise and its masks."""
    (sent,) = request.models
    plan, layout = part.plan.at(request.bound), Layout.of(sent)
    numbers = whole_input(Cohort.of(layout, layout.rows(sent), (layout.rows(trained),)), plan)
    parties = plan.shares.parties
    chain = SeedChain(os.urandom(LINK), parties.threshold + 1, parties.members) if plan.shares.components else None
    add_noise(numbers, plan, os.urandom, chain.seeds() if chain else {})
    return part.member.mask(into_ring(numbers, plan.bits), plan.terms(), chain)


def _advertised(request: ProtocolRequest, node: Node) -> Reply:
    """Begin an attempt: keys for it, and the roster that this node goes by."""
    store = store_of(request, node)
    who, stage = identity_of(request, node), Stage.EARLY if request.is_early else Stage.ORDINARY
    store.begin(request.run, Turn(request.round, stage))
    part = _Part.of(request, who, stage, Layout.of(workbench_of(request.config).model.arrays()).size)
    advertisement = part.member.advertise()
    _kept(part, request, node, stage)
    return Reply({**_packed(advertisement), ROSTER: np.frombuffer(told(who.roster), np.uint8)})


def _packed(message: protocol.Message) -> NamedArrays:
    """A message of the protocol as it travels."""
    return {SECURE_MESSAGE: np.frombuffer(message.encode(), np.uint8)}


def _kept(part: _Part, request: Request, node: Node, stage: Stage) -> None:
    """Keep the part until the next message, if the turn with this stage was the last one."""
    store_of(request, node).keep(request.run, Turn(request.round, stage), part.put_down())


def _taken(request: AnyStep, node: Node) -> _Part:
    """The part of this node, which nobody else has from then on: a step that fails leaves nothing.

    Raises:
        ProtocolError: there is none in this round; or it began under other settings: what is charged would not be the
            noise that is added; or this node has another name since, or another roster.
    """
    kept = store_of(request, node).take(request.run, request.round)
    if not kept:
        raise ProtocolError(f"this node takes part in no attempt at round {request.round}, or not any more")
    attempt = Attempt.decode(kept)
    if attempt.settings != _digest(request.config):
        raise ProtocolError(f"the settings of the run have changed since the attempt at round {request.round} began")
    part = _Part.of(request, identity_of(request, node), Stage(attempt.number), attempt.parameters, attempt.member)
    if part.terms != attempt.terms:
        raise ProtocolError(
            f"this node takes part in no attempt at round {request.round} with the roster and the name that it has "
            "now: the attempt is over"
        )
    return part


def _digest(config: RunConfig) -> bytes:
    """The hash of all settings of a run."""
    return hashlib.sha256(json.dumps(config.flat(), sort_keys=True).encode()).digest()


def store_of(request: Request, node: Node) -> AttemptStore:
    """What keeps an attempt for this node.

    Args:
        request: of the server.
        node: that answers.

    Raises:
        ProtocolError: its configuration names no folder for that, and its process lives no longer than a message.
    """
    if node.config.secure_state:
        return FolderStore(node.config.secure_state)
    if request.run != str(LOCAL_RUN):
        raise ProtocolError("this node has no secure-state in its configuration to keep an attempt in between messages")
    return MemoryStore(node.state)


def identity_of(request: Request, node: Node) -> Identity:
    """Who this node is: by its own files, or in a simulation by keys that this process has made.

    Args:
        request: of the server.
        node: that answers.

    Raises:
        NodeConfigError: one of its files is not what it has to be.
        ProtocolError: it has no key.
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
    """The keys of all simulated clients of this process, and the roster of them."""
    keys = {_name(number): Ed25519PrivateKey.generate() for number in range(clients)}
    return keys, Roster({name: public_bytes(key) for name, key in keys.items()}, frozenset(keys))


def _name(partition: int) -> str:
    return f"client-{partition:05}"
