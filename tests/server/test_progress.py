"""Output on a terminal while a run goes on: each client's place and about how long the rest takes, or nothing."""

import io
import re

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from rich.console import Console
from support import all_nodes, content, grid_of, one_round, random_models, zeros

from cloister.client.app import app
from cloister.config.run import parse
from cloister.flower.messages import assume_run
from cloister.server.build import build
from cloister.server.polling_grid import PollingGrid, noop
from cloister.server.reports.console import SHOWN, Board, ConsoleReporter, JsonReporter, Screen
from cloister.server.round import Round, Sites
from cloister.server.run import run
from cloister.server.screening import Rejection
from cloister.server.strategy_wrapper import Measurements
from cloister.simulation.grid import LocalGrid

QUICK = {"task.model": "softmax", "num-rounds": 2, "tensorboard": False, "client.local-epochs": 1, "seed": 3}
GLOBAL = {"privacy.server": "global-dp", "privacy.noise-multiplier": 1.0}
POISSON = GLOBAL | {"strategy.sampling": "poisson", "strategy.fraction-train": 0.9}
DP_SGD = {"privacy.server": "none", "privacy.client": "dp-sgd"}


def finished(number, seconds=None, rejected=()):
    measured = Measurements(3, 3 - len(rejected), tuple(rejected))
    return Round(number, measured=measured, seconds={} if seconds is None else {"total": seconds})


def board(**clients):
    found = Board(5)
    for name, standing in clients.items():
        found = found.told(int(name[1:]), standing)
    return found


class TestBoard:
    def test_a_client_is_where_it_was_last_told_to_be(self):
        found = board(n2="training", n11="waiting").told(2, "sent")
        assert found.lines(Sites()) == ["node 2   sent", "node 11  waiting"]

    def test_a_finished_round_lets_everybody_wait_and_says_whose_reply_did_not_count(self):
        found = board(n1="sent", n2="sent").finished(finished(1, 2.0, [Rejection(2, "non-finite", "NaN")]))
        assert found.number == 2
        assert found.lines(Sites()) == ["node 1  waiting", "node 2  waiting  round 1: non-finite"]
        assert found.finished(finished(2, 2.0)).lines(Sites()) == ["node 1  waiting", "node 2  waiting"]

    def test_a_client_that_has_a_name_is_called_by_it(self):
        class Grid:
            def get_nodes(self):
                return [NodeInfo(node_id=2, name="berlin")]

        sites = Sites()
        sites.learn(Grid())
        assert board(n2="sent", n11="waiting").lines(sites) == ["berlin   sent", "node 11  waiting"]

    def test_the_rest_is_estimated_from_the_last_rounds(self):
        found = Board(10).finished(finished(0))
        assert found.left(3.0) is None
        for number, seconds in enumerate([90.0, 2.0, 4.0, 2.0, 4.0, 3.0], start=1):
            found = found.finished(finished(number, seconds))
        assert found.left(0.0) == pytest.approx(4 * 3.0) and found.left(1.5) == pytest.approx(10.5)
        assert found.left(1000.0) == 0

    def test_of_many_clients_those_at_work_are_shown_and_the_others_counted(self):
        found = board(**{f"n{number}": "sent" for number in range(40)}).told(39, "training").told(38, "rejected")
        lines = found.lines(Sites())
        assert len(lines) == SHOWN + 1 and lines[SHOWN - 1] == "node 39  training"
        assert lines[-1] == "and 30 more: 1 rejected, 29 sent"


class TestScreen:
    def drawn(self, screen):
        said = io.StringIO()
        Console(file=said, width=110).print(screen)
        return said.getvalue()

    def test_a_line_for_the_run_and_one_for_each_client(self):
        now = [100.0]
        screen = Screen(3, Sites(), clock=lambda: now[0])
        screen.observe(finished(0))
        screen.watch(7, "training")
        head, line = self.drawn(screen).splitlines()
        assert head.startswith("round 1/3") and "left" not in head and line == "node 7  training"
        screen.observe(finished(1, 60.0))
        now[0] += 20.0
        head, line = self.drawn(screen).splitlines()
        assert head.startswith("round 2/3") and head.endswith("about 1:40 left") and line == "node 7  waiting"
        screen.observe(finished(2, 9000.0))
        assert self.drawn(screen).splitlines()[0].endswith("about 1:15:30 left")


