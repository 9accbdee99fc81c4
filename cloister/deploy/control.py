"""Flower's Control interface, for an operator: which nodes a SuperLink knows, and who gets in."""

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
"""The status of a node whose key is refused from now on."""


@dataclass(frozen=True)
class Node:
    """A node as the SuperLink knows it.

    Attributes:
        id: by which messages are addressed.
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
        """Of a living node, for `cloister status`."""
        return {"node-id": str(self.id), "name": self.name, "status": self.status, "since": self.since}

    @property
    def who(self) -> str:
        """Its name, or its number if it has none."""
        return self.name or f"node {self.id}"


class Control:
    """A connection to the Control interface.

    Args:
        client: of Flower's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def nodes(self) -> list[Node]:
        """All nodes that were ever registered, in the order of their names."""
        with flwr_cli_exc_handler():
            found = self._client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
        return sorted(map(_node, found), key=lambda node: (node.name, node.id))

    def register(self, name: str, key: bytes) -> None:
        """Let a node in from now on.

        Args:
            name: of its site.
            key: its public key, in OpenSSH format.
        """
        public = load_ssh_public_key(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with flwr_cli_exc_handler():
            self._client.RegisterNode(control_pb2.RegisterNodeRequest(public_key=public, name=name))

    def unregister(self, node: Node) -> None:
        """Refuse a node's key from now on: what it sends next is not taken, also on a connection that is open."""
        with flwr_cli_exc_handler():
            self._client.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node.id))


@contextmanager
def control(connection: str) -> Iterator[Control]:
    """The block, with a connection to a SuperLink.

    Args:
        connection: a name in Flower's `config.toml`, in the folder `FLWR_HOME`.

    Raises:
        FederationError: there is no such connection, or the SuperLink refuses, or does not answer.
    """
    client = None
    _required(connection)
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


def _required(connection: str) -> None:
    """Require that a connection is one of Flower's `config.toml`; Flower itself does not say which there are.

    Raises:
        FederationError: there is none of this name.
    """
    path = flower_home() / "config.toml"
    try:
        settings = tomllib.loads(path.read_text()).get("superlink", {}) if path.is_file() else {}
    except ValueError as error:
        raise FederationError(f"{path} is no valid TOML: {error}") from None
    known = sorted(name for name, value in settings.items() if isinstance(value, dict))
    if connection not in known:
        raise FederationError(
            f"SuperLink connection {connection!r}: not found in {path}; known: {', '.join(known) or 'none'}"
        )


def living_nodes(connection: str) -> list[dict[str, str]]:
    """The facts of all nodes that have not been sent away.

    Args:
        connection: a name in Flower's `config.toml`.

    Raises:
        FederationError: the SuperLink cannot be asked.
    """
    with control(connection) as opened:
        return [node.facts for node in opened.nodes() if node.status != GONE]


def _node(info: Any) -> Node:
    key = cast(ec.EllipticCurvePublicKey, load_pem_public_key(info.public_key))  # Flower takes no others
    times = {"online": info.last_activated_at, "offline": info.last_deactivated_at, GONE: info.unregistered_at}
    return Node(info.node_id, info.name, fingerprint(key), info.status, times.get(info.status, ""))
