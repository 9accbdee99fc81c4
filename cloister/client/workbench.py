"""The model of a run and the trainer that was made for it: built once per process, and never apart."""

from functools import cached_property, lru_cache

from cloister.client.data import task_of
from cloister.client.training.private_trainers import PRIVATE_TRAINERS
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import ClientConfig, RunConfig, TaskConfig
from cloister.tasks.base import Model
from cloister.tasks.making import model_of
from cloister.tasks.training.trainers import TRAINERS, Trainer


class Workbench:
    """A model, and its trainer as soon as somebody trains.

    Both live and go together: a trainer that outlived its model would train one that nobody reads.

    Args:
        task, client, privacy: of the run configuration.
    """

    def __init__(self, task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> None:
        self._recipe, self._privacy = task_of(task).recipe.resolved(client), privacy
        self._group_cap = privacy.dp_sgd.group_cap if task.group else 1
        self.model: Model = model_of(task_of(task))

    @cached_property
    def trainer(self) -> Trainer:
        """Trains the model in place, with the optimizer that the run names.

        Raises:
            ConfigError: the optimizer is unknown, or does not go with the model.
            UnsupportedModel: the run protects examples, and this model's have no gradients of their own.
        """
        optimizer = self._recipe.optimizer
        if not self._privacy.client.clips_gradients:
            return TRAINERS.load(self.model.kind)(self.model, optimizer)
        make = PRIVATE_TRAINERS.load(self.model.kind)
        return make(self.model, optimizer, self._recipe.batch_size, self._privacy, self._group_cap)

    def prepare(self) -> None:
        """Make the trainer now; raises what `trainer` does."""
        _ = self.trainer


def workbench_of(config: RunConfig) -> Workbench:
    """The workbench of a run; the last one is kept for the messages that follow."""
    return _made(config.task, config.client, config.privacy)


@lru_cache(maxsize=1)
def _made(task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> Workbench:
    return Workbench(task, client, privacy)
