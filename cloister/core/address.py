"""Parsing of a configured address for a listening socket."""

import re

from cloister.core.errors import ConfigError

PORT = re.compile(r"[0-9]{1,5}")


def host_and_port(listen: str, minimum: int = 0) -> tuple[str, int]:
    """Split the value of `--listen` into its address and its port.

    Args:
        listen: such as 127.0.0.1:9464 or [::1]:9464.
        minimum: smallest port accepted; port 0 stands for any free port.

    Raises:
        ConfigError: it is not an address and a port.
    """
    host, _, port = listen.rpartition(":")
    if not host or not PORT.fullmatch(port) or not minimum <= int(port) < 2**16:
        raise ConfigError(f"--listen {listen!r} must be an address and a port, as 127.0.0.1:9464")
    return host.strip("[]"), int(port)
