"""The grid by which a server's app reaches nodes."""

# Seconds for which a SuperLink knows messages whose objects are still to come.
from flwr.supercore.constant import OBJECT_PUSH_SESSION_TTL_SECONDS as OBJECT_PUSH_SESSION_TTL_SECONDS

# The head of an object, read as Flower reads it: both see the same parts.
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content as get_object_head_values_from_object_content,
)

# The error of a grid whose SuperLink declines an object.
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError as ObjectPushError


def is_over_http(grid: object) -> bool:
    """Return whether a grid reaches its nodes over a SuperLink."""
    return _is_flowers(grid, "HttpGrid")


def is_simulation(grid: object) -> bool:
    """Return whether a grid is that of Flower's simulation."""
    return _is_flowers(grid, "InMemoryGrid")


def _is_flowers(grid: object, name: str) -> bool:
    # By name: no run waits a second for the import of a grid that it does not have.
    return any(cls.__name__ == name and cls.__module__.startswith("flwr.") for cls in type(grid).__mro__)
