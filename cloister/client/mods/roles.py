"""A node trains a model or judges it as an outsider, and remembers which.

Clients that are held out score a model with their own examples, without noise. That is no harm to those whose examples
the model has not seen; a node that has trained would tell in its scores what its noise hides. The server cannot be
relied on here: nodes without registered keys come back under another id. So the node itself refuses the second role.
"""

from flwr.app import ConfigRecord, Context

from cloister.client.charges import SCORES
from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of
from cloister.client.mods.enforce import Handler
from cloister.client.request import EvaluateRequest, Reply, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.privacy.accounting.events import Unaccounted

STATE = "roles"
TRAINED, SCORED = "trained", "scored-in-run"


def keep_role(request: Request, context: Context, call_next: Handler) -> Reply:
    """Refuse to score as an outsider after training under a guarantee, and to train in a run after scoring in it.

    Only runs that hold clients out and protect the others are concerned. A node with a ledger remembers by its data,
    over all runs; a simulated one in its state.

    Raises:
        PrivacyError: the node has had the other role.
    """
    config = request.config
    if not (config.evaluation.held_out_clients and config.is_private):
        return call_next(request, context)
    with folder_unnamed(context.node_config):
        trained, scored = _history(request, context)
    if isinstance(request, EvaluateRequest) and trained:
        raise PrivacyError(
            "this node has trained under a guarantee, and is no held-out client: its scores do not leave"
        )
    if isinstance(request, TrainRequest) and scored:
        raise PrivacyError("this node has scored models of this run as a held-out client, and does not train in it")
    _remember(request, context)
    return call_next(request, context)


def _history(request: Request, context: Context) -> tuple[bool, bool]:
    """Whether the node's data was trained on under a guarantee, ever; and whether it was scored with in this run."""
    if not keeps_ledger(context.node_config):
        roles = context.state.config_records.get(STATE, ConfigRecord())
        return bool(roles.get(TRAINED)), roles.get(SCORED) == request.run
    entries = ledger_of(context.node_config, request.config.task.name).entries
    trained = any(not isinstance(entry.event, Unaccounted) for entry in entries)
    return trained, any(entry.mechanism == SCORES and entry.run == request.run for entry in entries)


def _remember(request: Request, context: Context) -> None:
    """In the node's state; a ledger has a line of its own for either role."""
    roles = context.state.config_records.setdefault(STATE, ConfigRecord())
    if isinstance(request, TrainRequest):
        roles[TRAINED] = True
    elif isinstance(request, EvaluateRequest):
        roles[SCORED] = request.run
