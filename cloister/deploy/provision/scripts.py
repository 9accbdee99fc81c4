"""Texts in the kits: scripts, policy, connection, and the proxy's configuration.

They are `shell/*.sh`, with `@NAME@` as the placeholder of a value of the federation. The initial policy of a new site
is `policy.toml`.

The reverse proxy stands in front of the SuperLink: nginx with a list of the keys that it lets in.

    sites and operators ── TLS ──▶ nginx, server.port ── TLS ──▶ SuperLink, server.superlink

The proxy refuses a request of a node whose key is not on the list, or of an operator without a token, before its body
is read. The SuperLink authenticates every request once more.
"""

import json
import re
import shlex
from base64 import b64encode
from importlib import resources

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from cloister.config.io import toml_of
from cloister.deploy.provision.federation import Federation, Site
from cloister.deploy.provision.folder import PUBLIC, Kits
from cloister.utils.errors import ConfigError

_CONNECTION = """\
# Flower's connection to this federation: export FLWR_HOME to this folder, then `flwr run . {name} --stream`.
# The path below is where the kit was made; change it when the kit moves.
[superlink]
default = "{name}"

[superlink.{name}]
address = "{address}"
root-certificates = {certificate}
"""


def server_script(federation: Federation) -> str:
    """Return the script that starts the proxy, the SuperLink and the executor of its apps, or one of them."""
    server = federation.server
    host, _, port = server.superlink.rpartition(":")
    parts = "proxy superlink superexec" if server.is_proxied else "superlink superexec"
    return _filled("server.sh", name=federation.name, host=host, port=port, parts=parts)


def site_script(federation: Federation, site: Site) -> str:
    """Return the script that starts the site's SuperNode.

    Args:
        federation: of the site.
        site: of the kit.
    """
    said = site.model_dump(by_alias=True, exclude={"name", "public_key", "public_signing_key"}, exclude_defaults=True)
    config = " ".join(f"{key}={json.dumps(value)}" for key, value in said.items())
    return _filled("site.sh", name=federation.name, site=site.name, address=federation.address, config=config)


def register_script(federation: Federation) -> str:
    """Return the script that registers the public keys of all sites.

    Registered keys are left as they are.
    """
    return _filled("register.sh", name=federation.name, address=federation.address)


def connection(federation: Federation, certificate: str) -> str:
    """Return the connection's configuration for the `flwr` command.

    Args:
        federation: to connect to.
        certificate: path of the authority's certificate.
    """
    return _CONNECTION.format(name=federation.name, address=federation.address, certificate=json.dumps(certificate))


def policy_template() -> str:
    """Return a policy with every key, for a site to edit."""
    return resources.files("cloister.deploy").joinpath("policy.toml").read_text()


def policy_for(federation: Federation, site: Site) -> str:
    """Return the initial policy of a new site: the template with what `federation.toml` says.

    Args:
        federation: of the site; its tasks are allowed.
        site: its stated size is the same in the policy and in `start.sh`.
    """
    said = {
        "tasks": json.dumps(federation.tasks),
        "public-size": str(site.public_size),
        "group": toml_of(federation.group),
    }
    lines = {key: f"{key} = {value}" for key, value in said.items()}
    return re.sub(rf"^({'|'.join(lines)}) = .*$", lambda line: lines[line[1]], policy_template(), flags=re.MULTILINE)


def _filled(script: str, **values: str) -> str:
    """Return a script of `shell/` with the values of a federation.

    Each value is quoted as one word of the shell.

    Raises:
        KeyError: the script has a placeholder without a value.
    """
    text = resources.files("cloister.deploy").joinpath("shell", script).read_text()
    return re.sub("@([A-Z]+)@", lambda place: shlex.quote(values[place[1].lower()]), text)


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
