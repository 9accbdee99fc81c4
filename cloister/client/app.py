"""ClientApp that Flower loads.

A message passes Flower's mods first: `open_and_pack` opens a packed message and packs its reply. The other mods read no
content: `no_sooner_than`, `contain_errors`, `within_deadline`. Then `request_of` and `Node.of` parse the request and
read the node, or refuse the message, and `reply_to` replies.
"""

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cloister.client.handlers import evaluate, keep_personal, train
from cloister.client.mods.attest import attest
from cloister.client.mods.budget import foresee_budget, keep_budget
from cloister.client.mods.deadline import no_sooner_than, within_deadline
from cloister.client.mods.enforce import enforce_policy
from cloister.client.mods.errors import contain_errors
from cloister.client.mods.filter import only_what_is_agreed, refuse_scores
from cloister.client.mods.local_noise import add_local_noise, count_leakage, limit_leakage
from cloister.client.mods.packed import open_and_pack
from cloister.client.mods.roles import keep_role
from cloister.client.node import Node
from cloister.client.request import (
    EvaluateRequest,
    KeepRequest,
    ProtocolRequest,
    Reply,
    Request,
    TrainRequest,
    request_of,
)
from cloister.client.secure import mask_update, open_masks, take_part
from cloister.core.wire import SECURE

AnyRequest = TypeVar("AnyRequest", bound=Request)
Work = Callable[[AnyRequest, Node], Reply]
"""Computation of a reply, without any protection: training, evaluation, or a step of secure aggregation."""


def reply_to(request: AnyRequest, node: Node, work: Work[AnyRequest]) -> Reply:
    """Return the reply to a request, after the refusals and the charge.

    No data is read before the site's policy allows the request. No reply is computed before all budgets of the node
    cover it and its ledger contains its releases. DP-SGD is within `work`; the bound and the noise on a whole update
    follow it.

    Args:
        request: of the server.
        node: that replies.
        work: computes the reply.

    Raises:
        CloisterError: the request is refused, or the node abstains.
    """
    refuse_scores(request)
    enforce_policy(request, node)
    if isinstance(request, ProtocolRequest):  # a step of secure aggregation that involves no training
        limit_leakage(request, node)
        foresee_budget(request, node)
        return work(request, node)
    masks = open_masks(request, node)
    keep_role(request, node)
    limit_leakage(request, node)
    with keep_budget(request, node):  # the ledger comes before the release
        count_leakage(request, node)
        reply = work(request, node)
        reply = add_local_noise(reply, request, node)
    reply = mask_update(reply, masks, request, node)
    return attest(only_what_is_agreed(reply, request), request, node)


def answered_by(kind: type[AnyRequest], work: Work[AnyRequest]) -> Callable[[Message, Context], Message]:
    """Return Flower's handler: parse a request, return the reply's content."""

    def answer(message: Message, context: Context) -> Message:
        reply = reply_to(request_of(kind, message, context), Node.of(context), work)
        return Message(reply.content(), reply_to=message)

    return answer


app = ClientApp(mods=[open_and_pack, no_sooner_than, contain_errors, within_deadline])
app.train()(answered_by(TrainRequest, train))
app.evaluate()(answered_by(EvaluateRequest, evaluate))
app.query()(answered_by(KeepRequest, keep_personal))
app.query(SECURE.partition(".")[2])(answered_by(ProtocolRequest, take_part))
