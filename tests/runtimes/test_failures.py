"""What becomes of a federation of real processes when some of them die, hang or refuse."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.cli.build import build_fab_from_disk
from processes import CONNECTION, REPOSITORY, SUPERLINK, WARM_NODE, Processes, Setting

pytestmark = pytest.mark.runtimes

SECONDS = 240
"""For what takes some ten to sixty on two idle cores."""
SETTINGS: dict[str, Setting] = {
    "task.name": "digits",
    "task.model": "softmax",  # needs no TensorFlow: a client starts in a second
    "num-rounds": 100,  # until it is stopped
    "strategy.min-nodes": 2,
    "round-timeout": 120.0,  # a killed node is missed long before
    "node-timeout": 120.0,
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
}


def node(number: int, of: int, folder: Path, **more: Setting) -> dict[str, Setting]:
    budget = {"ledger-dir": str(folder / f"budget-{number}")}
    return {"partition-id": number, "num-partitions": of} | budget | more


def rounds(directory: Path) -> list[dict[str, Any]]:
    """The finished rounds after the initial model."""
    path = directory / "rounds.jsonl"
    # A line that is being written has no end yet.
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in whole][1:]


def accepted(directory: Path) -> list[int]:
    return [done["measured"]["accepted"] for done in rounds(directory)]


def assert_left_whole(directory: Path) -> None:
    """The newest model is the last finished round's, and the claim speaks of as many rounds as the ledger."""
    finished = len(rounds(directory))
    newest = directory / "checkpoints" / f"round-{finished:05d}.npz"
    with np.load(directory / "model.npz") as model, np.load(newest) as last:
        for name in last:
            np.testing.assert_array_equal(model[name], last[name])
    assert json.loads((directory / "privacy.json").read_text())["rounds"] == finished
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    assert max(line["round"] for line in ledger if "round" in line) == finished


