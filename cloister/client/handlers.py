"""Request handlers of a client: train on its own examples, evaluate the models, or save one of them."""

import json
import logging
from collections.abc import Callable
from logging import ERROR
from typing import TypeVar

import numpy as np

from cloister.client.charges import plan_of
from cloister.client.choice import best, chosen_to_train
from cloister.client.data import local_data, task_of
from cloister.client.node import Node
from cloister.client.request import (
    EvaluateRequest,
    KeepRequest,
    Reply,
    Request,
    TrainRequest,
    refuse_misfit,
    refuse_other_frozen,
)
from cloister.client.workbench import Workbench, workbench_of
from cloister.core.crash import trace_without_values
from cloister.core.errors import CloisterError, DataError
from cloister.core.files import expanded
from cloister.core.wire import EXAMPLES, TRAIN_LOSS
from cloister.tasks.base import Examples

T = TypeVar("T")
logger = logging.getLogger("cloister.client")


def train(request: TrainRequest, node: Node) -> Reply:
    """Train the model; reply with arrays, example count and training loss.

    If the run uses client-side protection or secure aggregation, failures with the data stay hidden. The reply then
    equals that of a client without examples, and contains the noise on a model that was not trained. The node logs the
    reason.
    """
    bench = _bench(request)
    trainer, plan = bench.trainer, plan_of(request, node)
    attempt = _contained if _is_protected(request) else _open
    examples = attempt(lambda: _examples(request, node), lambda: _nothing(request))
    chosen = attempt(lambda: _choice(bench, request, examples), lambda: _choice(bench, request, _nothing(request)))
    start = request.models[chosen]

    def trained_on(data: Examples) -> float | None:
        bench.model.assign(start)
        return trainer.fit(data, plan) if len(data) or request.config.privacy.client.clips_gradients else None

    loss = attempt(lambda: trained_on(examples), lambda: trained_on(_nothing(request)))
    # The number of examples is not noised: if the client protects them, the reply contains the public size instead.
    metrics: dict[str, float | int] = {EXAMPLES: plan.public_size or len(examples)}
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    return Reply(bench.model.arrays(), metrics, chosen)


def _bench(request: Request) -> Workbench:
    """Return the workbench of a run after verifying the models of the request.

    Raises:
        FederationError: arrays or frozen weights differ from the server's.
    """
    bench = workbench_of(request.config)
    refuse_misfit(request.models, bench.model.arrays())
    refuse_other_frozen(request, bench.frozen)
    return bench


def _open(work: Callable[[], T], instead: Callable[[], T]) -> T:
    return work()


def _contained(work: Callable[[], T], instead: Callable[[], T]) -> T:
    """Return the result of `work`; on failure, log it and return `instead()`."""
    try:
        return work()
    except Exception as error:
        told = f": {error}" if isinstance(error, CloisterError) else ""
        trace = trace_without_values(error)
        said = "a step failed on this node; the reply is that of a node without examples, and does not show the failure"
        logger.log(ERROR, "%s%s\n%s", said, told, trace)
        return instead()


def _examples(request: TrainRequest, node: Node) -> Examples:
    """Return the training examples of this client.

    Raises:
        DataError: there are none, or fewer than the node's policy requires.
    """
    clips = request.config.privacy.client.clips_gradients
    examples = local_data(request.config.task, node.config, request.seed, tolerant=clips).train
    if clips:
        return examples  # DP-SGD protects any number
    if len(examples) < max(1, node.policy.min_rows if node.policy else 0):
        raise DataError("this client has no examples to train on, or fewer than its policy asks for")
    return examples


def _nothing(request: TrainRequest) -> Examples:
    """Return an empty set of examples in the task's shapes."""
    task = task_of(request.config.task)
    labels = np.zeros(0, np.int64 if task.classes else np.float32)
    groups = np.zeros(0, np.int64) if request.config.task.group else None
    return Examples(np.zeros((0, *task.input_shape), np.float32), labels, groups)


def _choice(bench: Workbench, request: TrainRequest, examples: Examples) -> int:
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
    model = _bench(request).model
    best(model, request.models, task, data.train if len(data.train) else test)
    return Reply(metrics={EXAMPLES: len(test), **task.metrics(test.y, model.predict(test.x))})


def keep_personal(request: KeepRequest, node: Node) -> Reply:
    """Save the final hypothesis of least loss in the node's `model-dir`.

    The server does not learn which one it is. If the run protects the client, or the node has a policy or a limit, a
    failure stays hidden from the server too.
    """
    if node.config.model_dir:
        _bench(request)
        silent = _is_protected(request) or node.policy or node.config.has_limit
        attempt = _contained if silent else _open

        def save() -> None:
            config, model, place = request.config, workbench_of(request.config).model, expanded(node.config.model_dir)
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
