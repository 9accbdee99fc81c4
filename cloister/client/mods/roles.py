"""A node trains a model or judges it as an outsider, and remembers which.

Clients that are held out score a model with their own examples, without noise. That is no harm to those whose examples
the model has not seen; a node that has trained would tell in its scores what its noise hides. The server cannot be
relied on here: nodes without registered keys come back under another id. So the node itself refuses the second role.
"""

from flwr.app import ConfigRecord

from cloister.client.charges import SCORES
from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of
from cloister.client.mods.enforce import Handler
from cloister.client.node import Node
from cloister.client.request import EvaluateRequest, Reply, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.core.wire import ASSUMED, HELD_OUT
from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.ledger import Ledger

STATE = "roles"
TRAINED, SCORED = "trained", "scored-in-run"


def keep_role(request: Request, node: Node, call_next: Handler) -> Reply:
    """Refuse to score as an outsider after training under a guarantee, and to train in a run after scoring in it.

    Only runs that hold clients out and protect the others are concerned. A node with a ledger remembers by its data,
    over all runs, and is asked once more when its reply is entered; a simulated one remembers in its state.

    Raises:
        PrivacyError: the node has had the other role.
    """
    if not _has_roles(request):
        return call_next(request, node)
    if keeps_ledger(node.config):
        with folder_unnamed(node.config):
            refuse_other_role(request, ledger_of(node.config, request.config.task.name))
    else:
        roles, assumed = (node.state.config_records.get(name, ConfigRecord()) for name in (STATE, ASSUMED))
        trained = bool(roles.get(TRAINED)) or assumed.get(HELD_OUT) is False
        _refuse(request, trained, roles.get(SCORED) == request.run or assumed.get(HELD_OUT) is True)
        _remember(request, node)
    return call_next(request, node)


def refuse_other_role(request: Request, ledger: Ledger) -> None:
    """Refuse a request for the other role than the one that the node's ledger tells of.

    Args:
        request: of any run.
        ledger: of the node.

    Raises:
        PrivacyError: the node's data was trained on under a guarantee, ever, and is to be scored with; or it was scored
            with in this run and is to be trained on.
    """
    if _has_roles(request):
        trained = any(not isinstance(entry.event, Unaccounted) for entry in ledger.entries)
        scored = any(entry.mechanism == SCORES and entry.run == request.run for entry in ledger.entries)
        _refuse(request, trained, scored)


def _has_roles(request: Request) -> bool:
    return bool(request.config.evaluation.held_out_clients and request.config.is_private)


def _refuse(request: Request, trained: bool, scored: bool) -> None:
    if isinstance(request, EvaluateRequest) and trained:
        raise PrivacyError(
            "this node has trained under a guarantee, and is no held-out client: its scores do not leave"
        )
    if isinstance(request, TrainRequest) and scored:
        raise PrivacyError("this node has scored models of this run as a held-out client, and does not train in it")


def _remember(request: Request, node: Node) -> None:
    """In the node's state; a ledger has a line of its own for either role."""
    roles = node.state.config_records.setdefault(STATE, ConfigRecord())
    if isinstance(request, TrainRequest):
        roles[TRAINED] = True
    elif isinstance(request, EvaluateRequest):
        roles[SCORED] = request.run