def test_a_supernode_that_is_killed_in_mid_round_comes_back_and_a_run_that_is_terminated_ends_in_order(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    killed = "supernode-1"
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink()
        processes.supernodes([node(0, 2, tmp_path)], *WARM_NODE)
        processes.supernodes([node(1, 2, tmp_path)], first=1)
        processes.flwr_begin(SETTINGS | {"output-dir": str(tmp_path), "run-name": "run"}, SECONDS)
        processes.wait(lambda: 2 in accepted(run), SECONDS, "round with two replies")

        got = processes.log(killed).count("Received successfully")
        processes.wait(
            lambda: processes.log(killed).count("Received successfully") > got, SECONDS, "message of a round"
        )
        processes.kill(killed)
        at = len(accepted(run))
        processes.restart(killed)
        processes.wait(lambda: 2 in accepted(run)[at + 1 :], SECONDS, "round with two replies after the restart")
        assert accepted(run)[at] == 1, "the node was killed before it could reply"

        told = processes.told("cloister", "status", CONNECTION, "--runs", str(tmp_path), "--json")
        assert [found["status"] for found in told["nodes"]].count("online") >= 2
        assert [found["status"] for found in told["runs"]] == ["running"]
        assert told["run"]["path"] == str(run) and told["run"]["round"] > at and not told["run"]["ended"]

        (server,) = processes.pids("flwr-serverapp")
        os.kill(server, signal.SIGTERM)
        processes.wait(lambda: not processes.pids("flwr-serverapp"), SECONDS, "end of the ServerApp")
        assert_left_whole(run)
        statuses = processes.told("flwr", "list", CONNECTION, "--format", "json")["runs"]
        assert [found["status"] for found in statuses] == ["finished:completed"]


def test_a_superlink_that_is_killed_with_its_executor_keeps_its_state_and_its_nodes_come_back(tmp_path: Path) -> None:
    """What survives: runs, nodes, the run directory. What does not: the run that was under way; its model is kept."""
    first, second = tmp_path / "first", tmp_path / "second"
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink("--database", str(tmp_path / "state.db"))
        processes.supernodes([node(number, 2, tmp_path) for number in range(2)], *WARM_NODE)
        processes.flwr_begin(SETTINGS | {"output-dir": str(tmp_path), "run-name": "first"}, SECONDS)
        processes.wait(lambda: 2 in accepted(first), SECONDS, "round with two replies")

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


@pytest.mark.xdist_group("hangs")
class TestOneHangsAndOneRefuses:
    TIMEOUT, LATE = 30.0, 5.0
    """The others are warm before the first round, and answer in a few seconds."""

    @pytest.fixture(scope="class")
    def federation(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
        """A node as it should be, one whose policy asks for more noise, one whose disk never answers."""
        folder = tmp_path_factory.mktemp("federation")
        strict, stuck = folder / "strict.toml", folder / "stuck.toml"
        strict.write_text('mechanisms = ["global-dp"]\ntasks = ["digits"]\nmin-server-noise-multiplier = 3.0\n')
        os.mkfifo(stuck)  # opening it waits for somebody to write
        policies: list[dict[str, Setting]] = [{}, {"policy": str(strict)}, {"policy": str(stuck)}]
        settings = {"output-dir": str(folder), "run-name": "run", "num-rounds": 3, "round-timeout": self.TIMEOUT}
        settings |= {"late-timeout": self.LATE}
        configs = [node(number, 3, folder, **more) for number, more in enumerate(policies)]
        with Processes(folder / "processes", shortened=True) as processes:
            processes.superlink()
            processes.supernodes(configs[:2], *WARM_NODE)
            # A warm node would read its policy first of all, and hang before it connects.
            processes.supernodes(configs[2:], first=2)
            warm = ("supernode-0", "supernode-1")
            processes.wait(lambda: all("warm:" in processes.log(name) for name in warm), SECONDS, "warm nodes")
            processes.flwr_run(SETTINGS | settings | {"strategy.min-nodes": 3}, seconds=SECONDS)
            yield folder / "run", processes.log("flwr")

    def test_the_other_goes_on(self, federation: tuple[Path, str]) -> None:
        directory, _ = federation
        assert accepted(directory) == [1, 1, 1]
        assert (directory / "model.npz").is_file()

    def test_a_refusal_is_told_with_its_reason(self, federation: tuple[Path, str]) -> None:
        directory, log = federation
        reason = "the server promises a noise multiplier of 2, demanded: at least 3"
        for done in rounds(directory):
            assert [reason in item["detail"] for item in done["measured"]["rejected"]].count(True) == 1
        assert reason in log and str(directory.parent) not in reason

    def test_a_client_that_hangs_costs_one_deadline(self, federation: tuple[Path, str]) -> None:
        directory, _ = federation
        seconds = [done["seconds"]["train"] for done in rounds(directory)]
        assert seconds[0] >= self.TIMEOUT > max(seconds[1:]) and min(seconds[1:]) >= self.LATE


def test_a_bundle_that_is_not_on_a_sites_list_does_not_run_there(tmp_path: Path) -> None:
    """Warm nodes look at the bundle itself; one knows this one, one does not."""
    digest = hashlib.sha256(build_fab_from_disk(REPOSITORY)).hexdigest()
    configs = []
    for number, allowed in enumerate([digest, "0" * 64]):
        policy = tmp_path / f"policy-{number}.toml"
        demands = 'mechanisms = ["global-dp"]\nmin-server-noise-multiplier = 1.0\ntasks = ["digits"]\n'
        policy.write_text(f'{demands}allowed-fabs = ["{allowed}"]\n')
        configs.append(node(number, 2, tmp_path, policy=str(policy)))
    settings = {"output-dir": str(tmp_path), "run-name": "run", "num-rounds": 2}
    with Processes(tmp_path / "processes", shortened=True) as processes:
        processes.superlink()
        processes.supernodes(configs, *WARM_NODE)
        processes.flwr_run(SETTINGS | settings, seconds=SECONDS)
        processes.kill("supernode-0")
        supernodes = "cloister.deploy.warm.supernode"
        processes.wait(lambda: len(processes.pids(supernodes)) == 1, SECONDS, "end of a SuperNode without an executor")
    assert accepted(tmp_path / "run") == [1, 1]
    for done in rounds(tmp_path / "run"):
        (rejected,) = done["measured"]["rejected"]
        assert f"app bundle {digest[:12]} is not in allowed-fabs" in rejected["detail"]
    assert not (tmp_path / "budget-1").exists(), "the node's budget are kept by code that did not run"
