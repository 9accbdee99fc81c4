"""Model of a run and its trainer, built together once per process."""

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
    """Model of a run, with a trainer that is created at its first use.

    Both have the same lifetime, so that a trainer never trains a discarded model.

    Args:
        task, client, privacy: of the run configuration.
    """

    def __init__(self, task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> None:
        self._task, self._client, self._privacy = task_of(task), client, privacy
        self._group_cap = privacy.dp_sgd.group_cap if task.group else 1
        self.model: Model = model_of(self._task)

    @cached_property
    def frozen(self) -> str:
        """Return the SHA-256 of weights neither trained nor sent; empty without any."""
        return frozen_digest(self.model)

    @cached_property
    def trainer(self) -> Trainer:
        """Return the trainer of the model, with the configured optimizer.

        Raises:
            ConfigError: the task does not permit this training; or the optimizer is unknown, or incompatible with the
                model.
            UnsupportedModel: the run protects examples, and the model has no gradients of single examples.
        """
        recipe = recipe_of(self._task, self._client, self._privacy)
        if not self._privacy.client.clips_gradients:
            return TRAINERS.load(self.model.kind)(self.model, recipe)
        return PRIVATE_TRAINERS.load(self.model.kind)(self.model, recipe, self._privacy, self._group_cap)

    def prepare(self) -> None:
        """Create the trainer; raises the exceptions of `trainer`."""
        _ = self.trainer


def workbench_of(config: RunConfig) -> Workbench:
    """Return the workbench of a run, cached for later messages."""
    return _made(config.task, config.client, config.privacy)


@lru_cache(maxsize=1)
def _made(task: TaskConfig, client: ClientConfig, privacy: PrivacyConfig) -> Workbench:
    return Workbench(task, client, privacy)
