"""Facts of compose.yaml, read without an engine."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SITES = [name for name in SERVICES if name.startswith("site-")]
MEMBERS = [*SITES, "superexec"]


def test_no_two_members_share_a_network():
    for one, other in combinations(MEMBERS, 2):
        assert not set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"]), f"{one} reaches {other}"


def test_sites_reach_the_proxy_and_the_servers_app_the_superlink_and_nothing_outside():
    for name in MEMBERS:
        (network,) = SERVICES[name]["networks"]
        others = {other for other in ("superlink", "proxy") if network in SERVICES[other]["networks"]}
        assert others == {"proxy" if name in SITES else "superlink"}, name
        assert COMPOSE["networks"][network]["internal"] is True, name


def test_the_proxy_alone_is_published_and_reaches_the_superlink():
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["proxy"]
    shared = set(SERVICES["proxy"]["networks"]) & set(SERVICES["superlink"]["networks"])
    assert shared == {"inside"} and COMPOSE["networks"]["inside"]["internal"] is True
    assert "outside" not in SERVICES["superlink"]["networks"]


def test_each_has_a_limit_on_memory_processes_and_logs():
    for name, service in SERVICES.items():
        assert service["mem_limit"] == service["memswap_limit"] == "${CLOISTER_MEMORY:-4g}", name
        assert 0 < service["pids_limit"] <= 4096, name
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}, name


def test_the_debugging_file_changes_commands_and_no_limits():
    plain = yaml.safe_load((ROOT / "compose.plain-http.yaml").read_text())["services"]
    assert {key for service in plain.values() for key in service} == {"command", "environment"}


def test_images_install_the_framework_that_is_asked_for_and_the_superlink_none():
    def installed(*words):
        command = [sys.executable, "docker/requirements.py", *words]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        return {line.partition(">")[0] for line in lines} & {"tensorflow", "torch", "numpy", "flwr"}

    assert installed("light") == {"flwr"}
    assert installed("all", "keras") >= {"numpy", "tensorflow"} and "torch" not in installed("all", "keras")
    assert installed("all", "torch") >= {"numpy", "torch"} and "tensorflow" not in installed("all", "torch")
    for name in ("superexec", *SITES):
        assert SERVICES[name]["build"]["args"]["EXTRAS"] == "${CLOISTER_EXTRAS:-keras}"
