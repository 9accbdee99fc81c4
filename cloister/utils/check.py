"""Checks of configuration values, and parsing of a configured address."""

import math
import re
from collections.abc import Collection

from cloister.utils.errors import ConfigError


def positive(**values: float) -> None:
    """Refuse a value that is not a finite number above zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be > 0, got {value}")


def non_negative(**values: float) -> None:
    """Refuse a value that is not a finite number of at least zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be >= 0, got {value}")


def one_of(choices: Collection[str], **values: str) -> None:
    """Refuse a value that is not among the choices."""
    for name, value in values.items():
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(sorted(choices))}; got {value!r}")


def inner(**values: float) -> None:
    """Refuse a value that is not above zero and below one."""
    for name, value in values.items():
        if not 0 < value < 1:
            raise ConfigError(f"{name} must be above 0 and below 1, got {value}")


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
