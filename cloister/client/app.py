"""ClientApp that Flower loads.

message → open_and_pack                                            Flower's mods: the first opens a packed
        → no_sooner_than → contain_errors → within_deadline        message and packs its reply; the rest read no content
        → request_of, Node.of                                      the typed request and the node, or a refusal
        → attest → only_what_is_agreed → enforce_policy → mask_update → keep_role → limit_leakage → keep_budget
        → add_local_noise → handler
A protocol step of secure aggregation, without training, passes these steps instead of the last line:
        → enforce_policy → limit_leakage → foresee_budget → take_part
"""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from cloister.client.handlers import evaluate, keep_personal, train
from cloister.client.mods.attest import attest
from cloister.client.mods.budget import foresee_budget, keep_budget
from cloister.client.mods.deadline import no_sooner_than, within_deadline
from cloister.client.mods.enforce import enforce_policy
from cloister.client.mods.errors import contain_errors
from cloister.client.mods.filter import only_what_is_agreed
from cloister.client.mods.local_noise import add_local_noise, limit_leakage
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
from cloister.client.secure import mask_update, take_part
from cloister.core.wire import SECURE

Step = Callable[[Any, Node, Callable[..., Reply]], Reply]
STEPS: tuple[Step, ...] = (
    attest,
    only_what_is_agreed,
    enforce_policy,
    mask_update,
    keep_role,
    limit_leakage,
    keep_budget,
    add_local_noise,
)
"""Steps of a request before its handler, and of a reply after it; the first is outermost."""
PROTOCOL_STEPS: tuple[Step, ...] = (enforce_policy, limit_leakage, foresee_budget)
"""Steps of a protocol message of secure aggregation, which involves no training."""


def answered_by(
    kind: type[Request], handler: Callable[..., Reply], steps: Sequence[Step] = STEPS
) -> Callable[[Message, Context], Message]:
    """Return Flower's handler: parse a request, return the reply's content."""

    def answer(message: Message, context: Context) -> Message:
        reply = _passed(steps, handler)(request_of(kind, message, context), Node.of(context))
        return Message(reply.content(), reply_to=message)

    return answer


def _passed(steps: Sequence[Step], handler: Callable[..., Reply]) -> Callable[..., Reply]:
    """Return the handler wrapped in all steps."""
    if not steps:
        return handler
    inner = _passed(steps[1:], handler)
    return lambda request, node: steps[0](request, node, inner)


app = ClientApp(mods=[open_and_pack, no_sooner_than, contain_errors, within_deadline])
app.train()(answered_by(TrainRequest, train))
app.evaluate()(answered_by(EvaluateRequest, evaluate))
app.query()(answered_by(KeepRequest, keep_personal))
app.query(SECURE.partition(".")[2])(answered_by(ProtocolRequest, take_part, PROTOCOL_STEPS))
