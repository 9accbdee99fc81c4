"""Causes that end a run, others that must not, and the files of a run after each end."""

import errno
import io
import json
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.server.polling_grid import Quorum
from cloister.server.reports import rundir
from cloister.server.reports.console import ConsoleReporter, JsonReporter
from cloister.server.run import run
from cloister.server.stopping import ending_of
from cloister.simulation.grid import LocalGrid
from cloister.utils.crash import Crash
from cloister.utils.errors import ConfigError, FederationError, LedgerError, TooFewNodes

SOUND = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "tensorboard": False,
    "num-rounds": 5,
    "run-name": "r",
    "node-timeout": 0.2,
    "client.local-epochs": 1,
}
HEURISTIC = SOUND | {"privacy.server": "metric"}


def go(tmp_path, settings, grid=LocalGrid, clients=3, narrator=None, client=app):
    config = parse(settings | {"output-dir": str(tmp_path)})
    return run(
        grid.simulated(client, config.flat(), clients), config, narrator or ConsoleReporter(5, Console(quiet=True))
    )


def facts(tmp_path):
    return json.loads((tmp_path / "r" / "privacy.json").read_text())


def assert_same_model(path, checkpoint):
    with np.load(path / "model.npz") as saved, np.load(path / "checkpoints" / f"round-{checkpoint:05d}.npz") as last:
        for name in last:
            np.testing.assert_array_equal(saved[name], last[name])
            assert np.abs(last[name]).sum() > 0, "the model of a round is not the one that the run began with"


def silent_but(*talkers):
    def client(message, context):
        if context.node_id in talkers:
            return app(message, context)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "abstain"), reply_to=message)

    return client


class TestSilence:
    @pytest.mark.parametrize(("server", "sampling"), [("global-dp", "poisson"), ("metric", "fixed")])
    def test_under_a_guarantee_the_end_does_not_tell_whether_the_last_one_replied(self, tmp_path, sampling, server):
        private = {"privacy.distance-release": "private"} if server == "metric" else {}
        settings = SOUND | private | {"privacy.server": server, "strategy.sampling": sampling}
        ends = []
        for talkers in ((), (2,)):
            folder = tmp_path / str(len(talkers))
            outcome = go(folder, settings, client=silent_but(*talkers))
            found = facts(folder)
            ends.append((len(outcome.rounds), outcome.ended, outcome.stopped, found["ended"], found["claims"]))
            assert not any("ends because" in item for item in found["unprotected"])
        assert ends[0] == ends[1] and ends[0][:3] == (6, "as-asked", "")

    def test_elsewhere_nobody_in_the_first_round_ends_it_and_that_is_said(self, tmp_path):
        with pytest.raises(FederationError, match="no reply counted in round 1"):
            go(tmp_path, HEURISTIC, client=silent_but())
        found = facts(tmp_path)
        assert found["ended"]["how"] == "no-replies" and "round 1" in found["ended"]["why"]
        assert any("ends because no reply counted" in item for item in found["unprotected"])
        assert (tmp_path / "r" / "model.npz").is_file()

    @pytest.mark.parametrize("answered", [False, True])
    @pytest.mark.parametrize(("lost", "ended"), [(2, "as-asked"), (3, "no-replies")])
    def test_rounds_whose_messages_are_all_lost_end_a_run_when_they_are_three(self, tmp_path, lost, ended, answered):
        """Also from the first round on: a SuperLink that was killed has lost the messages, and the next one answers."""
        gone = Error(ErrorCode.NODE_UNAVAILABLE, "gone")

        class Lossy(LocalGrid):
            rounds = 0

            def send_and_receive(self, messages, *, timeout=None):
                messages = list(messages)
                self.rounds += messages[0].metadata.message_type == "train"
                if self.rounds > lost:
                    return super().send_and_receive(messages, timeout=timeout)
                return [Message(gone, reply_to=message) for message in messages] if answered else []

        with suppress(FederationError):
            go(tmp_path, HEURISTIC, Lossy)
        assert facts(tmp_path)["ended"]["how"] == ended


