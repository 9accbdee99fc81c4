"""The size of the project: modules, code, words, and how far a configuration travels before the first message.

python benchmarks/size.py

It reads the checkout that it is in, and trains one round with two simulated clients in this process.
"""

import ast
import re
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from common import table

from cloister.config.io import Section
from cloister.simulation.simulate import simulate

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cloister"
VAGUE = re.compile(r"\b(?:whoever|nobody|somebody|whatever)\b", re.IGNORECASE)
QUESTIONS = {"how", "of", "those", "what", "when", "where", "whether", "which", "who", "whose", "why"}
NOT_VERBS = {
    *("a", "all", "an", "another", "any", "as", "at", "both", "by", "each", "every", "everything", "for", "from", "if"),
    *("in", "it", "its", "no", "nothing", "on", "one", "or", "our", "same", "some", "such", "that", "the", "their"),
    *("these", "this", "to", "true", "two", "with"),
}
"""First words of a docstring that are no verb, beside the questions and plural or past forms."""
WORD = re.compile(r"\S*\w\S*")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
READS = (ast.Name, ast.Attribute)


def main() -> None:
    """Print the table."""
    sources = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path.stat().st_size}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    modules = {path: tree for path, tree in trees.items() if any(not _is_docstring(node) for node in tree.body)}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    firsts = [text.split()[0].strip("`,.:").lower() for text in map(ast.get_docstring, functions) if text]
    importers = _importers(trees)
    pages = sorted((ROOT / "docs").glob("*.md"))
    rows: list[tuple[str, object]] = [
        ("modules", len(modules)),
        ("modules with one importer", sum(len(importers[_name(path)]) == 1 for path in modules)),
        ("lines of code", sum(_code_lines(path) for path in sources)),
        ("private functions with one call", _called_once(trees)),
        ("docstrings that begin with a verb, %", _share(firsts, _is_verb)),
        ("docstrings that begin with a question word, %", _share(firsts, QUESTIONS.__contains__)),
        ("vague pronouns in the code", sum(len(VAGUE.findall(text)) for text in sources.values())),
        ("Any in the code", sum(_names(tree).count("Any") for tree in trees.values())),
        ("words of docs/", sum(len(WORD.findall(page.read_text())) for page in pages)),
        ("words of the README", len(WORD.findall((ROOT / "README.md").read_text()))),
        ("files that a configuration passes before the first message", len(_passed())),
    ]
    table(["figure", "value"], [[name, str(value)] for name, value in rows])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _importers(trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    known = {_name(path) for path in trees}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            targets: Iterable[str] = ()
            if isinstance(node, ast.ImportFrom):
                inner = [f"{node.module}.{each.name}" for each in node.names]
                targets = [each if each in known else str(node.module) for each in inner]
            elif isinstance(node, ast.Import):
                targets = [each.name for each in node.names]
            for target in targets:
                importers[target].add(_name(path))
    return importers


def _code_lines(path: Path) -> int:
    """Return the number of lines that have code: neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    with path.open("rb") as file:
        previous = tokenize.NEWLINE
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.INDENT, tokenize.DEDENT):
                continue
            is_text = token.type == tokenize.STRING and previous == tokenize.NEWLINE
            if not is_text and token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER):
                lines.update(range(token.start[0], token.end[0] + 1))
            previous = token.type
    return len(lines)


def _names(node: ast.AST) -> list[str]:
    """Return every name and attribute that is read in a tree."""
    return [each.id if isinstance(each, ast.Name) else each.attr for each in ast.walk(node) if isinstance(each, READS)]


def _called_once(trees: dict[Path, ast.Module]) -> int:
    """Return how many private functions are named in one place of their module, beside their definition."""
    count = 0
    for tree in trees.values():
        names = _names(tree)
        own = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
        count += sum(names.count(name) == 1 for name in own if name.startswith("_") and not name.startswith("__"))
    return count


def _is_verb(word: str) -> bool:
    """Return whether the first word of a docstring may be an imperative: a rule on its spelling, not a dictionary."""
    return word not in QUESTIONS | NOT_VERBS and word.isalpha() and not re.search(r"(?<!s)s$|ed$|ing$", word)


def _share(words: list[str], fits: Callable[[str], bool]) -> str:
    return f"{100 * sum(map(fits, words)) / len(words):.1f}"


def _passed() -> set[str]:
    """Return the files with a function that has a part of the configuration, until the first message leaves."""
    files: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "call" and code.co_name == "push_messages":
            sys.setprofile(None)
        elif event == "return" and any(isinstance(value, Section) for value in frame.f_locals.values()):
            files.add(code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(look)
        try:
            simulate({"num-rounds": 1, "task.model": "softmax", "tensorboard": False, "output-dir": folder}, clients=2)
        finally:
            sys.setprofile(None)
    return files


if __name__ == "__main__":
    main()
