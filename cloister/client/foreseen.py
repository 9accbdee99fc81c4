"""Training request that a secure aggregation leads to, with the releases by this node's own roster."""

from dataclasses import replace

from cloister.client.node import Node
from cloister.client.request import ProtocolRequest, TrainRequest
from cloister.client.signing import identity
from cloister.client.workbench import workbench_of
from cloister.config.secure import shared_mean
from cloister.core.arrays import Layout


def foreseen(request: ProtocolRequest) -> TrainRequest:
    """Return the training request of the same round.

    Its release is that by this node's share of the noise.

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


def by_own_roster(request: TrainRequest, node: Node) -> TrainRequest:
    """Return the request with this node's own releases.

    They depend on who made the members' keys. The provisioner can act as the members whose keys it made. If they exceed
    the configured number of colluding members, the node counts on its own share of the noise only.

    Args:
        request: of the server.
        node: that replies. One without a signing key is simulated, or refuses the next step.

    Raises:
        NodeConfigError, PolicyError: as `identity`.
    """
    who = identity(node.config) if request.config.secure_aggregation.enabled else None
    names = who.roster.by_provisioner if who else ()
    if len(names) <= request.config.secure_aggregation.colluding:
        return request
    layout = Layout.of(request.models[0])
    releases = shared_mean(request.config).events(layout, by_provisioner=len(names))
    return replace(request, promise=releases, by_provisioner=names)
