"""The model of a run and the trainer that was made for it: built once per process, and never apart."""

from functools import cached_property, lru_cache

from cloister.client.data import task_of
from cloister.client.training.private_trainers import PRIVATE_TRAINERS
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import ClientConfig, RunConfig, TaskConfig
from cloister.tasks.base import Model
from cloister.tasks.frozen import frozen_digest
from cloister.tasks.making import model_of
from cloister.tasks.training.recipe import recipe_of
from cloister.tasks.training.trainers import TRAINERS, Trainer


class Workbench:
    """A model, and its trainer as soon as somebody trains.

    Both live and go together: a trainer that outlived its model would train one that nobody reads.

    Args:
        task, client, privacy: of the run configuration.
    """

    def __init__(self, task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> None:
        self._task, self._client, self._privacy = task_of(task), client, privacy
        self._group_cap = privacy.dp_sgd.group_cap if task.group else 1
        self.model: Model = model_of(self._task)

    @cached_property
    def frozen(self) -> str:
        """SHA-256 of the weights that are neither trained nor sent; empty without any."""
        return frozen_digest(self.model)

    @cached_property
    def trainer(self) -> Trainer:
        """Trains the model in place, with the optimizer that the run names.

        Raises:
            ConfigError: the task cannot be trained so; or the optimizer is unknown, or does not go with the model.
            UnsupportedModel: the run protects examples, and this model's have no gradients of their own.
        """
        recipe = recipe_of(self._task, self._client, self._privacy)
        if not self._privacy.client.clips_gradients:
            return TRAINERS.load(self.model.kind)(self.model, recipe)
        return PRIVATE_TRAINERS.load(self.model.kind)(self.model, recipe, self._privacy, self._group_cap)

    def prepare(self) -> None:
        """Make the trainer now; raises what `trainer` does."""
        _ = self.trainer


def workbench_of(config: RunConfig) -> Workbench:
    """The workbench of a run; the last one is kept for the messages that follow."""
    return _made(config.task, config.client, config.privacy)


@lru_cache(maxsize=1)
def _made(task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> Workbench:
    return Workbench(task, client, privacy)
