"""Training plan of a client for one round, from the run configuration, the task and the server's message."""

from cloister.client.request import TrainRequest
from cloister.tasks.base import Task
from cloister.tasks.training.augmentation import Augmentation
from cloister.tasks.training.plan import TrainingPlan
from cloister.tasks.training.recipe import recipe_of
from cloister.tasks.training.schedule import Schedule


def requested_plan(request: TrainRequest, task: Task, owner: int, public_size: int = 0) -> TrainingPlan:
    """Return the plan of a message, with the recipe as default of `client.*`.

    Args:
        request: of the server.
        task: of the run.
        owner: number of the client, so that clients shuffle independently.
        public_size: of the node's data.

    Raises:
        ConfigError: the task cannot be trained with these settings.
    """
    config = request.config
    recipe = recipe_of(task, config.client, config.privacy)
    return TrainingPlan.of(
        recipe,
        (request.seed, request.round, owner),
        proximal_mu=request.proximal_mu,
        round=request.round,
        public_size=public_size,
        schedule=Schedule.of(recipe, config.num_rounds),
        augmentation=Augmentation.of(task, recipe),
    )
