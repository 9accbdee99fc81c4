"""What a client does with a message: train on its own examples, or score the global model on those it kept back."""

from functools import lru_cache

from flwr.app import Context, Message, MetricRecord, RecordDict

from cloister.client.data import PARTITION, local_data, owner_of, task_of
from cloister.client.plan import PublicSettings, TrainingPlan, batch_size_of
from cloister.client.trainers import TRAINERS, Trainer
from cloister.core.arrays import from_record, to_record
from cloister.core.config import PrivacyConfig, RunConfig, TaskConfig, parse
from cloister.core.errors import DataError
from cloister.core.wire import ARRAYS, CONFIG, EXAMPLES, METRICS, TRAIN_LOSS
from cloister.tasks.base import Examples, Model


def train(message: Message, context: Context) -> Message:
    """Train the model of the message; reply with the trained arrays, the example count and the training loss."""
    config = run_config(context)
    examples, plan = examples_and_plan(message, context)
    model = model_of(config.task)
    model.assign(from_record(message.content.array_records[ARRAYS]))
    loss = trainer_of(config).fit(examples, plan)
    metrics = MetricRecord({EXAMPLES: len(examples)})
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
    """Score the model of the message on the examples kept back; reply with the scores and how many there were."""
    config = run_config(context)
    public = PublicSettings.of(message.content.config_records[CONFIG])
    test = local_data(config.task, context.node_config, public.seed).test
    if not len(test):
        raise DataError("this client keeps no examples back to score with; raise task.test-fraction")
    model = model_of(config.task)
    model.assign(from_record(message.content.array_records[ARRAYS]))
    scores = task_of(config.task).metrics(test.y, model.predict(test.x))
    return Message(RecordDict({METRICS: MetricRecord({EXAMPLES: len(test), **scores})}), reply_to=message)


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
