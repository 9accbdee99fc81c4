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
        if parameter.kind in NAMED
        and option not in ("train", "evaluate")
        # A configuration can set these alone.
        and (parameter.default is inspect.Parameter.empty or isinstance(parameter.default, str | int | float | bool))
    }
    found: dict[str, Scalar] = {}
    for key, value in given.items():
        option = key.replace("-", "_")
        if option not in allowed:
            valid = [each.replace("_", "-") for each in sorted(allowed)]
            raise ConfigError(
                f"{section}.{key} = {value!r} is not an option of {name!r}{suggestion(key, [*valid, *shared])}; "
                f"its options: {', '.join(f'{section}.{each}' for each in valid) or 'none'}"
            )
        default = allowed[option]
        if default is inspect.Parameter.empty or type(value) is type(default):
            found[option] = value
        elif isinstance(default, float) and type(value) is int:
            found[option] = float(value)
        else:
            wanted = f"expected {type(default).__name__}, such as {default!r}"
            raise ConfigError(f"{section}.{key} = {value!r} is not valid: {wanted}")
    return found
