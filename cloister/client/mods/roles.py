"""Separation of a node's two roles: training, and evaluation as a held-out client.

Held-out clients send scores on their own examples without noise. That is harmless for examples that the model has not
seen. The scores of a node that has trained would reveal what its noise hides. The server cannot enforce this: nodes
without registered keys return under another id. The node itself therefore refuses the second role.
"""

from flwr.app import ConfigRecord

from cloister.client.charges import SCORES
from cloister.client.ledgers import folder_unnamed, keeps_ledger, ledger_of
from cloister.client.node import Node
from cloister.client.request import EvaluateRequest, Request, TrainRequest
from cloister.core.errors import PrivacyError
from cloister.core.wire import ASSUMED, HELD_OUT
from cloister.privacy.accounting.events import Unaccounted
from cloister.privacy.accounting.ledger import Ledger

STATE = "roles"
TRAINED, SCORED = "trained", "scored-in-run"


def keep_role(request: Request, node: Node) -> None:
    """Refuse a second role in a run that holds clients out.

    A node does not evaluate after training under a guarantee, nor train in a run after evaluating in it. The rule
    applies to runs that hold clients out and protect the others. A node with a ledger checks the releases about its
    data, over all runs, and again when its reply is recorded. A simulated node stores its role in its state.

    Raises:
        PrivacyError: the node has had the other role.
    """
    if not _has_roles(request):
        return
    if keeps_ledger(node.config):
        with folder_unnamed(node.config):
            refuse_other_role(request, ledger_of(node.config, request.config.task.name))
        return
    roles, assumed = (node.state.config_records.get(name, ConfigRecord()) for name in (STATE, ASSUMED))
    trained = bool(roles.get(TRAINED)) or assumed.get(HELD_OUT) is False
    _refuse(request, trained, roles.get(SCORED) == request.run or assumed.get(HELD_OUT) is True)
    roles = node.state.config_records.setdefault(STATE, ConfigRecord())
    if isinstance(request, TrainRequest):
        roles[TRAINED] = True
    elif isinstance(request, EvaluateRequest):
        roles[SCORED] = request.run


def refuse_other_role(request: Request, ledger: Ledger) -> None:
    """Refuse a request for another role than the one in the node's ledger.

    Args:
        request: of any run.
        ledger: of the node.

    Raises:
        PrivacyError: the request is to evaluate, and the data was ever trained on under a guarantee; or it is to train,
            and the data was evaluated on in this run.
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
