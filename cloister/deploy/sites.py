"""Sites by name: who is registered at a SuperLink, who is let in, who gets a new key, who is sent away."""

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
    """Where an operator's kit has the public key of a site: `FLWR_HOME` is the kit.

    Raises:
        ConfigError: the name is none of a site of `federation.toml`, as of a node that Flower's own command registered.
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
    """Let a new site in.

    Args:
        control: of the SuperLink.
        name: of the site.
        key: file of its public key.
        expected: fingerprint that the site has told; empty: it is not compared.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: the name is not valid, the name or the key is taken, or the key is another one than expected.
    """
    key_file(name)  # refuses what is no name
    nodes = control.nodes()
    if _of(nodes, name):
        raise ConfigError(f"site {name!r} is registered; for a new key of it: cloister site rotate")
    return _register(control, nodes, name, key, expected)


def rotate(control: Control, name: str, key: Path, expected: str = "") -> str:
    """Give a site a new key: it is let in first, and the node with the old key is sent away after.

    A call that breaks off between the two leaves both registered; the next one ends it.

    Args:
        control: of the SuperLink.
        name: of the site.
        key: file of its new public key.
        expected: fingerprint that the site has told; empty: it is not compared.

    Returns:
        The fingerprint of the key.

    Raises:
        ConfigError: no such site, the key is another site's or one that was sent away, or another than expected.
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
    """Send a site away: its node's next request is refused, and its key never gets in again.

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
    """The living nodes of a site; none without a name, which would be those of nobody in particular."""
    return [node for node in nodes if name and node.name == name and node.status != GONE]


def _known(nodes: list[Node], name: str) -> list[Node]:
    if found := _of(nodes, name):
        return found
    names = sorted({node.name for node in nodes if node.name and node.status != GONE})
    raise ConfigError(f"no site {name!r} is registered; there are: {', '.join(names) or 'none'}")


def _checked(key: Path, expected: str) -> str:
    """The fingerprint of a key file.

    Raises:
        ConfigError: it is not the expected one.
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
