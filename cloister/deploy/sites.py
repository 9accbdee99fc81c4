"""Sites by name at a SuperLink: approval, key rotation and removal."""

from pathlib import Path
from typing import cast

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from cloister.core.errors import ConfigError
from cloister.core.keys import fingerprint
from cloister.deploy.certificates import checked_node_key
from cloister.deploy.control import GONE, Control, Node
from cloister.deploy.federation import NAME
from cloister.flower import flower_home


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
