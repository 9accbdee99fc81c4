"""Who sends a long request, by its headers alone: known before it is read.

Flower asks after it has read and parsed a request. Parsed it takes up to
`door.PARSED_BYTES_PER_BYTE` times its size: 32 MiB of empty parts, from anybody who reached the port, took gigabytes
in some connections, and everybody else waited.
"""

import binascii
from base64 import b64decode

from anyio import to_thread
from fastapi import FastAPI, HTTPException, Request
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, TASK_TOKEN_HEADER
from flwr.supercore.dependencies.task import authenticate_task
from flwr.supercore.error import FlowerError
from flwr.superlink.dependencies.linkstate import get_linkstate
from flwr.superlink.routers.fleet.node_auth import authenticate_node

from cloister.deploy.superlink.door import Refusal, Scope


class KnownSenders:
    """Asks whether a sender is a registered node, the app of a task, or an operator.

    Args:
        app: Flower's SuperLink.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Scope) -> Refusal | None:
        """The status and the reason for which a request is refused; None if its sender is known."""
        request = Request({**scope, "app": self.app})
        try:
            await to_thread.run_sync(_authenticate, request)
        except FlowerError:
            return 401, "the sender of a long request must be known"
        except HTTPException as error:
            return error.status_code, str(error.detail)
        return None


def _authenticate(request: Request) -> None:
    """Refuse a sender that is not known.

    Raises:
        FlowerError, HTTPException: it is not known, or the database is busy.
    """
    path = request.url.path
    if path.startswith("/v1/fleet/"):
        _authenticate_node(request)
    elif path.startswith("/v1/runtime/"):
        authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), get_linkstate(request))
    else:
        request.app.state.account_access_dep(request)


def _authenticate_node(request: Request) -> None:
    try:
        key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
    except (binascii.Error, ValueError):
        raise HTTPException(401, "the public key of a node is not valid base64") from None
    # Of this kind of request Flower takes the key that it names: signature and time are checked.
    request.state.protobuf_request = RegisterNodeFleetRequest(public_key=key)
    authenticate_node(request)
    if get_linkstate(request).get_node_id_by_public_key(key) is None:
        raise HTTPException(401, "this node is not registered")