BUDGETED = {
    "task.model": "softmax",
    "privacy.server": "none",
    "tensorboard": False,
    "num-rounds": 9,
    "keep-checkpoints": 9,
    "run-name": "r",
}
NOISES = {
    "gaussian": ({"privacy.client": "gaussian", "privacy.gaussian-noise-multiplier": 10.0}, {"max-epsilon": 0.6}),
    "dp-sgd": (
        {"privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 3.0, "client.local-epochs": 1},
        {"max-example-epsilon": 0.7},
    ),
    "shared steps": (
        {"privacy.client": "dp-sgd", "privacy.dp-sgd-noise-multiplier": 3.0, "privacy.dp-sgd-sampling-rate": 0.2}
        | {"secure-aggregation.enabled": True, "strategy.min-nodes": 4},
        {"max-example-epsilon": 0.6},
    ),
}
"""Settings of a run, and the budget of each of its nodes, which covers a few of nine rounds."""


SPENT, BROKEN = "BudgetExhausted", "DataError"


def refusing(reasons, after):
    """A client that refuses the rounds after one: for each round a reason of every node, None for a reply."""
    calls = Counter()

    def client(message, context):
        node = context.node_id
        calls[node] += 1
        number = calls[node] - after
        reason = reasons[min(number, len(reasons)) - 1][node - 1] if number > 0 else None
        if reason is None:
            return app(message, context)
        text = f"x: {reason}: it refuses"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text), reply_to=message)

    return client


class TestBudgetsOfSites:
    def run(self, tmp_path, noise, client=app):
        settings, budget = NOISES[noise]
        config = parse(BUDGETED | settings | {"output-dir": str(tmp_path)})
        own = [
            {"partition-id": number, "num-partitions": 4, "ledger-dir": str(tmp_path / f"node-{number}")} | budget
            for number in range(4)
        ]
        return run(LocalGrid(client, config.flat(), own), config, ConsoleReporter(9, Console(quiet=True)))

    @pytest.mark.parametrize("noise", NOISES)
    def test_end_a_run_in_order_once_all_are_spent(self, tmp_path, noise):
        outcome = self.run(tmp_path, noise)
        heard = [done.number for done in outcome.rounds if done.number and done.is_heard]
        assert heard == list(range(1, len(heard) + 1)) and [done.number for done in outcome.rounds][-1] == heard[-1] + 3
        assert outcome.ended == "site-budgets"
        assert "the budgets of the sites are spent: no reply counted in round" in outcome.stopped
        assert facts(tmp_path)["ended"] == {"how": "site-budgets", "why": outcome.stopped}
        assert_same_model(tmp_path / "r", heard[-1])

    def test_do_not_excuse_a_node_that_fails_otherwise(self, tmp_path):
        calls = []

        def failing(message, context):
            calls.append(message)
            if context.node_id == 1 and len(calls) > 4:
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "it broke"), reply_to=message)
            return app(message, context)

        with pytest.raises(FederationError, match="BudgetExhausted"):
            self.run(tmp_path, "gaussian", failing)
        assert facts(tmp_path)["ended"]["how"] == "no-replies"

    @pytest.mark.parametrize(
        ("reasons", "minimum", "ended"),
        [
            ([[SPENT] * 3], 0, "site-budgets"),
            ([[BROKEN] * 3, [SPENT] * 3], 0, "no-replies"),
            ([[SPENT] * 3, [SPENT, SPENT, BROKEN], [SPENT] * 3], 0, "no-replies"),
            ([[SPENT, SPENT, None]], 2, "no-replies"),
        ],
        ids=["all", "another-reason-first", "another-reason-between", "a-reply-below-the-minimum"],
    )
    def test_end_it_only_if_every_node_of_three_rounds_refused_for_them(self, tmp_path, reasons, minimum, ended):
        settings = HEURISTIC | {"num-rounds": 9, "strategy.min-replies": minimum}
        with suppress(FederationError):
            go(tmp_path, settings, client=refusing(reasons, after=1))
        assert facts(tmp_path)["ended"]["how"] == ended

    @pytest.mark.parametrize(("heard", "ended"), [(0, "no-replies"), (1, "site-budgets")])
    def test_end_a_resumed_run_only_if_a_reply_counted_before(self, tmp_path, heard, ended):
        settings = HEURISTIC | {"num-rounds": 9}

        class Lossy(LocalGrid):
            rounds = 0

            def send_and_receive(self, messages, *, timeout=None):
                messages = list(messages)
                type(self).rounds += messages[0].metadata.message_type == "train"
                return super().send_and_receive(messages, timeout=timeout) if self.rounds <= heard else []

        with suppress(FederationError):
            go(tmp_path, settings, Lossy)
        assert facts(tmp_path)["ended"]["how"] == "no-replies"
        with suppress(FederationError):
            go(tmp_path, settings | {"resume": str(tmp_path / "r")}, client=refusing([[SPENT] * 3], after=0))
        assert facts(tmp_path)["ended"]["how"] == ended


