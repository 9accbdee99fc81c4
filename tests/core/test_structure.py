"""The package keeps the shape that makes it readable."""

import pytest
from structure import DOCUMENTED, body_lines, figures, modules, parameters, uncalled, with_arguments_told

MAX_LINES = 35
MAX_PARAMETERS = 10
MODULES = modules()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: "/".join(module.parts))
def test_functions_are_short_and_take_few_parameters(module):
    long = [function.name for function in module.functions() if body_lines(function) > MAX_LINES]
    wide = [function.name for function in module.functions() if len(parameters(function)) > MAX_PARAMETERS]
    assert not long and not wide


def test_most_public_functions_say_what_their_arguments_are():
    told = [
        (name, said)
        for module in MODULES
        if module.parts[0] in DOCUMENTED
        for name, said in with_arguments_told(module)
    ]
    assert sum(said for _, said in told) >= 0.8 * len(told), [name for name, said in told if not said]


def test_no_folder_holds_more_than_a_quarter_of_the_code():
    assert figures()["share of the biggest folder"] <= 0.25


def test_types_are_told():
    assert figures()["Any"] <= 188 and figures()["type: ignore"] <= 12


def test_every_function_among_the_tests_is_run():
    """One that is named otherwise than pytest expects, and called nowhere, is a test that cannot fail."""
    assert not uncalled()
