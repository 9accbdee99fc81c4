"""Removal of everything from a reply that the run has not agreed on."""

from cloister.client.request import EvaluateRequest, Reply, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.core.wire import EXAMPLES


def refuse_scores(request: Request) -> None:
    """Refuse to send scores if the configuration evaluates on no client.

    Raises:
        PrivacyError: the request asks for scores in a run that has none.
    """
    if isinstance(request, EvaluateRequest) and not request.config.evaluates_on_clients:
        raise PrivacyError("scores may not leave this node in this run: its configuration evaluates on no client")


def only_what_is_agreed(reply: Reply, request: Request) -> Reply:
    """Return the agreed parts of a reply.

    In a private run training metrics stay on the node, since they carry no noise. The example count leaves only if the
    strategy weights clients by it. The run's report lists it.
    """
    config = request.config
    if isinstance(request, EvaluateRequest):
        return Reply(metrics=reply.metrics)
    if not isinstance(request, TrainRequest):
        return Reply()
    if not config.is_private:
        return Reply(reply.arrays, dict(reply.metrics))
    counted = config.weights_by_examples and EXAMPLES in reply.metrics
    return Reply(reply.arrays, {EXAMPLES: reply.metrics[EXAMPLES]} if counted else {})
