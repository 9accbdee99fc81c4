"""Options of plugins, by the names and types of what they construct."""

import inspect
from collections.abc import Callable, Collection, Mapping

from cloister.config.errors import suggestion
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError

NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Arguments that can be given by name."""


def options_of(
    factory: Callable[..., object], given: Mapping[str, Scalar], section: str, name: str, shared: Collection[str] = ()
) -> dict[str, Scalar]:
    """The options a plugin was given, by the names of its constructor.

    Args:
        factory: makes the plugin.
        given: the options by their keys.
        section: that the keys stand in, `strategy` or `privacy.options`, for the message.
        name: of the plugin.
        shared: further keys of the section, which a mistyped one may have meant.

    Raises:
        ConfigError: the plugin has no such option, or the value is not of its type.
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
    """Whether an argument with this default can be given in a configuration."""
    return default is inspect.Parameter.empty or isinstance(default, str | int | float | bool)


def _typed(key: str, value: Scalar, default: object) -> Scalar:
    """`value`, if it is of the type of the default (an int will do for a float)."""
    if default is inspect.Parameter.empty or type(value) is type(default):
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    raise ConfigError(f"{key} = {value!r} is not valid: expected {type(default).__name__}, such as {default!r}")
