"""Handlers in front of Flower's functions, and the order in which a request passes them."""

import pytest
from flwr.superlink.servicer.control import control_handlers
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers

from cloister.deploy.superlink.gate import Gate
from cloister.deploy.superlink.serve import install

OF_NODES = {name: ["Gate"] for name in Gate.names} | {"check_abort": ["RunningRuns"]}
OF_APPS = {"push_messages": ["AppMessages"], "pull_object": ["GateKnown"]}
OF_OPERATORS = {"register_node": ["RevokedKeys"]}


def passed(module, name):
    """Return the handlers of a request in order, up to Flower's own function."""
    function, found = vars(module)[name], []
    while hasattr(function, "__self__"):
        found.append(type(function.__self__).__name__)
        function = function.__self__.inner[name]
    assert function.__module__.startswith("flwr.")
    return found


@pytest.mark.usefixtures("flower_as_it_was")
def test_a_request_passes_all_of_it_in_this_order():
    wanted = {fleet_handlers: OF_NODES, runtime_handlers: OF_APPS, control_handlers: OF_OPERATORS}
    before = {module: dict(vars(module)) for module in wanted}
    install()
    for module, expected in wanted.items():
        changed = {name for name, value in vars(module).items() if value is not before[module][name]}
        assert {name: passed(module, name) for name in changed} == expected
