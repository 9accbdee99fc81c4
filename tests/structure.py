"""The modules of the package, read and parsed once for all tests that look at its code."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cloister"


@dataclass(frozen=True)
class Module:
    """One file: its place, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    @property
    def part(self) -> str:
        """The folder or file of the package: `privacy`."""
        return self.name.split(".")[1]


@cache
def modules() -> list[Module]:
    """Return every module of the package."""
    return [Module(path, text := path.read_text(), ast.parse(text)) for path in sorted(PACKAGE.rglob("*.py"))]
