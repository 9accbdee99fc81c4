"""A shorter way to the functions of Flower that nodes and server apps call some thirty times for each message.

Flower's SuperLink leads every request through nine layers, most of which are for operators and for executors, and
through several turns of its threads. Here a caller is authenticated and answered in one turn, by the same functions.
"""

from collections.abc import Callable
from functools import partial

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cloister.flower.superlink import (
    PROTOBUF_MEDIA_TYPE,
    PROTOBUF_REQUEST_TYPES,
    TASK_TOKEN_HEADER,
    ProtobufTranslationMiddleware,
    VersionDependency,
    authenticate_node,
    authenticate_task,
    fleet_handlers,
    get_linkstate,
    get_runtime_handlers,
    http_error_translator,
)

refuse_other_version = VersionDependency(component_name="SuperLink", connection_name="Caller <-> SuperLink Runtime API")


def _for_node(name: str, request: Request) -> bytes:
    """Return what a function of the Fleet interface answers a node whose key, signature and clock are right."""
    authenticate_node(request)
    state = get_linkstate(request)
    others = {"store": state.object_store} if name in WITH_STORE else {}
    answer = vars(fleet_handlers)[name](request=request.state.protobuf_request, state=state, **others)
    return bytes(answer.SerializeToString())


def _for_app(name: str, request: Request) -> bytes:
    """Return what a function of the Runtime interface answers an app that shows the token of its task."""
    refuse_other_version(request)
    state = get_linkstate(request)
    task = authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), state)
    answer = getattr(get_runtime_handlers(request), name)(request.state.protobuf_request, state, task)
    return bytes(answer.SerializeToString())


WITH_STORE = ("pull_messages", "confirm_message_received")
"""Functions for nodes that take the store of objects beside the state."""
MESSAGES = ("pull_messages", "push_messages", "pull_object", "push_object", "confirm_message_received")
OFTEN: dict[str, Callable[[Request], bytes]] = {
    **{f"/v1/fleet/{name.replace('_', '-')}": partial(_for_node, name) for name in ("send_node_heartbeat", *MESSAGES)},
    **{f"/v1/runtime/{name.replace('_', '-')}": partial(_for_app, name) for name in MESSAGES},
}
"""What answers the paths that are asked again and again. All else goes Flower's way."""
HEARTBEAT = "/v1/fleet/send-node-heartbeat"
HEARTBEATS = CapacityLimiter(2)
"""Threads for heartbeats alone: a node gives one up after 5 s, and behind the messages of many it waited as long."""


class Shortcut:
    """ASGI application that answers what is asked often, and hands on the rest.

    Args:
        app: Flower's SuperLink, without extensions, whose layers would be passed by, and without a log of events, which
            only its own layers write.

    Guarantee: a caller is answered as by Flower, after the same checks.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in OFTEN:
            await self.app(scope, receive, send)
            return
        request = Request({**scope, "app": self.app}, receive)
        response = await http_error_translator(request, _answered)
        await response(scope, receive, send)


async def _answered(request: Request) -> Response:
    """The answer to a request.

    Raises:
        FlowerError, HTTPException: it is refused.
    """
    path, translation = request.scope["path"], ProtobufTranslationMiddleware
    translation._check_request_media_type(request)
    kind = PROTOBUF_REQUEST_TYPES["POST", path]
    request.state.protobuf_request = translation._parse_request(await request.body(), kind)
    answer = await to_thread.run_sync(OFTEN[path], request, limiter=HEARTBEATS if path == HEARTBEAT else None)
    return Response(answer, media_type=PROTOBUF_MEDIA_TYPE)
