"""How a client trains in one round, put together from the run configuration, the task and the server's message."""

from cloister.client.request import TrainRequest
from cloister.tasks.base import Recipe
from cloister.tasks.training.plan import TrainingPlan


def requested_plan(request: TrainRequest, recipe: Recipe, owner: int, public_size: int = 0) -> TrainingPlan:
    """What a message asks for: `client.*` where it says something, the task's recipe where it does not.

    Args:
        request: of the server.
        recipe: the task's.
        owner: which client this is, so that clients shuffle independently.
        public_size: of the node's data.
    """
    return TrainingPlan.of(
        recipe.resolved(request.config.client),
        (request.seed, request.round, owner),
        proximal_mu=request.proximal_mu,
        round=request.round,
        public_size=public_size,
    )