class Shrinking(LocalGrid):
    """Node 3 is no longer connected from round 3 on, and comes back after `absent` looks."""

    absent = 10**9
    rounds = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.rounds += messages[0].metadata.message_type == "train"
        return super().send_and_receive(messages, timeout=timeout)

    def get_node_ids(self):
        if self.rounds >= 2 and self.absent:
            type(self).absent -= 1
            return [1, 2]
        return [1, 2, 3]


MINIMUM = {"strategy.min-nodes": 3}


class TestQuorum:
    def test_a_lost_site_ends_the_run_in_order(self, tmp_path):
        outcome = go(tmp_path, SOUND | MINIMUM, Shrinking)
        assert outcome.ended == "too-few-nodes" and "2 nodes are connected after 0.2 s, strategy.quorum = 3" in (
            outcome.stopped
        )
        assert [done.number for done in outcome.rounds] == [0, 1, 2]
        assert_same_model(tmp_path / "r", 2)
        found = facts(tmp_path)
        assert found["status"] == "sound" and found["rounds"] == 2 and found["claims"]
        assert found["ended"] == {"how": "too-few-nodes", "why": outcome.stopped}

    def test_clients_that_leave_do_not_choose_a_smaller_claim(self, tmp_path):
        """They see every model, and may leave when one of them shows much: all planned rounds are claimed."""
        shorter = go(tmp_path, SOUND | MINIMUM, Shrinking)
        whole = go(tmp_path, SOUND | MINIMUM | {"run-name": "whole"})
        (left, *_), (stayed, *_) = shorter.privacy["claims"], whole.privacy["claims"]
        assert len(shorter.rounds) < len(whole.rounds)
        assert left["epsilon"] == stayed["epsilon"] and "planned" in left["counts"]

    @pytest.mark.parametrize("kind", [ConsoleReporter, JsonReporter])
    def test_the_run_pauses_and_goes_on_when_the_site_is_back(self, tmp_path, kind):
        class Back(Shrinking):
            absent = 3

        said = io.StringIO()
        narrator = kind(5, Console(file=said, width=10**6, soft_wrap=True))
        outcome = go(tmp_path, SOUND | MINIMUM | {"node-timeout": 60.0}, Back, narrator=narrator)
        assert outcome.ended == "as-asked" and len(outcome.rounds) == 6
        assert "paused before round 3: 2 nodes are connected, strategy.quorum = 3" in said.getvalue()
        assert "round 3 begins" in said.getvalue()

    def test_a_lower_quorum_lets_it_go_on_with_a_smaller_divisor(self, tmp_path):
        outcome = go(tmp_path, SOUND | MINIMUM | {"strategy.quorum": 2}, Shrinking)
        assert outcome.ended == "as-asked" and [done.measured.asked for done in outcome.rounds[1:]] == [3, 3, 2, 2, 2]
        first, last = outcome.rounds[1].measured, outcome.rounds[-1].measured
        assert last.noise_std == pytest.approx(1.5 * first.noise_std)

    def test_it_counts_connections_and_not_replies(self, tmp_path):
        outcome = go(tmp_path, SOUND | MINIMUM, client=silent_but())
        assert outcome.ended == "as-asked"

    @pytest.mark.parametrize(("nodes", "told"), [(3, "3 nodes are"), (1, "1 node is")])
    def test_too_few_for_a_first_round_are_an_error(self, nodes, told, tmp_path):
        settings = SOUND | {"strategy.min-nodes": 4, "strategy.quorum": 1}
        with pytest.raises(TooFewNodes, match=rf"^{told} connected after 0\.2 s, strategy\.min-nodes = 4"):
            go(tmp_path, settings, clients=nodes)
        assert facts(tmp_path)["ended"]["how"] == "too-few-nodes"

    def test_every_registered_node_belongs_to_it(self):
        config = parse(SOUND | {"privacy.population": 7, "strategy.min-nodes": 2})
        grid = LocalGrid(lambda message, context: message, {}, [{}] * 6)
        for number in (1, 2):
            with pytest.raises(TooFewNodes, match=r"privacy.population = 7"):
                Quorum.of(config).wait(grid, number, lambda _: None)

    def test_flower_counts_such_a_run_as_failed(self, tmp_path, monkeypatch):
        from cloister.server.app import main

        config = parse(SOUND | MINIMUM | {"output-dir": str(tmp_path)}).flat()
        grid = Shrinking.simulated(app, config, 3)
        monkeypatch.setattr("cloister.server.polling_grid.PollingGrid", lambda grid, late: grid)
        context = next(iter(grid._contexts.values()))
        with pytest.raises(Crash, match=r"FederationError: .*strategy\.quorum = 3"):
            main(grid, context)
        assert (tmp_path / "r" / "model.npz").is_file()


