"""Figures of the code's structure: python tests/structure.py prints them, and a test holds the package to them.

Lines of code are counted without docstrings, comments and blanks. A folder is counted with what lies directly in it; a
room is a top-level folder with everything below it.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cloister"
DOCUMENTED = ("privacy", "aggregation", "tasks")
"""Rooms whose public functions say what their arguments are."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file: its place, its text and its tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        return self.path.relative_to(PACKAGE).parts

    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


@cache
def modules(package: Path = PACKAGE) -> list[Module]:
    """Every module of the package."""
    return [Module(path, text := path.read_text(), ast.parse(text)) for path in sorted(package.rglob("*.py"))]


def docstring_lines(node: ast.AST) -> int:
    """Lines that the docstring of a module, class or function takes."""
    body = getattr(node, "body", [])
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first.end_lineno - first.lineno + 1
    return 0


def code_lines(module: Module) -> int:
    """Lines that hold a token of code."""
    lines: set[int] = set()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        # A string that stands by itself is documentation, wherever it is.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def body_lines(function: Function) -> int:
    """Lines of a function without its docstring and its decorators."""
    return function.end_lineno - function.lineno + 1 - docstring_lines(function)


def parameters(function: Function) -> list[str]:
    """The names of a function's parameters, without `self` and `cls`."""
    given = function.args
    named = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in named if name not in ("self", "cls")]


def with_arguments_told(module: Module) -> Iterator[tuple[str, bool]]:
    """Public functions of two or more parameters, and whether they say what their arguments are."""
    for owner in ast.walk(module.tree):
        for function in getattr(owner, "body", []) if isinstance(owner, ast.Module | ast.ClassDef) else []:
            if isinstance(function, Function) and not function.name.startswith("_") and len(parameters(function)) > 1:
                yield function.name, "Args:" in (ast.get_docstring(function) or "")


def uncalled(folder: Path = ROOT / "tests") -> list[str]:
    """Functions of test modules and of test classes that pytest does not collect and no line of the tests names."""
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    words = Counter(re.findall(r"(?<!def )\b\w+", "\n".join(texts.values())))
    return [
        f"{path.name}: {function.name}"
        for path, text in texts.items()
        if path.name.startswith("test_")
        for function in _of_tests(ast.parse(text))
        if not (function.name.startswith("test") or function.decorator_list or words[function.name])
    ]


def _of_tests(tree: ast.Module) -> Iterator[Function]:
    """The functions of a module, and those of its classes of tests."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    for owner in (tree, *classes):
        yield from (node for node in owner.body if isinstance(node, Function))


@lru_cache(maxsize=1)
def figures() -> dict[str, float]:
    """All figures by name."""
    every = modules()
    functions = [function for module in every for function in module.functions()]
    told = [said for module in every if module.parts[0] in DOCUMENTED for _, said in with_arguments_told(module)]
    folders, rooms = Counter(), Counter()
    for module in every:
        lines = code_lines(module)
        folders["/".join(module.parts[:-1]) or "."] += lines
        rooms[module.parts[0]] += lines
    total = sum(folders.values())
    text = [module.text for module in every]
    return {
        "modules": len(every),
        "lines of code": total,
        "functions": len(functions),
        "longest function, lines": max(map(body_lines, functions)),
        "most parameters": max(len(parameters(function)) for function in functions),
        "Any": sum(isinstance(n, ast.Name) and n.id == "Any" for module in every for n in ast.walk(module.tree)),
        "type: ignore": sum(each.count("type: ignore") for each in text),
        "share of functions whose arguments are told": sum(told) / len(told),
        "share of the biggest folder": max(folders.values()) / total,
        "share of the biggest room": max(rooms.values()) / total,
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:45} {value:.3g}" if isinstance(value, float) else f"{name:45} {value}")
