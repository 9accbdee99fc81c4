"""Base of all sections of settings, parsers of settings, and errors that name the key and the value."""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from cloister.utils.errors import ConfigError, SettingsError
from cloister.utils.files import Json, expanded
from cloister.utils.text import suggestion

Scalar = str | int | float | bool
Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Inner = Annotated[float, Field(gt=0, lt=1)]
Heading = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]{0,200}$")]
"""Name of an array or of a table's column, such as `Patient ID`: printable, at most 200 characters."""


def kebab(name: str) -> str:
    """Return the name of a field in the spelling of configuration files."""
    return name.replace("_", "-")


class Section(BaseModel):
    """Frozen group of keys: refuses unknown keys, converts no types, and refuses NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=kebab, populate_by_name=True, allow_inf_nan=False
    )

    def leaves(self) -> dict[str, Scalar]:
        """Return the flat keys with their values, including those of nested sections."""
        found: dict[str, Scalar] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            found |= value.leaves() if isinstance(value, Section) else {field.alias or name: value}
        return found


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
            settings |= _from_file(path, argument.strip()) if is_path else _from_pairs(argument)
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
        return _from_pairs(text) if nested is None else _scalars(nested)
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


def _from_file(path: Path, argument: str) -> dict[str, Scalar]:
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
    return _scalars(nested)


def _scalars(nested: Json) -> dict[str, Scalar]:
    """Return the keys of a nested mapping in dotted form, with their values; refuse a value that is no scalar."""
    return {key: _checked(key, value) for key, value in flatten(nested).items()}


def flatten(nested: Json, prefix: str = "") -> dict[str, Scalar]:
    """Return the keys of a nested mapping in dotted form.

    Args:
        nested: tables within tables, as in a TOML file.
        prefix: put before every key.
    """
    flat: dict[str, Scalar] = {}
    for key, value in nested.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


MISSING = 3
"""Largest number of missing keys with a line each. More of them share one line."""
INVALID = " is not valid: "
SHOULD = re.compile(r"^(Input|String|List|Dictionary) should")
"""Start of pydantic's messages."""
Checked = TypeVar("Checked", bound=Section)


def read_toml(kind: type[Checked], path: Path, place: str) -> Checked:
    """Read a TOML file of settings into a section.

    Args:
        kind: the section of the whole file.
        path: of the file.
        place: names the file in errors.

    Raises:
        ConfigError: the file is missing or not TOML, or keys are invalid. The message names each key and its value.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{place} is no TOML that can be read: it is nested too deeply") from None
    return checked(kind, content, f"{place}: ")


def checked(
    kind: type[Checked], settings: Mapping[str, object], prefix: str = "", error_type: type[ConfigError] = ConfigError
) -> Checked:
    """Validate settings, and return their section.

    Args:
        kind: the section.
        settings: by key.
        prefix: of each line of an error.
        error_type: of that error.

    Raises:
        ConfigError: has a line for each invalid key, with the value found and the valid ones.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise error_type("\n".join(f"{prefix}{line}" for line in explain(error, kind))) from None


def explain(error: ValidationError, root: type[Section]) -> list[str]:
    """Describe a validation error in a line for each invalid key.

    Args:
        error: raised by pydantic.
        root: the section of the whole file.

    Returns:
        One text for each key. A rule between keys gives its own message, which may have several lines.
    """
    missing = [_place(item, root)[0] for item in error.errors() if item["type"] == "missing"]
    lines: dict[str, str] = {"": f"{', '.join(missing)} are missing"} if len(missing) > MISSING else {}
    unknown: set[type[Section]] = set()
    for item in error.errors():
        if item["type"] == "missing" and len(missing) > MISSING:
            continue
        key, section = _place(item, root)
        own = key.rpartition(".")[2]
        if item["type"] == "value_error":
            key = line = str(item["ctx"]["error"])
        elif item["type"] == "missing":
            line = f"{key} is missing"
        elif item["type"] == "extra_forbidden":
            valid = [kebab(name) for name in section.model_fields]
            listed = "" if section in unknown else f"; valid keys: {', '.join(valid)}"
            unknown.add(section)
            # The nearest key stands first: a long list may be cut where the message is shown.
            meant = suggestion(own, valid, otherwise="; the nearest valid key is {}")
            line = f"unknown key {key!r}{meant}{listed}"
        elif item["type"] == "union_tag_invalid":
            *most, last = item["ctx"]["expected_tags"].split(", ")
            found = item["input"][own]
            meant = suggestion(str(found), [tag.strip("'") for tag in (*most, last)])
            line = f"{key} = {found!r}{INVALID}it must be {', '.join(most)} or {last}{meant}"
        else:
            line = f"{key} = {item['input']!r}{INVALID}{SHOULD.sub('it must', item['msg'])}"
        if item["type"] != "value_error" and key in lines:
            # A key of several types (a number, or "auto") has one error per type.
            lines[key] += f" or {line.partition(INVALID)[2].removeprefix('it must be ')}"
        else:
            lines[key] = line
    return list(lines.values())


def _place(item: ErrorDetails, root: type[Section]) -> tuple[str, type[Section]]:
    """Return the dotted key of an error, and the section that contains it.

    Besides keys, pydantic's location contains the branch of a type and the name of a variant. The keys of a variant are
    written beside the key that chooses it, not below it.
    """
    keys: list[str] = []
    inside: tuple[type[Section], ...] = (root,)
    for part in item["loc"]:
        fields = {field.alias or name: field for section in inside for name, field in section.model_fields.items()}
        if isinstance(part, int) or part in fields:
            keys = [*(keys[:-1] if len(inside) > 1 else keys), str(part)]
        if part in fields:
            inside = sections_of(fields[str(part)].annotation) or inside
    return ".".join([*keys, str(item["loc"][-1])] if item["type"] == "extra_forbidden" else keys), inside[0]


def sections_of(annotation: object) -> tuple[type[Section], ...]:
    """Return the sections in a type: one, the variants of a choice, or none.

    Args:
        annotation: the type of a field, such as `list[Site]` or a union.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def no_effect(key: str, value: object, because: str, found: object) -> str:
    """Return the message for a key that another key's value makes meaningless.

    Args:
        key, value: as they were set.
        because, found: the other key, without its section, and its value.
    """
    section = key.partition(".")[0]
    return (
        f"{key} = {value!r} has no effect with {section}.{because} = {found!r}; remove it or choose another "
        f"{section}.{because}"
    )
