"""One package imports what Flower does not document."""

import ast
import re
from itertools import pairwise

from flwr.supercore import utils
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from structure import modules
from support import failures

from cloister.flower import flower_home, superlink

DOCUMENTED = {"flwr", "flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.serverapp", "flwr.serverapp.strategy"}
MOST = 60
"""Names that the adapter may import."""


def undocumented(tree):
    """Return the names that code imports from undocumented modules of Flower, in functions and by strings too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module not in DOCUMENTED:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "flwr":
            found |= {f"flwr.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^flwr(?:\.\w+)+$", node.value))
    return {name for name in found if name.split(".")[0] == "flwr"} - DOCUMENTED


def test_imports_are_seen():
    def check(code, names):
        assert undocumented(ast.parse(code)) == names

    cases = [
        ("from flwr.app import Message\nfrom flwr import app\nimport flwr, flwr.clientapp", set()),
        ("def run():\n    from flwr.proto import node_pb2", {"flwr.proto.node_pb2"}),
        ("from flwr import common", {"flwr.common"}),
        ("import flwr.common.constant as c", {"flwr.common.constant"}),
        ("import_module('flwr.superlink.main')", {"flwr.superlink.main"}),
        ("from flwrlike.common import x\nlog('flwr.')", set()),
    ]
    assert failures(cases, check) == []


def test_undocumented_modules_of_flower_are_imported_by_the_adapter_alone():
    elsewhere = {module.name: undocumented(module.tree) for module in modules() if module.part != "flower"}
    assert not {name: found for name, found in elsewhere.items() if found}


def test_the_adapter_imports_few_names():
    found = set().union(*(undocumented(module.tree) for module in modules() if module.part == "flower"))
    assert 0 < len(found) <= MOST, sorted(found)


def test_every_import_of_the_adapter_has_a_reason():
    """A comment stands above each block of imports."""
    bare = []
    for module in modules():
        lines = ["", *module.text.splitlines()]
        for before, line in pairwise(lines):
            of_flower = re.match(r"\s*from (flwr[.\w]*) import", line)
            if module.part == "flower" and of_flower and of_flower[1] not in DOCUMENTED:
                is_told = before.lstrip().startswith(("#", "from flwr"))
                bare += [] if is_told else [f"{module.name}: {line}"]
    assert not bare


def test_values_that_are_written_down_are_flowers():
    def check(ours, flowers):
        assert ours == flowers

    cases = [
        (superlink.FLWR_IN_MEMORY_DB_NAME, FLWR_IN_MEMORY_DB_NAME),
        (superlink.PROTOBUF_MEDIA_TYPE, PROTOBUF_MEDIA_TYPE),
    ]
    assert failures(cases, check) == []


def test_the_database_has_ids_as_flower_stores_them():
    def check(number):
        assert superlink.in_database(number) == utils.uint64_to_int64(number)

    assert failures([0, 1, 2**63 - 1, 2**63, 2**64 - 1], check) == []


def test_the_folder_of_settings_is_flowers(monkeypatch):
    def check(home):
        if home is None:
            monkeypatch.delenv("FLWR_HOME", raising=False)
        else:
            monkeypatch.setenv("FLWR_HOME", home)
        assert flower_home() == utils.get_flwr_home()

    cases = [None, "", "/srv/flower"]
    assert failures(cases, check) == []
