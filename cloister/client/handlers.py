"""What a client does with a message: train on its own examples, or score the global model on those it kept back."""

import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from cloister.client.data import PARTITION, local_data, owner_of, task_of
from cloister.client.plan import PublicSettings, TrainingPlan, batch_size_of
from cloister.client.trainers import TRAINERS, Trainer
from cloister.core.arrays import from_record, to_record
from cloister.core.config import PrivacyConfig, RunConfig, TaskConfig, parse
from cloister.core.errors import DataError
from cloister.core.hypotheses import unstacked
from cloister.core.wire import ARRAYS, CHOSEN, CONFIG, EXAMPLES, HYPOTHESES, METRICS, TRAIN_LOSS
from cloister.tasks.base import Examples, Model, Task

MODELS = "model-dir"
"""Where a node keeps its personal model, in its configuration."""


def train(message: Message, context: Context) -> Message:
    """Train the model of the message; reply with the trained arrays, the example count and the training loss."""
    config = run_config(context)
    examples, plan = examples_and_plan(message, context)
    model = model_of(config.task)
    chosen = take_best(model, hypotheses_of(message), task_of(config.task), examples)
    loss = trainer_of(config).fit(examples, plan)
    metrics = MetricRecord({EXAMPLES: len(examples), CHOSEN: chosen})
    if loss is not None:
        metrics[TRAIN_LOSS] = loss
    return Message(RecordDict({ARRAYS: to_record(model.arrays()), METRICS: metrics}), reply_to=message)


def examples_and_plan(message: Message, context: Context) -> tuple[Examples, TrainingPlan]:
    """What a training message makes this client train on, and how.

    Raises:
        DataError: the client has no examples.
        FederationError: the message lacks what every client is told.
    """
    config = run_config(context)
    public = PublicSettings.of(message.content.config_records[CONFIG])
    examples = local_data(config.task, context.node_config, public.seed).train
    if not len(examples):
        raise DataError("this client has no examples to train on")
    return examples, TrainingPlan.of(config.client, task_of(config.task).recipe, public, _shuffler(context))


def _shuffler(context: Context) -> int:
    """What makes this client's shuffles its own: its partition, or its id where it has data of its own."""
    return owner_of(context.node_config) if PARTITION in context.node_config else context.node_id


def evaluate(message: Message, context: Context) -> Message:
    """Score the model of the message on the examples kept back; reply with the scores and how many there were.

    A client that never trains has kept all of them back. Of several hypotheses it scores the one that suits its other
    examples best; where there are no others, the one that suits these.
    """
    config = run_config(context)
    public = PublicSettings.of(message.content.config_records[CONFIG])
    data = local_data(config.task, context.node_config, public.seed)
    test = data.test if len(data.test) or not config.evaluation.held_out_clients else data.train
    if not len(test):
        raise DataError("this client keeps no examples back to score with; raise task.test-fraction")
    model = model_of(config.task)
    take_best(model, hypotheses_of(message), task_of(config.task), data.train if len(data.train) else test)
    scores = task_of(config.task).metrics(test.y, model.predict(test.x))
    return Message(RecordDict({METRICS: MetricRecord({EXAMPLES: len(test), **scores})}), reply_to=message)


def keep_personal(message: Message, context: Context) -> Message:
    """Save the final hypothesis that suits this client best in the `model-dir` of its node, and tell nobody which."""
    config, folder = run_config(context), context.node_config.get(MODELS)
    if folder:
        public = PublicSettings.of(message.content.config_records[CONFIG])
        data, model = local_data(config.task, context.node_config, public.seed), model_of(config.task)
        take_best(model, hypotheses_of(message), task_of(config.task), data.train)
        place = Path(str(folder)).expanduser()
        place.mkdir(parents=True, exist_ok=True)
        model.save(place / f"model{model.suffix}")
        (place / "config.json").write_text(json.dumps({"config": config.flat()}, indent=2) + "\n")
    return Message(RecordDict(), reply_to=message)


def hypotheses_of(message: Message) -> list[dict[str, NDArray]]:
    """The models that a message carries: one, or as many as it says."""
    arrays = from_record(message.content.array_records[ARRAYS])
    return unstacked(arrays) if message.content.config_records[CONFIG].get(HYPOTHESES) else [arrays]


def take_best(model: Model, hypotheses: list[dict[str, NDArray]], task: Task, examples: Examples) -> int:
    """Put the hypothesis of least loss on these examples into the model; which one it is."""
    losses = [0.0]
    if len(hypotheses) > 1:
        losses = [_loss(model, hypothesis, task, examples) for hypothesis in hypotheses]
    chosen = int(np.argmin(losses))
    model.assign(hypotheses[chosen])
    return chosen


def _loss(model: Model, hypothesis: dict[str, NDArray], task: Task, examples: Examples) -> float:
    """∞ for a hypothesis that has diverged: it suits nobody."""
    model.assign(hypothesis)
    loss = task.metrics(examples.y, model.predict(examples.x))["loss"]
    return loss if math.isfinite(loss) else math.inf


def run_config(context: Context) -> RunConfig:
    """The run configuration, parsed once per process."""
    return _parsed(tuple(sorted(context.run_config.items())))


@lru_cache(maxsize=4)
def _parsed(items: tuple[tuple[str, str | int | float | bool], ...]) -> RunConfig:
    return parse(dict(items))


@lru_cache(maxsize=1)
def model_of(config: TaskConfig) -> Model:
    """The model that every message of this process is trained in: building and compiling it once is enough."""
    model: Model = task_of(config).build()
    return model


def trainer_of(config: RunConfig) -> Trainer:
    """The trainer of the run's model, with the optimizer it names."""
    recipe, optimizer = task_of(config.task).recipe, config.client.optimizer
    optimizer = recipe.optimizer if optimizer == "auto" else optimizer
    if config.privacy.client == "dp-sgd":
        return _private_trainer(config.task, optimizer, batch_size_of(config.client, recipe), config.privacy)
    return _trainer(config.task, optimizer)


@lru_cache(maxsize=1)
def _trainer(config: TaskConfig, optimizer: str) -> Trainer:
    model = model_of(config)
    trainer: Trainer = TRAINERS.load(model.kind)(model, optimizer)
    return trainer


@lru_cache(maxsize=1)
def _private_trainer(config: TaskConfig, optimizer: str, batch_size: int, privacy: PrivacyConfig) -> Trainer:
    model = model_of(config)
    trainer: Trainer = TRAINERS.load(f"{model.kind}-dp-sgd")(model, optimizer, batch_size, privacy)
    return trainer
