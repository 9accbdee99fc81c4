"""The code and its tests keep their shape. Ruff keeps functions short and narrow; this file counts the rest."""

import ast
import re
from collections import Counter

from structure import ROOT, modules

DOCUMENTED = ("privacy", "server", "tasks")
"""Parts whose public functions say what their arguments are."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function):
    """Return the names of a function's parameters, without `self` and `cls`."""
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}


def public_functions(tree):
    """Yield the public functions of a module and of its classes."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Module | ast.ClassDef):
            yield from (node for node in owner.body if isinstance(node, Function) and not node.name.startswith("_"))


def test_most_public_functions_say_what_their_arguments_are():
    functions = [
        (f"{module.name}: {function.name}", "Args:" in (ast.get_docstring(function) or ""))
        for module in modules()
        if module.part in DOCUMENTED
        for function in public_functions(module.tree)
        if len(parameters(function)) > 1
    ]
    silent = [name for name, said in functions if not said]
    assert len(silent) <= 0.2 * len(functions), silent


def test_no_folder_holds_more_than_a_quarter_of_the_code():
    lines = Counter()
    for module in modules():
        lines[module.path.parent] += module.text.count("\n")
    folder, most = lines.most_common(1)[0]
    assert most <= 0.25 * lines.total(), folder


def test_types_are_told():
    anything = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    ignored = [module.name for module in modules() for _ in range(module.text.count("type: ignore"))]
    assert len(anything) <= 188, Counter(place.split(":")[0] for place in anything)
    assert len(ignored) <= 12, Counter(ignored)


def test_every_function_among_the_tests_is_run():
    """One that is named otherwise than pytest expects, and called nowhere, is a test that cannot fail."""
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    words = Counter(re.findall(r"(?<!def )\b\w+", "\n".join(texts.values())))
    unnamed = {name for text in texts.values() for name in re.findall(r"def (\w+)", text) if not words[name]}
    uncalled = [
        f"{path.name}: {function.name}"
        for path, text in texts.items()
        if path.name.startswith("test_") and any(name in unnamed for name in re.findall(r"def ((?!test)\w+)", text))
        for function in functions_of_tests(ast.parse(text))
        if not (function.name.startswith("test") or function.decorator_list or words[function.name])
    ]
    assert not uncalled


def functions_of_tests(tree):
    """Yield the functions of a module, and those of its classes of tests."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    for owner in (tree, *classes):
        yield from (node for node in owner.body if isinstance(node, Function))
