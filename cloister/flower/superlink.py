"""Flower's SuperLink: its process, what answers nodes and apps, and its database."""

import logging
from types import ModuleType

from fastapi import Request

# The key under which an operator shows a token.
from flwr.common.constant import ACCESS_TOKEN_KEY as ACCESS_TOKEN_KEY

# The answers to nodes.
from flwr.proto import fleet_pb2 as fleet_pb2

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


def get_runtime_handlers(_: Request) -> ModuleType:
    """Return the module that answers apps; a SuperLink has one."""
    return runtime_handlers


def in_database(number: int) -> int:
    """Return the signed number with the same 64 bits, as the database stores an id."""
    return number - 2**64 if number >= 2**63 else number
