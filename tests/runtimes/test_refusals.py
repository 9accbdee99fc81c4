"""A federation in which one node hangs, one demands more noise, and one does not allow this bundle."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import SECONDS, SETTINGS, accepted, assert_fails_in_one_line, node, rounds
from flwr.cli.build import build_fab_from_disk
from processes import REPOSITORY, WARM_NODE, Processes, Setting

pytestmark = pytest.mark.runtimes(minutes=1)

TIMEOUT, LATE, ROUNDS = 20.0, 5.0, 2
"""The others are warm before the first round, and answer in a few seconds."""
POLICY = 'mechanisms = ["global-dp"]\ntasks = ["digits"]\nmin-server-noise-multiplier = {}\nallowed-fabs = ["{}"]\n'


class Refusals:
    """Four nodes after a run: one as it should be, one strict, one without this bundle, one whose disk is stuck.

    Warm nodes look at the bundle themselves.

    Args:
        folder: for all files.
        processes: the running federation.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes, self.run = folder, processes, folder / "run"
        self.digest = hashlib.sha256(build_fab_from_disk(REPOSITORY)).hexdigest()

    def train(self) -> str:
        """Run the app, and return the log."""
        stuck = self.folder / "stuck.toml"
        os.mkfifo(stuck)  # opening it waits for a writer
        policies = [self._policy(1.0, self.digest), self._policy(3.0, self.digest), self._policy(1.0, "0" * 64), stuck]
        configs = [node(number, 4, self.folder, policy=str(path)) for number, path in enumerate(policies)]
        self.processes.superlink()
        self.processes.supernodes(configs[:3], *WARM_NODE)
        # A warm node would read its policy first of all, and hang before it connects.
        self.processes.supernodes(configs[3:], first=3)
        warm = [f"supernode-{number}" for number in range(3)]
        self.processes.wait(lambda: all("warm:" in self.processes.log(name) for name in warm), SECONDS, "warm nodes")
        settings: dict[str, Setting] = {
            "run-name": "run",
            "num-rounds": ROUNDS,
            "round-timeout": TIMEOUT,
            "late-timeout": LATE,
        }
        settings |= {"output-dir": str(self.folder), "strategy.min-nodes": 4}
        self.processes.flwr_run(SETTINGS | settings, seconds=SECONDS)
        return self.processes.log("flwr")

    def reasons(self) -> list[list[str]]:
        """Return why replies were rejected, for each round."""
        return [[item["detail"] for item in done["measured"]["rejected"]] for done in rounds(self.run)]

    def _policy(self, noise: float, digest: str) -> Path:
        path = self.folder / f"{noise:g}-{digest[:3]}.toml"
        path.write_text(POLICY.format(noise, digest))
        return path


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Refusals, str]]:
    folder = tmp_path_factory.mktemp("federation")
    with Processes(folder / "processes", shortened=True) as processes:
        refusals = Refusals(folder, processes)
        yield refusals, refusals.train()


def test_the_other_goes_on(federation: tuple[Refusals, str]) -> None:
    found, _ = federation
    assert accepted(found.run) == [1] * ROUNDS
    assert (found.run / "model.npz").is_file()


def test_a_refusal_is_told_with_its_reason(federation: tuple[Refusals, str]) -> None:
    found, log = federation
    reason = "the server promises a noise multiplier of 2, demanded: at least 3"
    assert [[reason in told for told in each].count(True) for each in found.reasons()] == [1] * ROUNDS
    assert reason in log and str(found.folder) not in reason


def test_a_client_that_hangs_costs_one_deadline(federation: tuple[Refusals, str]) -> None:
    found, _ = federation
    seconds = [done["seconds"]["train"] for done in rounds(found.run)]
    assert seconds[0] >= TIMEOUT > max(seconds[1:]) and min(seconds[1:]) >= LATE


def test_a_bundle_that_is_not_on_a_sites_list_does_not_run_there(federation: tuple[Refusals, str]) -> None:
    found, _ = federation
    reason = f"app bundle {found.digest[:12]} is not in allowed-fabs"
    assert [[reason in told for told in each].count(True) for each in found.reasons()] == [1] * ROUNDS
    assert not (found.folder / "budget-2").exists(), "the node's budget is kept by code that did not run"


def test_an_error_of_configuration_is_one_line_and_the_run_has_failed(federation: tuple[Refusals, str]) -> None:
    found, _ = federation
    settings = SETTINGS | {"strategy.momentum": 0.5, "output-dir": str(found.folder), "run-name": "erroneous"}
    assert_fails_in_one_line(found.processes, settings)
    assert not (found.folder / "erroneous").exists()


def test_a_killed_node_leaves_no_supernode(federation: tuple[Refusals, str]) -> None:
    """Its SuperNode ends, as it would be one without an executor."""
    found, _ = federation
    supernodes = "cloister.deploy.warm.supernode"
    before = len(found.processes.pids(supernodes))
    found.processes.kill("supernode-0")
    found.processes.wait(lambda: len(found.processes.pids(supernodes)) == before - 1, SECONDS, "end of the SuperNode")
