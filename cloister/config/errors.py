"""Error messages about settings, one line per key: the key, the value found, the valid values, the nearest keys."""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cloister.config.section import Section, kebab
from cloister.core.errors import ConfigError

NEAREST = 3
"""Largest number of valid keys that a message about an unknown key suggests."""
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
        line = _line(item, key, section, section in unknown)
        unknown |= {section} if item["type"] == "extra_forbidden" else set()
        if item["type"] == "value_error":
            lines[line] = line
        elif key in lines:
            # A key of several types (a number, or "auto") has one error per type.
            lines[key] += f" or {line.partition(INVALID)[2].removeprefix('it must be ')}"
        else:
            lines[key] = line
    return list(lines.values())


def _line(item: ErrorDetails, key: str, section: type[Section], again: bool) -> str:
    """Describe the fault of one key.

    With `again`, an earlier line lists the valid keys of the section.
    """
    own = key.rpartition(".")[2]
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "missing":
        return f"{key} is missing"
    if item["type"] == "extra_forbidden":
        valid = [kebab(name) for name in section.model_fields]
        listed = "" if again else f"; valid keys: {', '.join(valid)}"
        return f"unknown key {key!r}{listed}{suggestion(own, valid)}"
    if item["type"] == "union_tag_invalid":
        *most, last = item["ctx"]["expected_tags"].split(", ")
        return f"{key} = {item['input'][own]!r}{INVALID}it must be {', '.join(most)} or {last}"
    return f"{key} = {item['input']!r}{INVALID}{SHOULD.sub('it must', item['msg'])}"


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


def suggestion(key: str, valid: Collection[str]) -> str:
    """Return `; did you mean ...?` with the most similar valid key, or nothing.

    Args:
        key: that is invalid.
        valid: valid keys or names.
    """
    close = difflib.get_close_matches(kebab(key), valid, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(key: str, valid: Collection[str]) -> str:
    """Return a hint with the valid keys most similar to `key`.

    Args:
        key: that is invalid.
        valid: all valid keys.
    """
    close = difflib.get_close_matches(kebab(key), valid, n=NEAREST)
    if close:
        others = f" (or {' or '.join(map(repr, close[1:]))})" if close[1:] else ""
        return f"did you mean {close[0]!r}?{others}"
    some = difflib.get_close_matches(kebab(key), valid, n=NEAREST, cutoff=0.0)
    return f"the nearest valid keys are {', '.join(map(repr, some))}; docs/configuration.md has them all"


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
