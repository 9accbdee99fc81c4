"""Texts in the kits. Scripts run on a plain machine and in a container, independently of the kit's path.

They are `shell/*.sh`, with `@NAME@` as the placeholder of a value of the federation. The initial policy of a new site
is `policy.toml`.
"""

import json
import re
import shlex
from collections.abc import Sequence
from importlib import resources

from cloister.deploy.federation import Federation, Site

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
    """Starts the proxy, the SuperLink and the executor of its apps, or one of them."""
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


def policy_for(tasks: Sequence[str]) -> str:
    """Return the initial policy of a new site, for the tasks of its federation."""
    allowed = f"tasks = {json.dumps(list(tasks))}"
    return re.sub(r"^tasks = \[.*\]$", allowed, policy_template(), flags=re.MULTILINE)


def _filled(script: str, **values: str) -> str:
    """Return a script of `shell/` with the values of a federation.

    Each value is quoted as one word of the shell.

    Raises:
        KeyError: the script has a placeholder without a value.
    """
    text = resources.files("cloister.deploy").joinpath("shell", script).read_text()
    return re.sub("@([A-Z]+)@", lambda place: shlex.quote(values[place[1].lower()]), text)
