"""Checks of configuration values, passed by keyword, so that the error can name the key."""

import math
from collections.abc import Collection

from cloister.core.errors import ConfigError


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
