"""The reverse proxy in front of the SuperLink: nginx's configuration, and the list of keys that it lets in.

    sites and operators ── TLS ──▶ nginx, server.port ── TLS ──▶ SuperLink, server.superlink

The proxy refuses a request of a node whose key is not on the list, or of an operator without a token, before its body
is read. The SuperLink authenticates every request once more.
"""

import re
from base64 import b64encode
from importlib import resources

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from cloister.core.errors import ConfigError
from cloister.deploy.federation import Federation
from cloister.deploy.folder import PUBLIC, Kits

CONFIGURATION = "nginx.conf"
NODES = "nodes.conf"
"""The list, in the kits of the server and of the operator."""
RELOAD = "copy it over nodes.conf in the server's kit, whose start.sh reloads the proxy (else: nginx -s reload)"


def configuration(federation: Federation) -> str:
    """Return nginx's configuration for a federation."""
    server = federation.server
    # IPv6 too if the server has such an address.
    places = ["", "[::]:"] if any(":" in address for address in server.addresses) else [""]
    values = {
        "NAME": federation.name,
        "SUPERLINK": server.superlink,
        "VERIFIED": server.verified_name,
        "LISTEN": "\n".join(f"        listen {place}{server.port} ssl;" for place in places),
    }
    text = resources.files("cloister.deploy").joinpath(CONFIGURATION).read_text()
    return re.sub("@([A-Z]+)@", lambda place: values[place[1]], text)


def list_nodes(kits: Kits, operator: str, server: str = "") -> None:
    """Write the list of the keys in an operator's kit where it has changed.

    Args:
        kits: the folder.
        operator: the operator's kit in it, with "/" at the end; empty if it is the folder itself.
        server: the server's kit likewise; empty if it is not here.

    Raises:
        ConfigError: a file holds no public key in OpenSSH format.
    """
    keys = sorted(kits.path(f"{operator}nodes").glob("*.pub"))
    content = ""
    for path in keys:
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm):
            raise ConfigError(f"{path} is no public key in OpenSSH format; put the node's public key there") from None
        shown = b64encode(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).decode()
        content += f'"{shown}" 1; # {path.stem}\n'
    places = [f"{operator}{NODES}", *([f"{server}{NODES}"] if server else [])]
    had = kits.has(places[0])
    stale = [name for name in places if not kits.has(name) or kits.read(name) != content.encode()]
    for name in stale:
        kits.write(name, content, PUBLIC)
    if had and places[0] in stale:
        kits.notes.append(f"{places[0]} has changed: {RELOAD}")
