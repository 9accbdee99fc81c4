"""A federation of real processes of which some die."""

import os
import signal
from pathlib import Path

import pytest
from federations import SECONDS, SETTINGS, accepted, assert_left_whole, node
from processes import CONNECTION, SUPERLINK, WARM_NODE, Processes

pytestmark = pytest.mark.runtimes(minutes=2)


def test_a_killed_supernode_comes_back_and_a_killed_superlink_with_its_executor_keeps_its_state(tmp_path: Path) -> None:
    """Runs, nodes and the run directory survive. The run that was under way ends, and its model is kept."""
    first, second = tmp_path / "first", tmp_path / "second"
    killed = "supernode-1"
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink("--database", str(tmp_path / "state.db"))
        processes.supernodes([node(0, 2, tmp_path)], *WARM_NODE)
        processes.supernodes([node(1, 2, tmp_path)], first=1)
        processes.flwr_begin(SETTINGS | {"output-dir": str(tmp_path), "run-name": "first"}, SECONDS)
        processes.wait(lambda: 2 in accepted(first), SECONDS, "round with two replies")

        got = processes.log(killed).count("Received successfully")
        processes.wait(
            lambda: processes.log(killed).count("Received successfully") > got, SECONDS, "message of a round"
        )
        processes.kill(killed)
        at = len(accepted(first))
        processes.restart(killed)
        processes.wait(lambda: 2 in accepted(first)[at + 1 :], SECONDS, "round with two replies after the restart")
        assert accepted(first)[at] == 1, "the node was killed before it could reply"

        told = processes.told("cloister", "status", CONNECTION, "--runs", str(tmp_path), "--json")
        assert [found["status"] for found in told["nodes"]].count("online") >= 2
        assert [found["status"] for found in told["runs"]] == ["running"]
        assert told["run"]["path"] == str(first) and told["run"]["round"] > at and not told["run"]["ended"]

        processes.kill(SUPERLINK)
        processes.wait(lambda: not processes.pids("flwr-serverapp"), SECONDS, "end of the ServerApp")
        assert_left_whole(first)

        processes.restart(SUPERLINK)
        processes.wait_for_superlink()
        # How soon each node notices is Flower's affair: in some round both are back.
        processes.flwr_run(
            SETTINGS | {"output-dir": str(tmp_path), "run-name": "second", "num-rounds": 4}, seconds=SECONDS
        )
        assert 2 in accepted(second) and len(accepted(second)) == 4
        runs = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
        assert len(runs) == 2, "the run from before the restart is remembered"
        assert sum(found["status"] == "finished:completed" for found in runs) == 1


def test_a_run_goes_on_when_its_superlink_alone_is_killed_and_started_again_at_once(tmp_path: Path) -> None:
    """The executor is a process of its own here, as in containers: it and the ServerApp outlive the SuperLink."""
    run = tmp_path / "run"
    # In the round that is under way a reply may be lost for good, which costs this time.
    settings = {"output-dir": str(tmp_path), "run-name": "run", "round-timeout": 30.0}
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink("--database", str(tmp_path / "state.db"), "--isolation", "process")
        processes.start("superexec", "flower-superexec", "--insecure", "--runtime-api-address", processes.address)
        processes.supernodes([node(number, 2, tmp_path) for number in range(2)], *WARM_NODE)
        processes.flwr_begin(SETTINGS | settings, SECONDS)
        processes.wait(lambda: 2 in accepted(run), SECONDS, "round with two replies")
        servers = processes.pids("flwr-serverapp")

        processes.kill(SUPERLINK)
        processes.restart(SUPERLINK)
        processes.wait_for_superlink()
        at = len(accepted(run)) + 1
        processes.wait(lambda: accepted(run)[at:].count(2) >= 2, SECONDS, "two rounds with two replies")
        assert processes.pids("flwr-serverapp") == servers, "the run has the ServerApp that it had"
        told = processes.told("cloister", "status", CONNECTION, "--runs", str(tmp_path), "--json")
        assert [found["status"] for found in told["runs"]] == ["running"]
        assert [found["status"] for found in told["nodes"]] == ["online"] * 2, "no node came as another one"

        os.kill(servers[0], signal.SIGTERM)
        processes.wait(lambda: not processes.pids("flwr-serverapp"), SECONDS, "end of the ServerApp")
        assert_left_whole(run)
        statuses = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
        assert [found["status"] for found in statuses] == ["finished:completed"]
