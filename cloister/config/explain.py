"""What is wrong with a file of ours, in one line for each key."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel


def explained(item: Any, section: Callable[[tuple[str, ...]], type[BaseModel]]) -> str:
    """The key, the value found and what is valid, of one error of pydantic's.

    Args:
        item: the error.
        section: the model that a key lies in, by the names above the key.
    """
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key} is missing"
    if item["type"] == "extra_forbidden":
        fields = section(tuple(str(part) for part in item["loc"][:-1] if not isinstance(part, int))).model_fields
        return f"unknown key {key!r}; valid keys: {', '.join(field.replace('_', '-') for field in fields)}"
    return f"{key} = {item['input']!r} is not valid: {item['msg'].replace('Input should', 'it must')}"
