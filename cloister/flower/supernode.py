"""Flower's SuperNode."""

# A node configuration, as the SuperNode reads it.
from flwr.common.config import parse_config_args as parse_config_args

# Modules of which functions are replaced: the connection to the SuperLink, and the loop over messages.
from flwr.supernode import fleet_http_connection as fleet_http_connection
from flwr.supernode import start_client_internal as start_client_internal

# The options as `flower-supernode` reads them, abbreviated and deprecated ones too.
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

parser_of_supernode = _parse_args_run_supernode
