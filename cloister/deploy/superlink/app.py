"""Flower's SuperLink as an application: what stands in front of its functions, and the door before all of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from cloister.deploy.superlink import database
from cloister.deploy.superlink.abandoned import Abandoned, Sending
from cloister.deploy.superlink.apart import OwnMessages
from cloister.deploy.superlink.cleanup import DeletesExpired
from cloister.deploy.superlink.door import App, Door
from cloister.deploy.superlink.in_front import InFront
from cloister.deploy.superlink.interrupted import DeliveredMessage
from cloister.deploy.superlink.node_keys import NodeKeys
from cloister.deploy.superlink.replies import ReplyLimit
from cloister.deploy.superlink.retries import RetryWhenBusy
from cloister.deploy.superlink.revoked import RevokedKeys
from cloister.deploy.superlink.runs import RunningRuns
from cloister.deploy.superlink.senders import KnownSenders
from cloister.deploy.superlink.shortcut import Shortcut
from cloister.deploy.superlink.unfinished import WholeReplies


def closed_app(config: SuperLinkLifespanConfig, before: Sequence[DeliveredMessage] = ()) -> App:
    """Flower's SuperLink behind our door, as an ASGI application. There is one in a process.

    Args:
        config: of the SuperLink.
        before: what nodes were given by the SuperLink before it, the last one of each node last.
    """
    path = database.file_of(config.database)
    install(before, path.parent if path else None)
    app = create_app(config, SuperLinkLifespan)
    # An extension may add middleware, and may change the application in any other way: none may be there.
    plain = config.fleet_event_log_plugin is None and extensions._try_import_sgxt() is None
    return Door(Shortcut(app) if plain else app, KnownSenders(app))


def install(before: Sequence[DeliveredMessage] = (), folder: Path | None = None) -> None:
    """Put everything of ours in front of Flower's functions, the innermost first: each calls what was there before it.

    | | for nodes | for the server's app | for operators |
    |---|---|---|---|
    | `OwnMessages` | `get_run`, all of messages and objects | | |
    | `DeletesExpired` | | `push_messages`, `pull_messages` | |
    | `WholeReplies` | | `pull_messages` | |
    | `Abandoned`, `Sending` | `pull_messages`, `pull_object` | `push_messages` | |
    | `RetryWhenBusy` | | `push_messages`, `push_object` | |
    | `ReplyLimit` | `pull_…`, `push_…` | | |
    | `RunningRuns` | `check_abort` | | |
    | `NodeKeys` | the key in a request | | |
    | `RevokedKeys` | | | `register_node` |

    Args:
        before: as of `closed_app`.
        folder: of the state database, where replies wait until they are whole; None: that of temporary files.
    """
    own = _installed(OwnMessages(before, folder))
    _installed(DeletesExpired())
    _installed(WholeReplies(own.handover.unfinished))
    abandoned = _installed(Abandoned(before))
    _installed(Sending(abandoned))
    # Outermost of the app's functions: a database may fail in any of those before it.
    _installed(RetryWhenBusy())
    # Outermost of the nodes' functions: it counts what `OwnMessages` does not hand on, too.
    _installed(ReplyLimit())
    _installed(RunningRuns())
    _installed(NodeKeys())
    _installed(RevokedKeys())


F = TypeVar("F", bound=InFront)


def _installed(each: F) -> F:
    each.install()
    return each
