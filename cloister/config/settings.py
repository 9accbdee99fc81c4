"""Parser of settings from the command line, `key=value` pairs and TOML files. It refuses any unparsed rest."""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping

from cloister.config.section import Scalar
from cloister.core.errors import SettingsError
from cloister.core.files import expanded

OPTION = "-c (--run-config)"
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=\s*")
_VALUE = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"'#]+)(?=\s|$)""")


def read_settings(arguments: Iterable[str]) -> dict[str, Scalar]:
    """Read dotted keys from the arguments of several `-c`.

    A later argument overrides an earlier one.

    Args:
        arguments: each contains `key=value` pairs with blanks between them, or the path of one TOML file. Values are
            TOML: `'text'`, `3`, `0.5`, `true`. Blanks around `=` are allowed.

    Raises:
        SettingsError: part of an argument is neither, or a key is named twice in one argument.
    """
    settings: dict[str, Scalar] = {}
    try:
        for argument in arguments:
            path = expanded(argument.strip())
            # A pair may end in `.toml` too.
            is_path = argument.strip() and ("=" not in argument or (path.suffix == ".toml" and path.is_file()))
            settings |= _from_file(argument.strip()) if is_path else _from_pairs(argument)
    except ValueError as error:
        raise SettingsError(f"{OPTION}: {error}") from None
    return settings


def read_options(key: str, text: str) -> dict[str, Scalar]:
    """Read the options in a single string, without reading files.

    One string key carries options of any name through an interface that accepts only known keys.

    Args:
        key: of the string, for errors.
        text: `key=value` pairs with blanks between them, or a TOML document.

    Raises:
        ValueError: it is neither, or a key occurs twice.
    """
    try:
        nested = tomllib.loads(text)
    except (ValueError, RecursionError):
        nested = None
    try:
        return _from_pairs(text) if nested is None else dict(_dotted(nested))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {error}") from None


def as_pairs(settings: Mapping[str, Scalar]) -> str:
    """Format settings as a line that `read_settings` reads back.

    Args:
        settings: by dotted keys.
    """
    pairs = []
    for key, value in settings.items():
        needs_no_escape = isinstance(value, str) and value.isprintable() and "'" not in value
        pairs.append(f"{key}='{value}'" if needs_no_escape else f"{key}={toml_of(value)}")
    return " ".join(pairs)


def toml_of(value: Scalar) -> str:
    """Format a value as TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


_VALID = "a value is 'text' in quotes, a number, true or false, and a blank follows it"


def _from_pairs(text: str) -> dict[str, Scalar]:
    pairs: dict[str, Scalar] = {}
    position, end = 0, len(text.rstrip())
    while position < end:
        key = _KEY.match(text, position)
        if key is None:
            raise ValueError(f"{text[position:].strip()!r} does not begin with key=value")
        value = _VALUE.match(text, key.end())
        if value is None:
            raise ValueError(f"{key[1]} = {text[key.end() :].strip()!r} is not valid: {_VALID}")
        try:
            found = tomllib.loads(f"value = {value[1]}")["value"]
        except ValueError:  # not TOML, or a number with thousands of digits
            raise ValueError(f"{key[1]} = {value[1]} is not valid: {_VALID}") from None
        pair = _checked(key[1], found)
        if key[1] in pairs:
            raise ValueError(f"{key[1]} is there twice in {text!r}")
        pairs[key[1]] = pair
        position = value.end()
    return pairs


def _checked(key: str, value: object) -> Scalar:
    if not isinstance(value, str | int | float | bool):
        raise ValueError(f"{key} is of type {type(value).__name__}; {_VALID}")
    return value


def _from_file(argument: str) -> dict[str, Scalar]:
    path = expanded(argument)
    if path.suffix != ".toml" or not os.path.isfile(path):
        what = f"there is no file at {argument}" if path.suffix == ".toml" else f"{argument!r} is neither"
        raise ValueError(f"{what}; expected key=value pairs, or the path of a TOML file (.toml)")
    try:
        nested = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{argument} cannot be read as TOML: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{argument} cannot be read as TOML: {reason}") from None
    return dict(_dotted(nested))


def _dotted(nested: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _checked(f"{prefix}{key}", value)
