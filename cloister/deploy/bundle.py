"""Protection of kits from Flower's app bundles, which every site receives."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

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
        try:
            rules = tomllib.loads((home / "pyproject.toml").read_text()).get("tool", {}).get("flwr", {}).get("app")
        except (OSError, ValueError):
            continue
        if not isinstance(rules, dict):
            continue
        try:
            ignored = [line.strip() for line in (home / ".gitignore").read_text("utf-8").splitlines()]
        except (OSError, ValueError):
            ignored = []  # as Flower has it
        kept = set(get_filtered_fab_paths({(folder / name).relative_to(home).as_posix(): b"" for name in names}, {}))
        for patterns in (ignored, rules.get("fab-exclude", [])):
            kept = set(PathSpec.from_lines("gitwildmatch", patterns).match_files(kept, negate=True))
        if "fab-include" in rules:
            kept = set(PathSpec.from_lines("gitwildmatch", rules["fab-include"]).match_files(kept))
        if kept:
            raise ConfigError(
                f"--output {folder} lies in the Flower app {home}, whose bundle would carry {min(kept)} to every site: "
                "choose a folder outside it"
            )
