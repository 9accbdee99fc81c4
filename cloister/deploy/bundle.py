"""Protection of kits from Flower's app bundles, which every site receives."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pathspec import PathSpec

from cloister.core.errors import ConfigError
from cloister.flower.control import get_filtered_fab_paths


def refuse_in_bundle(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder from which an app bundle would include a file.

    Flower includes all files of a dozen kinds below a `pyproject.toml` with `[tool.flwr.app]`. The exceptions are that
    file's `fab-include` and `fab-exclude`, and the `.gitignore` beside it. Flower ignores a `.gitignore` in a
    subfolder.

    Args:
        folder: absolute, for the files.
        names: of the files, relative to it.

    Raises:
        ConfigError: an app at or above the folder would bundle a file.
    """
    for home in (folder, *folder.parents):
        rules = _rules_of(home)
        if rules is None:
            continue
        inside = [(folder / name).relative_to(home).as_posix() for name in names]
        if taken := sorted(_bundled(home, rules, inside)):
            raise ConfigError(
                f"--output {folder} lies in the Flower app {home}, whose bundle would carry {taken[0]} to every site: "
                "choose a folder outside it"
            )


def _rules_of(home: Path) -> dict[str, Any] | None:
    """Return the Flower app table of a folder's `pyproject.toml`; None without one."""
    try:
        content = tomllib.loads((home / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return None
    rules = content.get("tool", {}).get("flwr", {}).get("app")
    return rules if isinstance(rules, dict) else None


def _bundled(home: Path, rules: dict[str, Any], names: Iterable[str]) -> set[str]:
    """The names that Flower's rules leave in a bundle of the app."""
    kept = set(get_filtered_fab_paths(dict.fromkeys(names, b""), {}))
    for patterns in (_ignored(home), rules.get("fab-exclude", [])):
        kept = set(PathSpec.from_lines("gitwildmatch", patterns).match_files(kept, negate=True))
    if "fab-include" in rules:
        kept = set(PathSpec.from_lines("gitwildmatch", rules["fab-include"]).match_files(kept))
    return kept


def _ignored(home: Path) -> list[str]:
    """Return the patterns of an app's `.gitignore`; none where it cannot be read, as Flower has it."""
    try:
        return [line.strip() for line in (home / ".gitignore").read_text("utf-8").splitlines()]
    except (OSError, ValueError):
        return []
