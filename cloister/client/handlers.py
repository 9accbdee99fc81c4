"""What a client does with a request: train on its own examples, score the models sent, or keep one of them."""

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
    """Train the model of the request; answer with the trained arrays, the example count and the training loss.

    Where the client protects itself, alone or with others, whatever goes wrong with its data is answered as if it had
    none: with the noise of a model that was not trained. The reason stays in the node's log.
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
    # How many examples there are is an un-noised answer: where the client protects them, only the public size is told.
    metrics: dict[str, float | int] = {EXAMPLES: plan.public_size or len(examples)}
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    return Reply(bench.model.arrays(), metrics, chosen)


def _bench(request: Request) -> Workbench:
    """The workbench of a run, whose model is of the server's kind.

    Raises:
        FederationError: arrays or frozen weights are not the server's.
    """
    bench = workbench_of(request.config)
    refuse_misfit(request.models, bench.model.arrays())
    refuse_other_frozen(request, bench.frozen)
    return bench


def _open(work: Callable[[], T], instead: Callable[[], T]) -> T:
    return work()


def _contained(work: Callable[[], T], instead: Callable[[], T]) -> T:
    """What `work` gives; or where it fails, what `instead` does."""
    try:
        return work()
    except Exception as error:
        told = f": {error}" if isinstance(error, CloisterError) else ""
        trace = trace_without_values(error)
        said = "a step failed on this node; the reply is that of a node without examples, and does not show the failure"
        logger.log(ERROR, "%s%s\n%s", said, told, trace)
        return instead()


def _examples(request: TrainRequest, node: Node) -> Examples:
    """What this client trains on.

    Raises:
        DataError: there is none, or less than the node's policy asks for.
    """
    clips = request.config.privacy.client.clips_gradients
    examples = local_data(request.config.task, node.config, request.seed, tolerant=clips).train
    if clips:
        return examples  # any number is one that it protects
    if len(examples) < max(1, node.policy.min_rows if node.policy else 0):
        raise DataError("this client has no examples to train on, or fewer than its policy asks for")
    return examples


def _nothing(request: TrainRequest) -> Examples:
    """No examples, of the task's shapes."""
    task = task_of(request.config.task)
    labels = np.zeros(0, np.int64 if task.classes else np.float32)
    groups = np.zeros(0, np.int64) if request.config.task.group else None
    return Examples(np.zeros((0, *task.input_shape), np.float32), labels, groups)


def _choice(bench: Workbench, request: TrainRequest, examples: Examples) -> int:
    task = task_of(request.config.task)
    return chosen_to_train(request.config.privacy, bench.model, request.models, task, examples)


def evaluate(request: EvaluateRequest, node: Node) -> Reply:
    """Score the model of the request on the examples kept back; answer with the scores and how many there were.

    A client that never trains has kept all of them back. Of several hypotheses it scores the one that suits its other
    examples best; where there are no others, the one that suits these.

    Raises:
        DataError: there are no examples to score with.
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
    """Save the final hypothesis that suits this client best in the `model-dir` of its node, and tell nobody which.

    Where the client protects itself, or its node has a policy or a limit, nor does anybody hear whether that failed.
    """
    if node.config.model_dir:
        _bench(request)
        silent = _is_protected(request) or node.policy or node.config.has_limit
        attempt = _contained if silent else _open
        attempt(lambda: _save_best(request, node), lambda: None)
    return Reply()


def _is_protected(request: Request) -> bool:
    """Whether clients of this run protect themselves, alone or with others: then no failure may tell of their data."""
    return request.config.privacy.client.is_on or request.config.secure_aggregation.enabled


def _save_best(request: KeepRequest, node: Node) -> None:
    config, model, place = request.config, workbench_of(request.config).model, expanded(node.config.model_dir)
    tolerant = config.privacy.client.clips_gradients
    data = local_data(config.task, node.config, request.seed, tolerant)
    best(model, request.models, task_of(config.task), data.train)
    place.mkdir(parents=True, exist_ok=True)
    model.save(place / f"model{model.suffix}")
    (place / "config.json").write_text(json.dumps({"config": config.flat()}, indent=2) + "\n")
