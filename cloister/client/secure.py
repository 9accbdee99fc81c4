"""A node's part in a secure aggregation: who it is, what it keeps from one message to the next, and what it sends.

What it keeps is in the memory of this process alone, beside the state that Flower keeps for the node and never in it:
that state may be written to a disk. A node that is started anew knows of no attempt, and has dropped out.
"""

import os
import threading
import weakref
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord

from cloister.client.mods.enforce import Handler
from cloister.client.node import Node
from cloister.client.request import NamedArrays, ProtocolRequest, Reply, Request, TrainRequest
from cloister.client.signing import Identity, identity
from cloister.client.workbench import workbench_of
from cloister.config.run import RunConfig
from cloister.config.secure import shared_mean
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.errors import ProtocolError
from cloister.core.identity import LOCAL_RUN
from cloister.core.wire import ADVERTISE, ROSTER, SECURE_MESSAGE, SHARE, SIGN, UNMASK, number
from cloister.privacy.mechanisms.distributed.plan import Plan
from cloister.privacy.mechanisms.distributed.whole import add_noise, whole_input
from cloister.secure_aggregation import messages as protocol
from cloister.secure_aggregation.chain import LINK, SeedChain
from cloister.secure_aggregation.graph import Complete
from cloister.secure_aggregation.introduction import told
from cloister.secure_aggregation.member import Member
from cloister.secure_aggregation.ring import into_ring
from cloister.secure_aggregation.roster import Roster, public_bytes
from cloister.secure_aggregation.terms import Terms

STATE = "secure-aggregation"
"""The record of the last round that a node has taken part in; it holds no secret."""
ATTEMPT = 1
"""A node takes part in a round once: it has the same update to give in another attempt."""


@dataclass(frozen=True, repr=False)
class _Attempt:
    """A round that this node takes part in.

    Args:
        run, round: which one.
        config: of the run, by which the attempt began; the server may send another with each message.
        member: this node in the protocol; it holds the secrets, and drops them with the last step.
        plan: of the noise.
        process: in which the attempt began: a fork holds a copy of all of it, which could make a step again.
    """

    run: str
    round: int
    config: RunConfig
    member: Member
    plan: Plan
    process: int = field(default_factory=os.getpid)


@dataclass
class _Memory:
    """What a node remembers from one message to the next."""

    attempt: _Attempt | None = None


_memories: dict[int, _Memory] = {}
"""By the identity of the state of a node."""
_remembering = threading.Lock()
"""Held while an attempt is looked up and taken: of two messages at the same time one gets it."""


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
    attempt = _taken(request, node)
    answer = _stepped(attempt.member, request.step, request.content)
    if request.step != UNMASK:
        _memory_of(node).attempt = attempt
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
    attempt = _taken(request, node)
    attempt.member.open(request.delivery)
    trained = call_next(request, node).arrays or {}
    vector = _masked(attempt, request, trained)
    _memory_of(node).attempt = attempt
    return Reply(_packed(vector))


def _masked(attempt: _Attempt, request: TrainRequest, trained: NamedArrays) -> protocol.MaskedInput:
    """The update in steps of the grid, with this node's share of the noise and its masks."""
    (sent,) = request.models
    plan, layout = attempt.plan.at(request.bound), Layout.of(sent)
    numbers = whole_input(Cohort.of(layout, layout.rows(sent), (layout.rows(trained),)), plan)
    parties = plan.shares.parties
    chain = SeedChain(os.urandom(LINK), parties.threshold + 1, parties.members) if plan.shares.components else None
    add_noise(numbers, plan, os.urandom, chain.seeds() if chain else {})
    return attempt.member.mask(into_ring(numbers, plan.bits), plan.terms(), chain)


def _advertised(request: ProtocolRequest, node: Node) -> Reply:
    """Begin an attempt: keys for it, and the roster that this node goes by."""
    _memory_of(node).attempt = None  # one that was not finished is over
    who = identity_of(request, node)
    _refuse_round_again(request, node)
    mechanism = shared_mean(request.config)
    plan = mechanism.plan(Layout.of(workbench_of(request.config).model.arrays()).size)
    graph = Complete(mechanism.parties.threshold, mechanism.parties.colluding)
    terms = Terms(request.run, request.round, ATTEMPT, graph, plan.length, plan.bits)
    member = Member(who.name, who.key, who.roster, terms)
    advertisement = member.advertise()
    _memory_of(node).attempt = _Attempt(request.run, request.round, request.config, member, plan)
    return Reply({**_packed(advertisement), ROSTER: np.frombuffer(told(who.roster), np.uint8)})


def _packed(message: protocol.Message) -> NamedArrays:
    """A message of the protocol as it travels."""
    return {SECURE_MESSAGE: np.frombuffer(message.encode(), np.uint8)}


def _refuse_round_again(request: Request, node: Node) -> None:
    """Raises ProtocolError if this node took part in this round, or a later one, before; remembers it otherwise."""
    last = node.state.config_records.get(STATE, ConfigRecord({"run": "", "round": 0}))
    if last["run"] == request.run and request.round <= number(last, "round"):
        raise ProtocolError(f"this node has taken part in round {request.round} of this run or a later one")
    node.state.config_records[STATE] = ConfigRecord({"run": request.run, "round": request.round})


def _memory_of(node: Node) -> _Memory:
    """What this process remembers of a node, for as long as the node's state is there."""
    place = id(node.state)
    with _remembering:
        if place not in _memories:
            _memories[place] = _Memory()
            weakref.finalize(node.state, _memories.pop, place, None)
        return _memories[place]


def _taken(request: Request, node: Node) -> _Attempt:
    """The attempt that this node takes part in, which it forgets: a step that fails leaves nothing.

    Raises:
        ProtocolError: there is none for this round, or it began under other settings: what is charged would not be the
            noise that is added.
    """
    memory = _memory_of(node)
    with _remembering:
        attempt, memory.attempt = memory.attempt, None
    if attempt is not None and attempt.process != os.getpid():
        raise ProtocolError("the attempt began in another process, which may go on with it; this one does not")
    if attempt is None or (attempt.run, attempt.round) != (request.run, request.round):
        raise ProtocolError(f"this node takes part in no attempt at round {request.round}, or not any more")
    if attempt.config != request.config:
        raise ProtocolError(f"the settings of the run have changed since the attempt at round {request.round} began")
    return attempt


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
    return keys, Roster({name: public_bytes(key) for name, key in keys.items()})


def _name(partition: int) -> str:
    return f"client-{partition:05}"
