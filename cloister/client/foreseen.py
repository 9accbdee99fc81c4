"""The training that a secure aggregation leads to, as far as it is known when its first step is asked for."""

from cloister.client.request import ProtocolRequest, TrainRequest
from cloister.client.workbench import workbench_of
from cloister.config.secure import shared_mean
from cloister.core.arrays import Layout


def foreseen(request: ProtocolRequest) -> TrainRequest:
    """The training request of the same round, with the release that this node's share of the noise amounts to.

    Args:
        request: for the first step.
    """
    arrays = workbench_of(request.config).model.arrays()
    promise = shared_mean(request.config).events(Layout.of(arrays))
    return TrainRequest(
        config=request.config,
        run=request.run,
        round=request.round,
        seed=request.seed,
        models=(arrays,),
        promise=promise,
        bound=request.bound,
        distance=request.distance,
    )
