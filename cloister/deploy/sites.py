"""Sites at a SuperLink by name: approval, key rotation and removal, through Flower's Control interface."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from cloister.deploy.credentials import checked_node_key
from cloister.deploy.provision.federation import NAME
from cloister.deploy.provision.folder import ISSUED, Kits
from cloister.flower import flower_home
from cloister.flower.control import (
    control_pb2,
    flwr_cli_exc_handler,
    init_http_client_from_connection,
    read_superlink_connection,
)
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.keys import fingerprint

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


def kits_of_operator() -> tuple[Kits, bool]:
    """Return the kits beside the operator's settings, and whether they are those of the whole federation."""
    home = flower_home().resolve()
    together = home.name == "operator" and (home.parent / ISSUED).is_file()
    return Kits(home.parent if together else home), together


def key_file(name: str) -> Path:
    """Return the path of a site's public key in the operator's kit (`FLWR_HOME`).

    Raises:
        ConfigError: the name is invalid in `federation.toml`. A node that Flower's own command registered may have such
            a name.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"site {name!r} is not valid: a name has at most 48 lower-case letters, digits and '-'")
    return flower_home() / "nodes" / f"{name}.pub"


def keep_key(name: str, key: Path) -> None:
    """Put the key with which a site was let in into the operator's kit, from which the proxy's list is made."""
    kept, content = key_file(name), checked_node_key(key)
    if not kept.exists() or kept.read_bytes() != content:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(content)


def approve(control: Control, name: str, key: Path, expected: str = "") -> str:
    """Register a new site.

    Args:
        control: of the SuperLink.
        name: of the site.
        key: file of its public key.
        expected: fingerprint that the site has communicated; empty: it is not compared.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: the name is invalid, the name or the key is taken, or the key has another fingerprint.
    """
    key_file(name)  # refuses an invalid name
    nodes = control.nodes()
    if _of(nodes, name):
        raise ConfigError(f"site {name!r} is registered; for a new key of it: cloister site rotate")
    return _register(control, nodes, name, key, expected)


def rotate(control: Control, name: str, key: Path, expected: str = "") -> str:
    """Register a new key of a site, then unregister the node with the old key.

    If a call is interrupted between the two, both are registered, and the next call completes it.

    Args:
        control: of the SuperLink.
        name: of the site.
        key: file of its new public key.
        expected: fingerprint that the site has communicated; empty: it is not compared.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: no such site, the key is another site's or an unregistered one, or has another fingerprint.
    """
    nodes = control.nodes()
    old = _known(nodes, name)
    found = _checked(key, expected)
    if found not in {node.fingerprint for node in old}:
        _register(control, nodes, name, key, expected)
    elif len(old) == 1:
        raise ConfigError(f"site {name!r} has the key {key} already; make a new one first")
    for node in old:
        if node.fingerprint != found:
            control.unregister(node)
    return found


def remove(control: Control, name: str) -> list[Node]:
    """Unregister a site. Its node's next request is refused.

    Its key cannot be registered again.

    Args:
        control: of the SuperLink.
        name: of the site.

    Returns:
        Its nodes.

    Raises:
        ConfigError: no such site is registered.
    """
    gone = _known(control.nodes(), name)
    for node in gone:
        control.unregister(node)
    return gone


def _of(nodes: list[Node], name: str) -> list[Node]:
    """Return the registered nodes with this site name (empty for an empty name)."""
    return [node for node in nodes if name and node.name == name and node.status != GONE]


def _known(nodes: list[Node], name: str) -> list[Node]:
    if found := _of(nodes, name):
        return found
    names = sorted({node.name for node in nodes if node.name and node.status != GONE})
    raise ConfigError(f"no site {name!r} is registered; there are: {', '.join(names) or 'none'}")


def _checked(key: Path, expected: str) -> str:
    """Return the fingerprint of a key file.

    Raises:
        ConfigError: it differs from the expected one.
    """
    found = fingerprint(cast(ec.EllipticCurvePublicKey, load_ssh_public_key(checked_node_key(key))))
    if expected and found != expected:
        raise ConfigError(f"--fingerprint {expected!r} is not that of {key}, which is {found}")
    return found


def _register(control: Control, nodes: list[Node], name: str, key: Path, expected: str) -> str:
    found = _checked(key, expected)
    for node in nodes:
        if node.fingerprint == found:
            state = "was sent away and never gets in again" if node.status == GONE else f"is that of {node.who}"
            raise ConfigError(f"the key {key} {state}; the site has to make a new one")
    control.register(name, checked_node_key(key))
    return found
