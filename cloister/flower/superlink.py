"""Flower's SuperLink: its process, its database, and a shorter way to the functions that are called most.

Flower's SuperLink leads every request through nine layers, most of which are for operators and for executors, and
through several turns of its threads. In `Shortcut` a caller is authenticated and answered in one turn, by the same
functions.
"""

import logging
from collections.abc import Callable
from functools import partial

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response

# The key under which an operator shows a token.
from flwr.common.constant import ACCESS_TOKEN_KEY as ACCESS_TOKEN_KEY

# The answers to nodes.
from flwr.proto import fleet_pb2 as fleet_pb2

# The states, in which no totals are kept.
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState as InMemoryLinkState

# The state in a database, of which messages that have expired are deleted.
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState as SqlLinkState

# The module whose settings of SQLite are replaced.
from flwr.supercore import sql_mixin as sql_mixin

# The header by which an app is known.
from flwr.supercore.constant import TASK_TOKEN_HEADER as TASK_TOKEN_HEADER

# Authentication of an app, and the check of a caller's release.
from flwr.supercore.dependencies.task import authenticate_task as authenticate_task
from flwr.supercore.dependencies.version import VersionDependency as VersionDependency

# Refusals, and how one becomes an answer.
from flwr.supercore.error import ApiErrorCode as ApiErrorCode
from flwr.supercore.error import FlowerError as FlowerError
from flwr.supercore.error import http_error_translator as http_error_translator

# The form of the log, which leaves out requests that nodes make all the time.
from flwr.supercore.http_logging import get_uvicorn_log_config as get_uvicorn_log_config

# Requests as they are read, by their paths.
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES as PROTOBUF_REQUEST_TYPES
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware as ProtobufTranslationMiddleware

# Tables of the database: messages, replies, objects.
from flwr.supercore.state.schema.linkstate_models import MessageIns as MessageIns
from flwr.supercore.state.schema.linkstate_models import MessageRes as MessageRes
from flwr.supercore.state.schema.objectstore_models import StoredObject as StoredObject

# Extensions: with one, requests take no shortcut past its layers.
from flwr.superlink import extensions as extensions

# The interface that knows operators, and the implementation that lets everybody in, for its account.
from flwr.superlink.auth_plugin import ControlAuthnPlugin as ControlAuthnPlugin
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin as NoOpControlAuthnPlugin

# What starts and ends with the application, and the options as `flower-superlink` reads them.
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan as SuperLinkLifespan
from flwr.superlink.cli.flower_superlink import _parse_superlink_lifespan_config

# The state, for a request.
from flwr.superlink.dependencies.linkstate import get_linkstate as get_linkstate

# The application itself.
from flwr.superlink.main import create_app as create_app

# Modules of which functions are replaced: authentication of nodes, and answers to operators, nodes and apps.
from flwr.superlink.routers.fleet import node_auth as node_auth
from flwr.superlink.servicer.control import control_handlers as control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers as fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as runtime_handlers
from starlette.types import Receive, Scope, Send

parse_superlink_options = _parse_superlink_lifespan_config
"""Return the settings of a SuperLink from the options in `sys.argv`."""
console_handler = logging.getLogger("flwr").handlers[0]
"""Flower's log on the console."""
FLWR_IN_MEMORY_DB_NAME = ":flwr-in-memory:"
"""The value of `--database` for a state in memory."""
authenticate_node = node_auth.authenticate_node
"""Refuse a request whose key, signature or clock is wrong."""
PROTOBUF_MEDIA_TYPE = "application/protobuf"
"""The type of every answer."""


def in_database(number: int) -> int:
    """Return the signed number with the same 64 bits, as the database stores an id."""
    return number - 2**64 if number >= 2**63 else number


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
    answer = vars(runtime_handlers)[name](request.state.protobuf_request, state, task)
    return bytes(answer.SerializeToString())


WITH_STORE = ("pull_messages", "confirm_message_received")
"""Functions for nodes that take the store of objects beside the state."""
MESSAGES = ("pull_messages", "push_messages", "pull_object", "push_object", "confirm_message_received")
OFTEN: dict[str, Callable[[Request], bytes]] = {
    **{f"/v1/fleet/{name.replace('_', '-')}": partial(_for_node, name) for name in ("send_node_heartbeat", *MESSAGES)},
    **{f"/v1/runtime/{name.replace('_', '-')}": partial(_for_app, name) for name in MESSAGES},
}
"""Answers to the paths of frequent requests. All other requests go Flower's way."""
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
    """Return the answer to a request.

    Raises:
        FlowerError, HTTPException: it is refused.
    """
    path, translation = request.scope["path"], ProtobufTranslationMiddleware
    translation._check_request_media_type(request)
    kind = PROTOBUF_REQUEST_TYPES["POST", path]
    request.state.protobuf_request = translation._parse_request(await request.body(), kind)
    answer = await to_thread.run_sync(OFTEN[path], request, limiter=HEARTBEATS if path == HEARTBEAT else None)
    return Response(answer, media_type=PROTOBUF_MEDIA_TYPE)
