"""Flower's Control interface for an operator: list, register and unregister the nodes of a SuperLink."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, cast

import click
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from cloister.core.errors import FederationError
from cloister.core.keys import fingerprint
from cloister.flower import flower_home
from cloister.flower.control import (
    control_pb2,
    flwr_cli_exc_handler,
    init_http_client_from_connection,
    read_superlink_connection,
)

GONE = "unregistered"
"""Status of an unregistered node, whose key is refused."""


@dataclass(frozen=True)
class Node:
    """Node as the SuperLink lists it.

    Attributes:
        id: address of messages.
        name: of its site; empty if it was registered without one.
        fingerprint: of its key, as `ssh-keygen -l` prints it.
        status: `registered` (never seen), `online`, `offline` or `unregistered`.
        since: when the status began, ISO 8601; empty if it was never seen.
    """

    id: int
    name: str
    fingerprint: str
    status: str
    since: str

    @property
    def facts(self) -> dict[str, str]:
        """Return the fields of a living node for `cloister status`."""
        return {"node-id": str(self.id), "name": self.name, "status": self.status, "since": self.since}

    @property
    def who(self) -> str:
        """Return its name, or its number if it has none."""
        return self.name or f"node {self.id}"


class Control:
    """Connection to the Control interface.

    Args:
        client: of Flower.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def nodes(self) -> list[Node]:
        """Return all nodes that were ever registered, in the order of their names."""
        with flwr_cli_exc_handler():
            found = self._client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
        nodes = []
        for info in found:
            key = cast(ec.EllipticCurvePublicKey, load_pem_public_key(info.public_key))  # Flower takes no others
            times = {"online": info.last_activated_at, "offline": info.last_deactivated_at, GONE: info.unregistered_at}
            since = times.get(info.status, "")
            nodes.append(Node(info.node_id, info.name, fingerprint(key), info.status, since))
        return sorted(nodes, key=lambda node: (node.name, node.id))

    def register(self, name: str, key: bytes) -> None:
        """Register a node's key.

        Args:
            name: of its site.
            key: its public key, in OpenSSH format.
        """
        public = load_ssh_public_key(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with flwr_cli_exc_handler():
            self._client.RegisterNode(control_pb2.RegisterNodeRequest(public_key=public, name=name))

    def unregister(self, node: Node) -> None:
        """Unregister a node.

        The SuperLink refuses its next request, also on an open connection.
        """
        with flwr_cli_exc_handler():
            self._client.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node.id))


@contextmanager
def control(connection: str) -> Iterator[Control]:
    """Connect to a SuperLink for the block.

    Args:
        connection: a name in Flower's `config.toml`, in the folder `FLWR_HOME`.

    Raises:
        FederationError: there is no such connection, or the SuperLink refuses, or does not answer.
    """
    path = flower_home() / "config.toml"
    try:
        settings = tomllib.loads(path.read_text()).get("superlink", {}) if path.is_file() else {}
    except ValueError as error:
        raise FederationError(f"{path} is no valid TOML: {error}") from None
    known = sorted(name for name, value in settings.items() if isinstance(value, dict))
    if connection not in known:  # Flower itself does not say which there are
        raise FederationError(
            f"SuperLink connection {connection!r}: not found in {path}; known: {', '.join(known) or 'none'}"
        )
    client = None
    try:
        # Flower prints which connection it uses: the output of these commands may be read by programs.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            client = init_http_client_from_connection(read_superlink_connection(connection))
        yield Control(client)
    except click.ClickException as error:
        raise FederationError(f"SuperLink connection {connection!r}: {' '.join(error.message.split())}") from None
    finally:
        if client is not None:
            client.close()


def living_nodes(connection: str) -> list[dict[str, str]]:
    """Return the facts of all nodes that are not unregistered.

    Args:
        connection: a name in Flower's `config.toml`.

    Raises:
        FederationError: the SuperLink cannot be queried.
    """
    with control(connection) as opened:
        return [node.facts for node in opened.nodes() if node.status != GONE]