class TestGrids:
    def test_in_one_process_clients_work_one_after_the_other(self):
        def answer(node, model):
            if node == 2:
                raise MemoryError
            return content(model)

        grid, seen = grid_of(answer, 2), []
        grid.watch = lambda node, standing: seen.append((node, standing))
        one_round(all_nodes(), grid, random_models(1)[0])
        first, second = (node for node, standing in seen[2:] if standing == "training")
        ends = {1: "sent", 2: "rejected"}
        working = [(node, standing) for node in (first, second) for standing in ("training", ends[node])]
        assert sorted(seen[:2]) == [(1, "waiting"), (2, "waiting")] and seen[2:] == working

    def test_on_a_superlink_all_are_at_it_until_their_replies_are_there(self, monkeypatch):
        assume_run()

        class Inner:
            def push_messages(self, messages):
                self.messages = messages
                for number, message in enumerate(messages):
                    message.metadata.__dict__["_message_id"] = str(number)
                    yield str(number)

            def pull_messages(self, ids):
                one, other = self.messages
                error = Error(0, "broken")
                return [Message(content(zeros()), reply_to=other), Message(error, reply_to=one)]

        grid, seen = PollingGrid(Inner()), []
        grid.watch = lambda node, standing: seen.append((node, standing))
        messages = [Message(RecordDict(), 5, "train"), Message(RecordDict(), 6, "evaluate")]
        replies = list(grid.send_and_receive(messages))
        assert seen == [(5, "training"), (6, "scoring"), (6, "sent"), (5, "rejected")]
        assert [reply.metadata.src_node_id for reply in replies] == [6, 5]


class Terminal(io.StringIO):
    def console(self):
        terminal = {"force_terminal": True, "_environ": {"TERM": "xterm"}}
        return Console(file=self, width=110, soft_wrap=True, highlight=False, **terminal)


def ran(tmp_path, settings, narrator):
    """A run whose screen is drawn anew whenever a client has been told something."""
    config = parse(QUICK | settings | {"output-dir": str(tmp_path), "run-name": "r"})

    def client(message, context):
        if narrator.screen is not None:
            narrator.console.print("at work")  # what is printed has the screen drawn anew below it
        return app(message, context)

    return run(LocalGrid.simulated(client, config.flat(), 3), config, narrator)


def test_in_a_terminal_every_client_has_a_line_and_nothing_stays_of_them(tmp_path):
    terminal = Terminal()
    narrator = ConsoleReporter(2, terminal.console())
    outcome = ran(tmp_path, {}, narrator)
    said = terminal.getvalue()
    for node in (1, 2, 3):
        assert f"node {node}  training" in said and f"node {node}  waiting" in said
    assert said.count("  sent") >= 2
    assert "round 2/2" in said and "left" in said and narrator.screen is None
    assert not re.search(r"node \d  ", said[said.rindex("Result") :]) and outcome.ended == "as-asked"


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [(GLOBAL, True), (POISSON, False), (DP_SGD, False)],
    ids=["nothing to hide", "secret cohorts", "hidden times"],
)
def test_nothing_is_drawn_where_it_would_tell_of_a_draw(tmp_path, settings, drawn):
    terminal, grid = Terminal(), grid_of(lambda node, model: content(model), 2)
    narrator = ConsoleReporter(2, terminal.console())
    narrator.begin(build(parse(QUICK | settings | {"output-dir": str(tmp_path)})))
    with narrator.live(grid, Sites()):
        assert (grid.watch is not noop) is drawn
        grid.watch(1, "training")
        narrator.note("paused")
    assert ("node 1  training" in terminal.getvalue()) is drawn and grid.watch is noop


@pytest.mark.parametrize("kind", [ConsoleReporter, JsonReporter])
def test_a_log_has_the_lines_it_always_had(tmp_path, kind):
    said = io.StringIO()
    ran(tmp_path, {"privacy.server": "none"}, kind(2, Console(file=said, width=110, soft_wrap=True, highlight=False)))
    assert not re.search(r"node \d|at work|\x1b", said.getvalue())


def test_lines_of_json_are_never_drawn_over(tmp_path):
    terminal = Terminal()
    ran(tmp_path, {"privacy.server": "none"}, JsonReporter(2, terminal.console()))
    assert "at work" not in terminal.getvalue() and "node 1" not in terminal.getvalue()


def test_a_run_that_breaks_off_leaves_the_terminal_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("cloister.server.round.RoundLoop.run_round", lambda *_, **__: 1 / 0)
    terminal = Terminal()
    narrator = ConsoleReporter(2, terminal.console())
    with pytest.raises(ZeroDivisionError):
        ran(tmp_path, {"privacy.server": "none"}, narrator)
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
    assert narrator.screen is None
