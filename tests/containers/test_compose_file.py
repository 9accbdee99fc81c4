"""What compose.yaml says, read without an engine."""

from itertools import combinations
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
MEMBERS = [name for name in SERVICES if name not in ("superlink", "register")]


def test_no_two_members_share_a_network():
    for one, other in combinations(MEMBERS, 2):
        assert not set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"]), f"{one} reaches {other}"


@pytest.mark.parametrize("name", MEMBERS)
def test_each_reaches_the_superlink_and_nothing_outside(name):
    (network,) = SERVICES[name]["networks"]
    assert network in SERVICES["superlink"]["networks"] and COMPOSE["networks"][network]["internal"] is True


@pytest.mark.parametrize("name", SERVICES)
def test_each_has_a_limit_on_memory_processes_and_logs(name):
    service = SERVICES[name]
    assert service["mem_limit"] == service["memswap_limit"] == "${CLOISTER_MEMORY:-4g}"
    assert 0 < service["pids_limit"] <= 4096
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


def test_the_debugging_file_changes_commands_and_no_limits():
    plain = yaml.safe_load((ROOT / "compose.plain-http.yaml").read_text())["services"]
    assert {key for service in plain.values() for key in service} == {"command", "environment"}
