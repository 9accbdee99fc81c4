"""Flower's SuperLink as an application, with our functions in front of its own."""

from typing import Any

from starlette.types import ASGIApp

from cloister.deploy.superlink.cleanup import DeletesExpired
from cloister.deploy.superlink.gate import Gate, GateKnown
from cloister.deploy.superlink.in_front import InFront, NodeKeys, RevokedKeys, RunningRuns
from cloister.flower.shortcut import Shortcut
from cloister.flower.superlink import SuperLinkLifespan, create_app, extensions


def closed_app(config: Any) -> ASGIApp:
    """Return Flower's SuperLink as an ASGI application. There is one in a process.

    Args:
        config: of the SuperLink.
    """
    install()
    app = create_app(config, SuperLinkLifespan)
    # An extension may add middleware, and may change the application in any other way: none may be there.
    plain = config.fleet_event_log_plugin is None and extensions._try_import_sgxt() is None
    return Shortcut(app) if plain else app


IN_FRONT: tuple[type[InFront], ...] = (Gate, GateKnown, DeletesExpired, RunningRuns, NodeKeys, RevokedKeys)
"""What is in front of Flower's functions:

| | for nodes | for the server's app | for operators |
|---|---|---|---|
| `Gate` | `get_run`, all of messages and objects | | |
| `GateKnown` | | `pull_object` | |
| `DeletesExpired` | | `push_messages` | |
| `RunningRuns` | `check_abort` | | |
| `NodeKeys` | the key in a request | | |
| `RevokedKeys` | | | `register_node` |
"""


def install() -> None:
    """Put everything of ours in front of Flower's functions."""
    for each in IN_FRONT:
        each().install()
