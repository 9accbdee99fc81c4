"""The last look at a reply before it leaves."""

from cloister.client.mods.enforce import Handler
from cloister.client.node import Node
from cloister.client.request import EvaluateRequest, Reply, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.core.wire import EXAMPLES


def only_what_is_agreed(request: Request, node: Node, call_next: Handler) -> Reply:
    """Drop from a reply what this run has no use for; refuse to send what nobody is to see.

    Under a privacy mechanism counts and metrics stay here: they would leave without noise. They leave only where
    `evaluation.federated` is switched on by name, and then the run's report lists them.

    Raises:
        PrivacyError: scores were asked for in a run that has none.
    """
    config = request.config
    if isinstance(request, EvaluateRequest) and not config.evaluates_on_clients:
        raise PrivacyError("scores may not leave this node in this run: its configuration evaluates on no client")
    reply = call_next(request, node)
    if isinstance(request, TrainRequest):
        return Reply(reply.arrays, _agreed(reply, request))
    return Reply(metrics=reply.metrics) if isinstance(request, EvaluateRequest) else Reply()


def _agreed(reply: Reply, request: TrainRequest) -> dict[str, float | int]:
    """The metrics of a training reply that this run asks for: all, the example count alone, or none."""
    config = request.config
    if not config.is_private:
        return dict(reply.metrics)
    counted = config.weights_by_examples and EXAMPLES in reply.metrics
    return {EXAMPLES: reply.metrics[EXAMPLES]} if counted else {}
