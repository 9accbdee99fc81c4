"""Removal of everything from a reply that the run has not agreed on."""

from cloister.client.mods.enforce import Handler
from cloister.client.node import Node
from cloister.client.request import EvaluateRequest, Reply, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.core.wire import EXAMPLES


def only_what_is_agreed(request: Request, node: Node, call_next: Handler) -> Reply:
    """Keep the agreed parts of a reply; refuse scores that were not agreed.

    In a private run training metrics stay on the node, since they carry no noise. The example count leaves only if the
    strategy weights clients by it. Scores leave only if the configuration evaluates on clients. The run's report lists
    both.

    Raises:
        PrivacyError: the request asks for scores in a run that has none.
    """
    config = request.config
    if isinstance(request, EvaluateRequest) and not config.evaluates_on_clients:
        raise PrivacyError("scores may not leave this node in this run: its configuration evaluates on no client")
    reply = call_next(request, node)
    if isinstance(request, TrainRequest):
        return Reply(reply.arrays, _agreed(reply, request))
    return Reply(metrics=reply.metrics) if isinstance(request, EvaluateRequest) else Reply()


def _agreed(reply: Reply, request: TrainRequest) -> dict[str, float | int]:
    """Return the agreed metrics of a training reply.

    These are all, the example count, or none.
    """
    config = request.config
    if not config.is_private:
        return dict(reply.metrics)
    counted = config.weights_by_examples and EXAMPLES in reply.metrics
    return {EXAMPLES: reply.metrics[EXAMPLES]} if counted else {}
