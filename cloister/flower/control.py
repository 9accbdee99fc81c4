"""Flower's command line, for an operator: connections and app bundles."""

# The files that Flower bundles if the app names no patterns.
from flwr.cli.build import get_filtered_fab_paths as get_filtered_fab_paths

# A connection of `config.toml`.
from flwr.cli.flower_config import read_superlink_connection as read_superlink_connection

# A client with the operator's token, and its errors in words.
from flwr.cli.utils import flwr_cli_exc_handler as flwr_cli_exc_handler
from flwr.cli.utils import init_http_client_from_connection as init_http_client_from_connection

# Requests of an operator.
from flwr.proto import control_pb2 as control_pb2
