"""Reply of a node to a message, and the ClientApp that Flower loads.

A message passes Flower's mods first: `open_and_pack` opens a packed message and packs its reply. The other mods read
no content: `no_sooner_than`, `contain_errors`, `within_deadline`. Then `request_of` and `Node.of` parse the request
and read the node, or refuse the message, and `reply_to` replies.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import ERROR
from typing import TypeVar

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cloister.client.budget import foresee_budget, keep_budget, keep_role
from cloister.client.costs import PrivacyCost, plan_of, public_units, unit_of
from cloister.client.data import local_data, task_of, tell_ungrouped
from cloister.client.enforce import enforce_policy
from cloister.client.mods import contain_errors, no_sooner_than, open_and_pack, within_deadline
from cloister.client.node import Node
from cloister.client.noise import add_local_noise, count_leakage, limit_leakage
from cloister.client.policy import CHECKED_BUNDLE
from cloister.client.request import (
    AnyRequest,
    EvaluateRequest,
    KeepRequest,
    NamedArrays,
    ProtocolRequest,
    Reply,
    Request,
    TrainRequest,
    refuse_misfit,
    refuse_other_frozen,
    request_of,
)
from cloister.client.secure import mask_update, open_masks, take_part
from cloister.client.trainers import ModelAndTrainer, SumsGradients, best, chosen_to_train, model_and_trainer_of
from cloister.privacy.claims.premises import Attestation
from cloister.tasks.base import Examples, KeepsState, OnDevice
from cloister.utils.arrays import from_record, to_record
from cloister.utils.crash import note_failure, trace_without_values
from cloister.utils.errors import CloisterError, DataError, PrivacyError, UnsupportedModel
from cloister.utils.files import expanded
from cloister.utils.wire import EXAMPLES, SECURE, TRAIN_LOSS

T = TypeVar("T")
logger = logging.getLogger("cloister.client")
STATISTICS = "statistics"
"""Record in the state of a node: the statistics of its model that stay there from round to round."""
Work = Callable[[AnyRequest, Node], Reply]
"""Computation of a reply, without any protection: training, evaluation, or a step of secure aggregation."""


def reply_to(request: AnyRequest, node: Node, work: Work[AnyRequest]) -> Reply:
    """Return the reply to a request, after the refusals and the charge.

    No data is read before every rule of the policy that needs none allows the request. No reply is computed before
    all budgets of the node cover it and its ledger contains its releases. DP-SGD is within `work`; the bound and the
    noise on a whole update follow it.

    Args:
        request: of the server.
        node: that replies.
        work: computes the reply.

    Raises:
        CloisterError: the request is refused, or the node abstains.
    """
    refuse_scores(request)
    enforce_policy(request, node)
    if isinstance(request, ProtocolRequest):  # a step of secure aggregation that involves no training
        limit_leakage(request, node)
        foresee_budget(request, node)
        return work(request, node)
    masks = open_masks(request, node)
    keep_role(request, node)
    limit_leakage(request, node)
    with keep_budget(request, node) as charged:  # the ledger comes before the release
        count_leakage(request, node)
        reply = work(request, node)
        reply = add_local_noise(reply, request, node)
    reply = mask_update(reply, masks, request, node)
    return attest(only_what_is_agreed(reply, request), charged, request, node)


def refuse_scores(request: Request) -> None:
    """Refuse to send scores if the configuration evaluates on no client.

    Raises:
        PrivacyError: the request asks for scores in a run that has none.
    """
    if isinstance(request, EvaluateRequest) and not request.config.evaluates_on_clients:
        raise PrivacyError("scores may not leave this node in this run: its configuration evaluates on no client")


def only_what_is_agreed(reply: Reply, request: Request) -> Reply:
    """Return the agreed parts of a reply.

    In a private run training metrics stay on the node, since they carry no noise. The example count leaves only if the
    strategy weights clients by it. The run's report lists it.
    """
    config = request.config
    if isinstance(request, EvaluateRequest):
        return Reply(metrics=reply.metrics)
    if not isinstance(request, TrainRequest):
        return Reply()
    if not config.is_private:
        return Reply(reply.arrays, dict(reply.metrics))
    counted = config.weights_by_examples and EXAMPLES in reply.metrics
    return Reply(reply.arrays, {EXAMPLES: reply.metrics[EXAMPLES]} if counted else {})


def attest(reply: Reply, charged: Sequence[PrivacyCost], request: Request, node: Node) -> Reply:
    """State with a trained model what the client's own mechanism released; return every other reply as it is.

    The statement follows from the request, the policy and the configuration of the node. It depends on no example.

    Args:
        reply: to the request.
        charged: the costs that were recorded for this reply; one is about the stated unit.
        request: of the server.
        node: that replies.
    """
    client = request.config.privacy.client
    if not isinstance(request, TrainRequest) or not client.is_on:
        return reply
    # DP-SGD is about units; noise on the whole update is about the client, which comes first.
    unit = unit_of(request, node) if client.clips_gradients else "client"
    (own,) = (cost for cost in charged if cost.unit == unit)
    size = public_units(request, node) if client.clips_gradients else 0
    allowed = node.policy.allowed_fabs if node.policy else ()
    checked = os.environ.get(CHECKED_BUNDLE) in allowed
    attestation = Attestation(client.name, own.unit, own.events, size, request.config.task.group, checked)
    return replace(reply, attestation=attestation)


def train(request: TrainRequest, node: Node) -> Reply:
    """Train the model; reply with arrays, example count and training loss.

    If the run uses client-side protection or secure aggregation, failures with the data stay hidden. The reply then
    equals that of a client without examples, and contains the noise on a model that was not trained. The node logs the
    reason.
    """
    if request.config.sums_gradients:
        return _summed(request, node)
    bench = _bench(request, node)
    trainer, plan = bench.trainer, plan_of(request, node)
    attempt = _contained if _is_protected(request) else _open
    examples = attempt(lambda: _examples(request, node), lambda: _nothing(request))
    chosen = attempt(lambda: _choice(bench, request, examples), lambda: _choice(bench, request, _nothing(request)))
    start = request.models[chosen]

    def trained_on(data: Examples) -> float | None:
        bench.model.assign(start)
        if not len(data) and not request.config.privacy.client.clips_gradients:
            return None
        loss = trainer.fit(data, plan)
        if isinstance(bench.model, KeepsState) and (own := bench.model.kept()):
            node.state[STATISTICS] = to_record(own)
        return loss

    loss = attempt(lambda: trained_on(examples), lambda: trained_on(_nothing(request)))
    # The number of examples is not noised: if the client protects them, the reply contains the public size instead.
    metrics: dict[str, float | int] = {EXAMPLES: plan.public_size or len(examples)}
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    return Reply(bench.model.arrays(), metrics, chosen)


def _summed(request: TrainRequest, node: Node) -> Reply:
    """Return the clipped sum of gradients for one step of DP-SGD, for `mask_update`, and no metric.

    If it fails, the sum is that of a client without examples: 0.
    """
    bench, plan, (start,) = _bench(request, node), plan_of(request, node), request.models
    trainer = bench.trainer
    if not isinstance(trainer, SumsGradients):
        raise UnsupportedModel(f"a model of kind {bench.model.kind!r} has no sum of gradients for secure aggregation")

    def summed(data: Examples) -> NamedArrays:
        bench.model.assign(start)
        return trainer.summed(data, plan)

    examples = _contained(lambda: _examples(request, node), lambda: _nothing(request))
    return Reply(sums=_contained(lambda: summed(examples), lambda: summed(_nothing(request))))


def _bench(request: Request, node: Node) -> ModelAndTrainer:
    """Return the workbench of a run after verifying the models of the request, with the statistics of the node.

    Raises:
        FederationError: arrays or frozen weights differ from the server's.
        NodeConfigError: the node lacks the device of its configuration.
    """
    bench = model_and_trainer_of(request.config)
    if isinstance(bench.model, OnDevice):
        bench.model.move(node.config.device)
    refuse_misfit(request.models, bench.model.arrays())
    refuse_other_frozen(request, bench.frozen)
    if isinstance(bench.model, KeepsState) and bench.model.kept():
        # All simulated nodes share the model: a node without statistics begins with those of a new model.
        found = node.state.array_records.get(STATISTICS)
        bench.model.assign_kept(None if found is None else from_record(found))
    return bench


def _open(work: Callable[[], T], instead: Callable[[], T]) -> T:
    return work()


def _contained(work: Callable[[], T], instead: Callable[[], T]) -> T:
    """Return the result of `work`; on failure, log it and return `instead()`."""
    try:
        return work()
    except Exception as error:
        text = note_failure(error)
        told = str(error) if isinstance(error, CloisterError) else text
        trace = trace_without_values(error)
        said = "a step failed on this node; the reply is that of a node without examples, and does not show the failure"
        logger.log(ERROR, "%s%s\n%s", said, f": {told}" if told else "", trace)
        return instead()


def _examples(request: TrainRequest, node: Node) -> Examples:
    """Return the training examples of this client.

    Raises:
        DataError: there are none, or fewer than the node's policy requires.
    """
    clips = request.config.privacy.client.clips_gradients
    examples = local_data(request.config.task, node.config, request.seed, tolerant=clips).train
    if clips:
        tell_ungrouped(request.config.task)
        return examples  # DP-SGD protects any number
    if len(examples) < max(1, node.policy.min_rows if node.policy else 0):
        raise DataError("this client has no examples to train on, or fewer than its policy asks for")
    return examples


def _nothing(request: TrainRequest) -> Examples:
    """Return an empty set of examples in the task's shapes."""
    task = task_of(request.config.task)
    return replace(task.placeholders(0), groups=np.zeros(0, np.int64) if request.config.task.group else None)


