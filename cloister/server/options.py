"""Validation of plugin options against the signature of the plugin's constructor."""

import inspect
from collections.abc import Callable, Collection, Mapping

from cloister.config.errors import suggestion
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError

NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that accept a keyword argument."""


def options_of(
    factory: Callable[..., object], given: Mapping[str, Scalar], section: str, name: str, shared: Collection[str] = ()
) -> dict[str, Scalar]:
    """Return the options of a plugin by the parameter names of its constructor.

    Args:
        factory: constructs the plugin.
        given: the options by their keys.
        section: of the keys, `strategy` or `privacy.options`, for the message.
        name: of the plugin.
        shared: further valid keys of the section, for spelling suggestions.

    Raises:
        ConfigError: the plugin has no such option, or the value has another type.
    """
    allowed = {
        option: parameter.default
        for option, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in NAMED and option not in ("train", "evaluate") and _is_scalar(parameter.default)
    }
    return dict(_checked(key, value, allowed, section, name, shared) for key, value in given.items())


def _checked(
    key: str, value: Scalar, allowed: Mapping[str, object], section: str, name: str, shared: Collection[str]
) -> tuple[str, Scalar]:
    option = key.replace("-", "_")
    if option in allowed:
        return option, _typed(f"{section}.{key}", value, allowed[option])
    valid = [each.replace("_", "-") for each in sorted(allowed)]
    raise ConfigError(
        f"{section}.{key} = {value!r} is not an option of {name!r}{suggestion(key, [*valid, *shared])}; "
        f"its options: {', '.join(f'{section}.{each}' for each in valid) or 'none'}"
    )


def _is_scalar(default: object) -> bool:
    """Return whether a configuration can set a parameter with this default."""
    return default is inspect.Parameter.empty or isinstance(default, str | int | float | bool)


def _typed(key: str, value: Scalar, default: object) -> Scalar:
    """Return `value` if it has the type of the default; convert int to float."""
    if default is inspect.Parameter.empty or type(value) is type(default):
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    raise ConfigError(f"{key} = {value!r} is not valid: expected {type(default).__name__}, such as {default!r}")