class Breaking(LocalGrid):
    """Something unforeseen happens while round 3 waits."""

    rounds = 0

    def pull_messages(self, message_ids):
        self.rounds += 1
        if self.rounds == 3:
            raise ZeroDivisionError("values of arrays: [1.25, 7.5]")
        return super().pull_messages(message_ids)


def test_an_unexpected_error_leaves_the_last_model_and_a_claim(tmp_path):
    with pytest.raises(ZeroDivisionError):
        go(tmp_path, SOUND, Breaking)
    assert_same_model(tmp_path / "r", 2)
    found = facts(tmp_path)
    assert found["rounds"] == 2 and found["status"] == "sound" and found["claims"]
    assert found["ended"] == {"how": "error", "why": "stopped by an unexpected ZeroDivisionError"}
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == [
        "checkpoints", "config.json", "evaluation.json", "ledger.json", "ledger.jsonl", "model.npz", "parameters.json",
        "privacy.json", "rounds.jsonl", "state-00002.npz", "state.json",
    ]  # fmt: skip


class TestDisk:
    def test_a_full_disk_ends_the_run_in_order(self, tmp_path, monkeypatch):
        save, saved = np.savez, []

        def full(file, **arrays):
            saved.append(1)
            if len(saved) == 5:  # a checkpoint and the state of rounds 0 and 1, the checkpoint of round 2
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(file, **arrays)

        monkeypatch.setattr(np, "savez", full)
        outcome = go(tmp_path, SOUND)
        assert (outcome.ended, outcome.stopped) == ("disk", "stopped: the disk is full")
        # The model of round 2 was released before its checkpoint failed.
        assert facts(tmp_path)["rounds"] == 2 == len(outcome.plan.budget.ledger.entries)
        with np.load(tmp_path / "r" / "model.npz") as model:
            np.testing.assert_array_equal(model["softmax/bias"], outcome.arrays["softmax/bias"].numpy())

    def test_what_finds_no_room_at_the_end_is_named(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("cloister.tasks.numpy_models.NumpyModel.save", full)
        outcome = go(tmp_path, SOUND)
        assert outcome.ended == "disk" and outcome.stopped == "the disk is full; the model could not be written"
        assert facts(tmp_path)["ended"] == {"how": "disk", "why": outcome.stopped}

    def test_room_is_kept_for_the_last_words(self, tmp_path):
        """On a real disk of 12 MB, filled to the last byte while round 3 waits."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = shutil.which("mount")
        if (
            mount is None
            or subprocess.run(
                [mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True, check=False
            ).returncode
        ):
            pytest.skip("only the administrator may make a disk")

        class Filling(LocalGrid):
            rounds = 0

            def pull_messages(self, message_ids):
                self.rounds += 1
                if self.rounds == 3:
                    self.fill()
                return super().pull_messages(message_ids)

            def fill(self):
                with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", 0) as file:
                    while True:
                        file.write(bytes(4096))

        try:
            outcome = go(disk, SOUND, Filling)
            assert outcome.ended == "disk"
            with np.load(disk / "r" / "model.npz") as model:
                np.testing.assert_array_equal(model["softmax/bias"], outcome.arrays["softmax/bias"].numpy())
            found = facts(disk)
            # Whether the last page of the ledger had room for round 3 is chance.
            assert found["ended"]["how"] == "disk" and found["rounds"] in (2, 3) and found["claims"]
            assert found["ledger"]["releases-of-this-run"] >= found["rounds"]
            assert (disk / "r" / "ledger.jsonl").is_file()
        finally:
            subprocess.run(["umount", str(disk)], check=True)

    def test_a_disk_without_that_room_is_one_line_before_anything_is_sent(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(rundir.os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"has no room for 4 MB, .*No space left"):
            go(tmp_path, SOUND)

    def test_it_is_known_behind_an_error_of_ours(self):
        try:
            try:
                raise OSError(errno.ENOSPC, "full")
            except OSError as error:
                raise LedgerError("the ledger cannot be written") from error
        except LedgerError as error:
            assert ending_of(error).how == "disk"
        assert ending_of(LedgerError("broken")).how == "error"
