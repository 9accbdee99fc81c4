"""Requests of the server, parsed once before any other step on the node.

The server chooses every byte of a message. Parsing returns one typed value, or refuses the message: every record and
field must be known, every number in its range, every array finite, and the number of models equal to that of the run
configuration. Policy, budget, noise and handlers receive this value instead of the message.

A refusal depends only on the message and the run configuration, never on the node's data.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from logging import WARNING
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from cloister.config.calibration import calibrated
from cloister.config.io import Scalar
from cloister.config.run import RunConfig, parse
from cloister.privacy.accounting.budget import from_wire
from cloister.privacy.accounting.events import DistributedGaussian, Event, Unaccounted
from cloister.privacy.claims.premises import Attestation
from cloister.privacy.mechanisms.clipping import MAX_BOUND, MIN_BOUND
from cloister.secure_aggregation.epoch import EpochList
from cloister.secure_aggregation.messages import Delivery
from cloister.utils.arrays import Layout, from_record, to_record, unstacked
from cloister.utils.errors import FederationError, PrivacyError
from cloister.utils.wire import (
    ADVERTISE,
    ARRAYS,
    ATTESTATION,
    CLIPPING_NORM,
    CONFIG,
    DISTANCE,
    FROZEN,
    HYPOTHESES,
    LEDGER_HEAD,
    METRICS,
    PROMISE,
    PROXIMAL_MU,
    ROUND,
    SECURE_MESSAGE,
    SECURE_STEP,
    SEED,
    SHARE,
    SIGN,
    UNMASK,
    config_of,
)

logger = logging.getLogger("cloister.client")
NamedArrays = Mapping[str, NDArray]
MAXIMUM_WHOLE = 2**31 - 1
"""Largest round and seed that a run configuration can contain."""
MAXIMUM_LENGTH = 1 << 16
"""Maximum characters of a run configuration."""
DATA_PATH = "data-path"
"""Key of the node configuration for data of its own."""
MAXIMUM_PENALTY = 1e6
"""Largest μ of FedProx."""


@dataclass(frozen=True)
class Request:
    """Content that all messages share.

    Attributes:
        config: of the run.
        run: its id.
        round: at least 0.
        seed: of the run, for partitions, shuffles and dropout; never for noise.
        models: one, or as many hypotheses as the run has clusters; every array is finite.
        frozen: SHA-256 of the server's frozen weights; empty: there are none.
    """

    config: RunConfig
    run: str
    round: int
    seed: int
    models: tuple[NamedArrays, ...]
    frozen: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class TrainRequest(Request):
    """Request to train a model.

    Attributes:
        proximal_mu: FedProx's μ; 0: no penalty.
        promise: the releases that the reply contributes to, as the server states them.
        ledger_head: hash of the last line of the server's ledger; empty: not stated.
        delivery: under secure aggregation, data for the masks of the update; None elsewhere. In steps of DP-SGD the
            members of the epoch; an empty list after its first round.
        bound: under secure aggregation, the clipping norm C of the update, or S of the step; 0 elsewhere.
        distance: under secure aggregation, d that scales this node's noise; 1 if none does.
        by_provisioner: members whose keys the provisioner made, if this node counts on its own share of noise only.
    """

    proximal_mu: float = 0.0
    promise: tuple[Event, ...] = ()
    ledger_head: str = ""
    delivery: Delivery | EpochList | None = None
    bound: float = 0.0
    distance: float = 1.0
    by_provisioner: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProtocolRequest(Request):
    """Request for a step of a secure aggregation, without training.

    Attributes:
        step: name of the step.
        content: the server's data for it, undecoded.
        bound: the clipping norm C of the later update.
        distance: d that scales its noise; 1 if none does.
    """

    step: str = field(kw_only=True)
    content: bytes = field(repr=False, kw_only=True)
    bound: float = field(default=0.0, kw_only=True)
    distance: float = field(default=1.0, kw_only=True)


@dataclass(frozen=True)
class EvaluateRequest(Request):
    """Request to evaluate a model."""


@dataclass(frozen=True)
class KeepRequest(Request):
    """Request to save the final model that suits the node best, or has its own statistics; the reply has no data."""


@dataclass(frozen=True)
class Reply:
    """Reply of a node before it is sent.

    Attributes:
        arrays: a trained model; None: none.
        metrics: numbers about it.
        chosen: index of the model that training began with; it never leaves.
        attestation: of what the client applied; None: nothing is stated.
        sums: clipped sum of gradients without noise, for `mask_update`; it never leaves. None: a model is trained.
    """

    arrays: NamedArrays | None = None
    metrics: Mapping[str, float | int] = field(default_factory=dict)
    chosen: int = 0
    attestation: Attestation | None = None
    sums: NamedArrays | None = None

    def content(self) -> RecordDict:
        """Return the reply as records of Flower."""
        if self.arrays is None and not self.metrics:
            return RecordDict()
        content = RecordDict({METRICS: MetricRecord(dict(self.metrics))})
        if self.arrays is not None:
            content[ARRAYS] = to_record(self.arrays)
        if self.attestation is not None:
            content[ATTESTATION] = ConfigRecord({ATTESTATION: self.attestation.to_bytes()})
        return content


SPECIFIC: dict[type[Request], tuple[str, ...]] = {
    TrainRequest: (PROXIMAL_MU, PROMISE, LEDGER_HEAD, SECURE_MESSAGE, CLIPPING_NORM, DISTANCE),
    ProtocolRequest: (SECURE_STEP, SECURE_MESSAGE, CLIPPING_NORM, DISTANCE),
    EvaluateRequest: (),
    KeepRequest: (),
}
"""Fields of a message beside those that every message may contain."""
AnyRequest = TypeVar("AnyRequest", bound=Request)


def request_of(kind: type[AnyRequest], message: Message, context: Context) -> AnyRequest:
    """Parse and validate the request in a message.

    Args:
        kind: class of the request.
        message: of the server.
        context: of the node; it provides the run configuration.

    Raises:
        ConfigError: the run configuration is invalid.
        FederationError: a record or a field is missing, unknown, of another type or out of range; or the number of
            models contradicts the run configuration; or an array is not finite.
        PrivacyError: the promise cannot be read.
    """
    config, content = run_config(context), message.content
    expected = {CONFIG: ConfigRecord} if kind is ProtocolRequest else {ARRAYS: ArrayRecord, CONFIG: ConfigRecord}
    if {name: type(record) for name, record in content.items()} != expected:
        names = " and ".join(map(repr, expected))
        raise FederationError(f"the server's message must hold the records {names} and no other")
    fields = config_of(content, CONFIG)
    known = (ROUND, SEED, HYPOTHESES, FROZEN, *SPECIFIC[kind])
    if unknown := sorted(set(fields) - set(known)):
        raise FederationError(f"unknown field {unknown[0]!r} in the server's message; known: {', '.join(known)}")
    models = () if kind is ProtocolRequest else _models(message, fields, config)
    run, number, seed = str(message.metadata.run_id), _whole(fields, ROUND), _whole(fields, SEED)
    frozen, special = _digest(fields, FROZEN), dict[str, object]()
    if kind is ProtocolRequest:
        step, said = fields.get(SECURE_STEP), fields.get(SECURE_MESSAGE)
        if not config.secure_aggregation.enabled:
            raise FederationError("the server's message is of a secure aggregation, and this run has none")
        if step not in (ADVERTISE, SHARE, SIGN, UNMASK) or not isinstance(said, bytes):
            raise FederationError(
                f"the server's message must carry {SECURE_STEP!r} as a step of the protocol and {SECURE_MESSAGE!r} as "
                "bytes"
            )
        special = {"step": step, "content": said, **_bound_and_distance(fields, config)}
    elif kind is TrainRequest:
        special = _of_training(fields, config, models)
    return kind(config, run, number, seed, models, frozen=frozen, **special)


def _of_training(fields: ConfigRecord, config: RunConfig, models: tuple[NamedArrays, ...]) -> dict[str, object]:
    """Return the fields that only a training request has.

    Under secure aggregation these are the data for the masks, and the release of the sum as this node computes it.

    Raises:
        FederationError: the message has data for masks in a run without secure aggregation, or lacks it in one with it.
        PrivacyError: the server states another release of the sum.
        ProtocolError: the data for the masks is invalid.
    """
    mu, head = _number(fields, PROXIMAL_MU, MAXIMUM_PENALTY, default=0.0), _digest(fields, LEDGER_HEAD)
    said = fields.get(SECURE_MESSAGE)
    delivery: Delivery | EpochList | None = None
    if not (isinstance(said, bytes) if config.secure_aggregation.enabled else said is None):
        raise FederationError(
            f"{SECURE_MESSAGE!r} must be in the server's message, as bytes, in a run with secure aggregation and in no "
            "other"
        )
    shared = config.shared_release
    if isinstance(said, bytes):
        delivery = EpochList.decode(said) if config.sums_gradients else Delivery.decode(said)
    if shared:
        promise = shared.events(Layout.of(models[0]))
        if PROMISE in fields and promised(fields) != promise:
            raise PrivacyError(
                f"{PROMISE!r} in the server's message is not what this node's share of the noise amounts to"
            )
    else:
        promise = promised(fields)
        refuse_shares_of_noise(promise)
    of_sum = {"delivery": delivery, **_bound_and_distance(fields, config)}
    return {"proximal_mu": float(mu), "promise": promise, "ledger_head": head, **of_sum}


def _bound_and_distance(fields: ConfigRecord, config: RunConfig) -> dict[str, object]:
    """Return the clipping norm C and the distance d of a secure aggregation, which may follow earlier rounds.

    A message states C if and only if it adapts. C determines the size of a grid step. In grid steps, bound and noise
    are independent of C. So a server cannot reduce a node's noise relative to its clipped update by another C.

    A message states d if and only if it scales the noise. The mechanism keeps d within the configured limits, so that
    no d leads to less noise than is charged.

    Raises:
        FederationError: the message lacks C or d, has it without need, or it is out of range.
    """
    bound, distance = fields.get(CLIPPING_NORM), fields.get(DISTANCE)
    shared = config.shared_release
    stated = shared.stated() if shared else {}
    if bound is None and CLIPPING_NORM not in stated:
        bound = shared.bound_in(_whole(fields, ROUND)) if shared else 0.0
    elif not (CLIPPING_NORM in stated and isinstance(bound, float) and MIN_BOUND <= bound <= MAX_BOUND):
        raise FederationError(
            f"{CLIPPING_NORM!r} must be in the server's message, as a number from {MIN_BOUND:g} to {MAX_BOUND:g}, in a "
            "run with secure aggregation and privacy.clipping = 'adaptive', and in no other"
        )
    if distance is None and DISTANCE not in stated:
        distance = 1.0
    elif not (DISTANCE in stated and isinstance(distance, float) and 0 < distance < math.inf):
        raise FederationError(
            f"{DISTANCE!r} must be in the server's message, as a finite number above 0, in a run with secure "
            "aggregation and privacy.server = 'metric', and in no other"
        )
    return {"bound": bound, "distance": distance}


def run_config(context: Context) -> RunConfig:
    """Return the run configuration, parsed once per process.

    If the node has data of its own, the server's data path is removed, so that no task receives it. A task that built
    its model from that path would otherwise reveal the node's files.

    Raises:
        ConfigError: it is invalid.
        FederationError: it is too long, and could exhaust the node's memory.
    """
    length = sum(len(key) + len(str(value)) for key, value in context.run_config.items())
    if length > MAXIMUM_LENGTH:
        raise FederationError(f"the run configuration has {length} characters, at most {MAXIMUM_LENGTH} are read")
    items = tuple(sorted((key, type(value).__name__, value) for key, value in context.run_config.items()))
    return _parsed(items, DATA_PATH in context.node_config)


@lru_cache(maxsize=4)
def _parsed(items: tuple[tuple[str, str, Scalar], ...], has_own_data: bool) -> RunConfig:
    # Types are part of the key: True equals 1, but is a different value of a configuration.
    config = calibrated(parse({key: value for key, _, value in items})).for_clients
    if not has_own_data:
        return config
    return config.model_copy(update={"task": config.task.model_copy(update={"data_path": ""})})


def promised(fields: Mapping[str, object]) -> tuple[Event, ...]:
    """Return the releases of a reply, as the server states them.

    Raises:
        PrivacyError: the statement is no list of releases with noise.
    """
    said = fields.get(PROMISE)
    if said is None:
        return (Unaccounted("the server claims nothing for this round"),)
    try:
        return from_wire(said)
    except PrivacyError as error:
        raise PrivacyError(f"{PROMISE!r} in the server's message: {error}") from None


def refuse_shares_of_noise(promise: Iterable[Event]) -> None:
    """Refuse stated shares of noise in a run in which no client adds one.

    Raises:
        PrivacyError: the server states such a release.
    """
    if any(isinstance(event, DistributedGaussian) for event in promise):
        raise PrivacyError(
            f"{PROMISE!r} in the server's message counts on shares of noise, and this run has no secure aggregation"
        )


def refuse_other_frozen(request: Request, own: str) -> None:
    """Refuse frozen weights that differ from the server's.

    Args:
        request: of the server.
        own: SHA-256 of the frozen weights of this node's model, which depend only on the task's code and files.

    Raises:
        FederationError: the digests differ. The text depends on the server's digest only, and the node's own is logged:
            a task could encode data in its frozen weights.
    """
    if request.frozen != own:
        theirs, ours = (f"SHA-256 {digest[:12]}…" if digest else "none" for digest in (request.frozen, own))
        logger.log(WARNING, "the frozen weights of the model differ: the server has %s, this node has %s", theirs, ours)
        raise FederationError(
            f"the frozen weights of the model are not those of the server, which has {theirs}; install the same "
            "version of the task and of its files"
        )


def refuse_misfit(models: Sequence[NamedArrays], own: NamedArrays) -> None:
    """Refuse models whose arrays differ in kind from this node's own.

    Args:
        models: received from the server.
        own: the arrays of the model that this node would train.

    Raises:
        FederationError: a name, a shape or a dtype differs; the text contains it.
    """
    for model in models:
        if odd := sorted(set(model) ^ set(own)):
            raise FederationError(
                f"array {odd[0]!r} is in only one of the model sent and the model here; are the tasks the same?"
            )
        for name, array in own.items():
            if (model[name].shape, model[name].dtype) != (array.shape, array.dtype):
                raise FederationError(
                    f"array {name!r} must have shape {array.shape} and dtype {array.dtype}, found "
                    f"{model[name].shape} and {model[name].dtype}"
                )


def _models(message: Message, fields: ConfigRecord, config: RunConfig) -> tuple[NamedArrays, ...]:
    """Return the models, after checking their number by the configuration."""
    expected = config.privacy.server.hypotheses or None
    found = fields.get(HYPOTHESES)
    if type(found) is not type(expected) or found != expected:
        told = "no such field" if expected is None else f"{HYPOTHESES} = {expected}"
        raise FederationError(
            f"{HYPOTHESES} = {str(found)[:20]!r} in the server's message contradicts the run configuration, which has "
            f"{told}"
        )
    try:
        arrays = from_record(message.content.array_records[ARRAYS])
    except ValueError as error:
        raise FederationError(f"the server's message holds an array that cannot be read: {error}") from None
    models = [arrays] if expected is None else unstacked(arrays)
    if len(models) != (expected or 1):
        raise FederationError(f"{len(models)} models were found in the server's message, expected {expected}")
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not np.isfinite(array).all():
            raise FederationError(f"array {name!r} in the server's message must hold finite floats")
    return tuple(models)


def _digest(fields: ConfigRecord, name: str) -> str:
    """Return a digest from the message; empty without one."""
    found = fields.get(name, "")
    if isinstance(found, str) and (name not in fields or re.fullmatch("[0-9a-f]{64}", found)):
        return found
    raise FederationError(f"the server's message must carry {name!r} as a SHA-256 digest, or not at all")


def _whole(fields: ConfigRecord, name: str) -> int:
    return int(_number(fields, name, MAXIMUM_WHOLE, whole=True))


def _number(
    fields: ConfigRecord, name: str, maximum: float, default: float | None = None, whole: bool = False
) -> float | int:
    """Return a field that is a number from 0 to `maximum`."""
    value = fields.get(name, default)
    kinds = (int,) if whole else (int, float)
    # Compare the exact type: True is an int, but no number of rounds.
    if isinstance(value, int | float) and type(value) in kinds and 0 <= value <= maximum:
        return value
    kind = "a whole number" if whole else "a number"
    raise FederationError(f"the server's message must carry {name!r} as {kind} from 0 to {maximum:g}")