def _choice(bench: ModelAndTrainer, request: TrainRequest, examples: Examples) -> int:
    task = task_of(request.config.task)
    return chosen_to_train(request.config.privacy, bench.model, request.models, task, examples)


def evaluate(request: EvaluateRequest, node: Node) -> Reply:
    """Evaluate the model on held-out examples; reply with metrics and count.

    A held-out client without a test split evaluates on all of its examples. Of several hypotheses the client evaluates
    the one of least loss on its training examples, or on the evaluated ones if it has no others.

    Raises:
        DataError: there are no examples for evaluation.
    """
    config, task = request.config, task_of(request.config.task)
    data = local_data(config.task, node.config, request.seed)
    test = data.test if len(data.test) or not config.evaluation.held_out_clients else data.train
    if not len(test):
        raise DataError("this client keeps no examples back to score with; raise task.test-fraction")
    model = _bench(request, node).model
    best(model, request.models, task, data.train if len(data.train) else test)
    found = task.metrics(test.y, model.predict(test.x))
    # A metric that these examples do not define, such as the AUC of one class, must not cost the others.
    defined = {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}
    return Reply(metrics={EXAMPLES: len(test), **defined})


def keep_personal(request: KeepRequest, node: Node) -> Reply:
    """Save the final hypothesis of least loss, with the node's own statistics, in the node's `model-dir`.

    The server does not learn which one it is. If the run protects the client, or the node has a policy or a limit, a
    failure stays hidden from the server too.
    """
    if node.config.model_dir:
        _bench(request, node)
        silent = _is_protected(request) or node.policy or node.config.has_limit
        attempt = _contained if silent else _open

        def save() -> None:
            config, place = request.config, expanded(node.config.model_dir)
            model = model_and_trainer_of(config).model
            data = local_data(config.task, node.config, request.seed, config.privacy.client.clips_gradients)
            best(model, request.models, task_of(config.task), data.train)
            place.mkdir(parents=True, exist_ok=True)
            model.save(place / f"model{model.suffix}")
            (place / "config.json").write_text(json.dumps({"config": config.flat()}, indent=2) + "\n")

        attempt(save, lambda: None)
    return Reply()


def _is_protected(request: Request) -> bool:
    """Return whether clients have their own mechanism or secure aggregation."""
    return request.config.privacy.client.is_on or request.config.secure_aggregation.enabled


def answered_by(kind: type[AnyRequest], work: Work[AnyRequest]) -> Callable[[Message, Context], Message]:
    """Return Flower's handler: parse a request, return the reply's content."""

    def answer(message: Message, context: Context) -> Message:
        reply = reply_to(request_of(kind, message, context), Node.of(context), work)
        return Message(reply.content(), reply_to=message)

    return answer


app = ClientApp(mods=[open_and_pack, no_sooner_than, contain_errors, within_deadline])
app.train()(answered_by(TrainRequest, train))
app.evaluate()(answered_by(EvaluateRequest, evaluate))
app.query()(answered_by(KeepRequest, keep_personal))
app.query(SECURE.partition(".")[2])(answered_by(ProtocolRequest, take_part))
