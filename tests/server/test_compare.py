"""Several runs beside each other: what differs, what is claimed, and what must not be told."""

import fcntl
import io
import json
import math
import re
from dataclasses import replace

import html5lib
import pytest
from reported import CLAIMS, LEDGER, OF_ALL, OF_RUN, SOUND, line, write_run
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Statement
from cloister.privacy.claims.premises import BUDGET_FIXED
from cloister.privacy.claims.to_json import record
from cloister.server.reports.compare.comparison import (
    Group,
    Table,
    compared,
    drawn,
    each_alone,
    lines,
    markdown,
    table_of,
)
from cloister.server.reports.compare.comparison import record as compare_record
from cloister.server.reports.compare.page import pictures, rendered, write_page
from cloister.server.reports.compare.runs import composed_epsilon, differing, read_runs
from cloister.utils.errors import ConfigError
from cloister.utils.terminal import plain
from cloister.utils.text import at_most

RUNNING = {"status": "running", "mechanism": "global-dp", "claims": []}


def rounds(*accuracies, **more):
    """Lines of `rounds.jsonl` with these accuracies, after an initial model that guesses."""
    scored = [line(number, central={"loss": 1 - each, "accuracy": each}) for number, each in enumerate(accuracies, 1)]
    return [line(0), *(each | more for each in scored)]


def comparison(*places, score=""):
    return compared(each_alone(read_runs(places)), score)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


@pytest.fixture
def two(tmp_path):
    seconds = {"seconds": {"total": 1.5, "train": 1.0}}
    first = write_run(tmp_path / "a", rounds=rounds(0.5, 0.9, 0.8, **seconds), settings={"run-name": "a"})
    settings = {"run-name": "b", "privacy.noise-multiplier": 3.0}
    return first, write_run(tmp_path / "b", rounds=rounds(0.4, 0.6, 0.7, **seconds), settings=settings)


TABLE = """
╭─────┬──────────────────┬────────┬──────────┬──────────┬────────┬────────┬───┬─────────╮
│     │                  │        │    final │     best │  macro │  macro │   │         │
│ run │ noise-multiplier │ rounds │ accuracy │ accuracy │     F1 │    AUC │ ε │ seconds │
├─────┼──────────────────┼────────┼──────────┼──────────┼────────┼────────┼───┼─────────┤
│ a   │ 1.5              │      3 │   0.8000 │   0.9000 │ 0.9100 │ 0.9900 │ 1 │     4.5 │
│ b   │ 3.0              │      3 │   0.7000 │   0.7000 │ 0.9100 │ 0.9900 │ 1 │     4.5 │
╰─────┴──────────────────┴────────┴──────────┴──────────┴────────┴────────┴───┴─────────╯
Macro F1 is the mean F1 of the classes that have examples, macro AUC the mean area under the ROC
curve of each class against the others: of the model that a run kept, on the server's own test data.
Always answering the most frequent class of that data has an accuracy of 0.3333.
ε of a run by itself, the largest in its claim: for one client, add-or-remove, δ = 1e-05, by the
server's mechanism.
A choice among the runs by what they released releases all of them: their costs add up.
"""


class TestTable:
    def test_in_a_terminal(self, two):
        result = invoke(*two)
        assert result.exit_code == 0 and "\n" + result.output == TABLE

    def test_what_is_too_wide_stands_below(self, tmp_path):
        keys = {"privacy.noise-multiplier": 3.0, "privacy.clipping-norm": 5.0, "client.learning-rate": 0.25}
        more = {"client.batch-size": 64, "strategy.name": "fedadam", "client.local-epochs": 3, "seed": 7}
        places = [
            write_run(tmp_path / name, rounds=rounds(0.5), settings=settings | {"run-name": name})
            for name, settings in (("2026-11-22_19-35-28_digits_fedavg", {}), ("b", keys | more))
        ]
        told = lines(comparison(*places))
        assert max(map(len, told)) <= 100 and not any("noise-multiplier" in row for row in told if "│" in row)
        (below,) = (row for row in told if row.startswith("b: "))
        assert "batch-size 64, " in below and "noise-multiplier 3.0" in " ".join(told)
        assert all(name in told[3] or name in told[4] for name in ("0.5000",)), "the scores stay in the table"

    def test_nothing_of_a_wide_table_is_cut_off(self, tmp_path):
        """Neither ε with what they are about, nor long names of many columns."""
        names = ("2026-11-22_19-35-28_digits_fedavg_dp-sgd", "2026-11-22_19-35-28_digits_fedavg_global-dp")
        places = [write_run(tmp_path / name, kind, rounds(0.5)) for name, kind in zip(names, CLAIMS, strict=False)]
        (places[1] / "privacy.json").write_text(json.dumps(RUNNING))
        told = lines(comparison(*places))
        rows = [row.strip("│").split("│") for row in told if row.startswith("│") and row.endswith("│")]
        assert max(map(len, told)) <= 100 and len(rows) == sum("│" in row for row in told)
        cells = ["".join(part).replace(" ", "") for part in zip(*rows, strict=True)]
        assert names[0] in cells[0] and names[1] in cells[0] and "seconds" in cells[-2] and "dead" in cells[-1]

    def test_no_column_takes_the_room_of_the_last_one(self):
        """At some lengths of a name one column gave way to another that could not become as narrow."""
        columns = ("run", "rounds", "final accuracy", "best accuracy", "macro F1", "macro AUC", "ε", "seconds")
        for length in range(1, 90):
            cells = ("x" * length, "4", *["0.9123"] * 4, "10.91 (example, add-or-remove)", "12.3")
            rows = plain(drawn(Table(columns, (cells,), (False, *[True] * 7))), 100)
            assert len({len(row) for row in rows}) == 1 and len(rows[0]) <= 100 and rows[0][-1] == "╮"

    def test_as_markdown(self, two):
        first, rule, *_ = markdown(comparison(*two)).splitlines()
        scores = "final accuracy | best accuracy | macro F1 | macro AUC"
        assert first == f"| run | noise-multiplier | rounds | {scores} | ε | seconds |"
        assert rule == f"| --- | --- |{' ---: |' * 7}"

    def test_as_json(self, two):
        found = json.loads(invoke(*two, "--json").output)
        group = found["groups"][1]
        assert group["settings"] == {"privacy.noise-multiplier": 3.0}
        assert group["final"] == {"mean": 0.7, "std": None, "runs": 1} and group["runs"][0]["ended"] == "as-asked"
        claimed = {"epsilon": 1.0, "delta": 1e-5, "unit": "client", "relation": "add-or-remove", "side": "server"}
        assert group["claims"] == [{"status": "sound", **claimed}]

    def test_figures_over_classes_where_runs_have_them(self, two, tmp_path):
        regression = {"examples": 5, "metrics": {"loss": 0.25, "rmse": 0.5}}
        third = write_run(tmp_path / "c", evaluation=regression)
        (first, *_, last) = comparison(*two, third).groups
        assert first.over_classes("macro AUC").mean == 0.99 and last.over_classes("macro F1") is None
        assert table_of(comparison(*two, third)).rows[-1].count("–") >= 2
        assert "macro F1" not in table_of(comparison(third)).columns and not any(
            "Macro" in note for note in comparison(third).notes
        )
        group = json.loads(invoke(*two, "--json").output)["groups"][0]
        assert group["over-classes"]["macro F1"] == {"mean": 0.91, "std": None, "runs": 1}

    def test_what_a_run_is_called_is_no_setting(self):
        configs = [{"run-name": name, "output-dir": name, "seed": 1, "x": 1 if name == "a" else True} for name in "ab"]
        assert differing(configs) == ["x"] and differing([{"a": 1}, {}]) == ["a"]

    def test_only_settings_that_had_an_effect(self, two, tmp_path):
        settings = {"privacy.server": "none", "privacy.noise-multiplier": 0.05, "privacy.client": "dp-sgd"}
        columns, rows, _ = vars(
            table_of(comparison(*two, write_run(tmp_path / "c", "dp-sgd", settings=settings)))
        ).values()
        told = [dict(zip(columns, row, strict=True)) for row in rows]
        assert [row["noise-multiplier"] for row in told] == ["1.5", "3.0", "–"]
        assert [row["dp-sgd-noise-multiplier"] for row in told] == ["–", "–", "1.0"]
        assert not {"max-epsilon", "batch-sampling", "placement", "clipping"} & set(columns)

    def test_in_place_of_auto_stands_what_was_found(self, two, tmp_path):
        settings = {"privacy.noise-multiplier": "auto", "privacy.max-epsilon": 8.0}
        found = comparison(two[1], write_run(tmp_path / "c", settings=settings)).groups
        assert [group.settings["privacy.noise-multiplier"] for group in found] == [3.0, 1.5]

    def test_keys_that_end_alike_stay_whole(self, tmp_path):
        settings = {"task.name": "breast-cancer", "strategy.name": "fedavgm"}
        places = write_run(tmp_path / "a"), write_run(tmp_path / "b", settings=settings)
        assert {"task.name", "strategy.name"} < set(table_of(comparison(*places)).columns)

    def test_a_vague_end_of_a_key_does_too(self, tmp_path):
        places = write_run(tmp_path / "a"), write_run(tmp_path / "b", settings={"task.name": "breast-cancer"})
        assert "task.name" in table_of(comparison(*places)).columns

    def test_figures_name_short_settings_and_else_the_runs(self, two, tmp_path):
        assert comparison(*two).labels["b"] == "noise-multiplier=3.0"
        settings = {"client.optimizer": "x" * 60}
        assert comparison(two[0], write_run(tmp_path / "c", settings=settings)).labels == {"a": "a", "c": "c"}
        assert comparison(two[0], write_run(tmp_path / "d")).labels == {"a": "a", "d": "d"}

    def test_errors_are_best_where_they_are_least(self, tmp_path_factory):
        def check(score, best):
            folder = tmp_path_factory.mktemp("case")
            scored = [line(number, central={score: each}) for number, each in enumerate((0.5, 0.1, 0.9, 0.3))]
            table = table_of(comparison(write_run(folder / "a", rounds=scored)))
            row = dict(zip(table.columns, table.rows[0], strict=True))
            assert (row[f"final {score}"], row[f"best {score}"]) == ("0.3000", best)

        assert failures([("rmse", "0.1000"), ("loss", "0.1000"), ("accuracy", "0.9000")], check) == []

    def test_a_score_that_no_run_has_is_refused_with_those_they_have(self, two):
        assert "accuracy, loss" in invoke(*two, "--score", "f1").output
        assert "final loss" in invoke(*two, "--score", "loss").output

    def test_scores_of_clients_stand_in_where_the_server_has_none(self, tmp_path):
        scored = [{"round": 1, "federated": {"loss": 0.5, "accuracy": 0.5}}]
        found = comparison(write_run(tmp_path / "a", "none", rounds=scored))
        assert found.on_clients and "on the clients' own examples" in found.notes[0]

    def test_without_scores(self, tmp_path):
        found = comparison(write_run(tmp_path / "a", rounds=[]))
        assert "No run has a score." in found.notes and not pictures(found)
        assert invoke(tmp_path / "a", "--png", tmp_path / "x.png").exit_code == 1

    def test_what_is_claimed(self, tmp_path_factory):
        def check(kind, told):
            folder = tmp_path_factory.mktemp("case")
            table = table_of(comparison(write_run(folder / "a", kind)))
            assert dict(zip(table.columns, table.rows[0], strict=True))["ε"] == told

        assert failures([("none", "none"), ("heuristic", "heuristic"), ("dp-sgd", "3")], check) == []


class TestSeeds:
    @pytest.mark.usefixtures("undrawn")
    def test_means_and_sample_deviations(self, tmp_path):
        places = [write_run(tmp_path / name, rounds=rounds(each)) for name, each in zip("abc", (0.1, 0.2, 0.6))]
        found = compared([Group("all", {"x": 1}, read_runs(places))])
        row = dict(zip(table_of(found).columns, table_of(found).rows[0], strict=True))
        assert row["final accuracy"] == "0.3000 ± 0.2646"
        assert "0.3000 ± 0.2646 at ε = 1" in pictures(found)[1].description
        assert any("sample standard deviation" in note for note in found.notes)

    def test_the_claim_is_that_of_the_run_of_which_the_least_is_claimed(self, tmp_path):
        places = [write_run(tmp_path / "a"), write_run(tmp_path / "b", privacy=RUNNING)]
        (group,) = compared([Group("all", {}, read_runs(places))]).groups
        assert [cost.status for cost in group.costs] == ["not ended"]


class TestEnds:
    def test_one_that_broke_off(self, tmp_path):
        found = comparison(write_run(tmp_path / "a", privacy=RUNNING))
        assert "a broke off" in found.notes[-1]
        assert "not ended" in table_of(found).rows[0] and "dead" in table_of(found).rows[0]

    def test_one_that_is_under_way(self, tmp_path):
        place = write_run(tmp_path / "a", privacy=RUNNING, rounds=rounds(0.5))
        with (place / "running").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = comparison(place)
        assert "under way" in found.notes[-1] and "1 of 3" in table_of(found).rows[0]

    def test_one_that_failed_says_why(self, tmp_path):
        place = write_run(tmp_path / "a")
        content = json.loads((place / "privacy.json").read_text())
        ended = {"ended": {"how": "disk", "why": "stopped: the disk is full"}}
        (place / "privacy.json").write_text(json.dumps(content | ended))
        assert "a did not run all its rounds (disk): stopped: the disk is full." in comparison(place).notes

    def test_what_is_no_run_is_one_error(self, two, tmp_path):
        (tmp_path / "empty").mkdir()
        result = invoke(two[0], tmp_path / "empty", tmp_path / "absent")
        assert result.exit_code == 1
        first, second = result.output.splitlines()
        assert "empty is no run directory" in first and "absent is no run directory" in second

    def test_the_same_run_twice(self, two):
        with pytest.raises(ConfigError, match="is there twice"):
            read_runs([two[0], two[1], two[0]])

    def test_runs_of_one_name_are_told_apart(self, tmp_path):
        places = [write_run(tmp_path / folder / "same") for folder in "ab"]
        assert len({run.name for run in read_runs(places)}) == 2


class TestSecrets:
    def test_what_the_report_hides_is_nowhere(self, tmp_path):
        """A secret cohort: no numbers of replies, no times. Of every run: nothing from un-noised updates."""
        place = write_run(tmp_path / "a", rounds=[line(number, secret=True) for number in range(4)])
        found = comparison(place)
        told = "\n".join([*lines(found), rendered(found), invoke(place, "--json").output])
        assert "0.4321" not in told and "0.8765" not in told and "accepted" not in told
        assert dict(zip(table_of(found).columns, table_of(found).rows[0], strict=True))["seconds"] == "–"

    @pytest.mark.usefixtures("undrawn")
    def test_a_seed_of_the_noise_is_a_word(self, tmp_path):
        places = [write_run(tmp_path / "a"), write_run(tmp_path / "b", settings={"privacy.noise-seed": 7_654_321})]
        found = comparison(*places)
        assert found.groups[1].settings["privacy.noise-seed"] == "seeded"
        for told in (rendered(found), markdown(found), json.dumps(compare_record(found))):
            assert "seeded" in told and "7654321" not in told

    def test_one_hidden_time_hides_that_of_the_group(self, tmp_path):
        known = write_run(tmp_path / "a", rounds=rounds(0.5, seconds={"total": 2.0}))
        (group,) = compared([Group("x", {}, read_runs([known, write_run(tmp_path / "b")]))]).groups
        assert group.seconds is None


class TestEpsilon:
    @pytest.mark.usefixtures("undrawn")
    def test_of_one_kind_there_is_an_axis(self, two):
        assert [picture.title for picture in pictures(comparison(*two))] == ["Accuracy by round", "Final accuracy by ε"]

    @pytest.mark.usefixtures("undrawn")
    def test_of_two_kinds_there_is_none(self, two, tmp_path_factory):
        def check(kind, settings):
            folder = tmp_path_factory.mktemp("case")
            found = comparison(two[0], write_run(folder / "c", kind, settings=settings))
            titles = [picture.title for picture in pictures(found)]
            alone = [f"{what}, {task}" for task in found.tasks for what in ("Accuracy by round", "Final accuracy by ε")]
            assert titles == (alone if found.tasks[1:] else ["Accuracy by round"])
            assert any("on no common axis" in note for note in found.notes)
            cells = [row[table_of(found).columns.index("ε")] for row in table_of(found).rows]
            assert [cell.split()[1] for cell in cells] == ["[1]", "[2]"]
            named = [f"{kind.task}: {kind}" if found.tasks[1:] else str(kind) for kind in found.kinds]
            assert all(f"[{number}] {told}" in " ".join(found.notes) for number, told in enumerate(named, 1))

        assert failures([("dp-sgd", {}), ("sound", {"task.name": "breast-cancer"})], check) == []

    def test_different_tasks_are_named(self, two, tmp_path):
        found = comparison(two[0], write_run(tmp_path / "c", settings={"task.name": "breast-cancer"}))
        assert "different tasks (breast-cancer, digits)" in found.notes[0]

    def test_runs_without_epsilon_are_not_on_the_axis(self, two, tmp_path):
        found = comparison(*two, write_run(tmp_path / "c", "heuristic"))
        assert set(found.points()) == {"a", "b"}


def record_in(place, run, *events):
    ledger = Ledger(place / "ledger.jsonl")
    for number, event in enumerate(events, 1):
        ledger.open(event, "client", run, number, lambda: None, "global-dp", 1.0)


class TestTogether:
    def test_ledgers_add_up(self, two):
        for place, noise in zip(two, (2.0, 3.0), strict=True):
            record_in(place, place.name, Gaussian(noise), Gaussian(noise))
        expected = best_epsilon(Account([Gaussian(2.0)] * 2 + [Gaussian(3.0)] * 2, insiders=True), 1e-5)[0]
        found = comparison(*two)
        assert composed_epsilon(found.runs, found.kinds) == pytest.approx(expected, rel=1e-12)
        assert any(f"come to ε = {at_most(expected)}" in note for note in found.notes)

    def test_a_ledger_that_they_share_counts_once(self, two):
        record_in(two[0], "a", Gaussian(2.0), Gaussian(3.0))
        (two[1] / "ledger.jsonl").write_bytes((two[0] / "ledger.jsonl").read_bytes())
        record_in(two[1], "b", Gaussian(4.0))
        expected = best_epsilon(Account([Gaussian(2.0), Gaussian(3.0), Gaussian(4.0)], insiders=True), 1e-5)[0]
        found = comparison(*two)
        assert composed_epsilon(found.runs, found.kinds) == pytest.approx(expected, rel=1e-12)

    def test_a_run_that_was_ended_counts_as_its_own_claim_does(self, two):
        for place in two:
            record_in(place, place.name, Gaussian(2.0))
        said = Statement(SOUND, 1, "fixed", LEDGER, None, ((Gaussian(2.0), 99),))
        ended = record(said) | {"ended": {"how": "operator", "why": "asked to stop"}}
        (two[0] / "privacy.json").write_text(json.dumps(ended))
        found = comparison(*two)
        alone = best_epsilon(Account([Gaussian(2.0)] * 100, insiders=True), 1e-5)[0]
        expected = best_epsilon(Account([Gaussian(2.0)] * 101, insiders=True), 1e-5)[0]
        assert alone < composed_epsilon(found.runs, found.kinds) == pytest.approx(expected, rel=1e-12)
        assert any("no other run in those ledgers was ended because of it" in note for note in found.notes)

    def test_a_run_that_has_not_ended_is_not_added_up(self, two):
        for place in two:
            record_in(place, place.name, Gaussian(2.0))
        (two[0] / "privacy.json").write_text(json.dumps(RUNNING))
        found = comparison(*two)
        assert composed_epsilon(found.runs, found.kinds) is None

    def test_one_release_without_a_guarantee_leaves_none(self, two):
        record_in(two[0], "a", Gaussian(2.0))
        record_in(two[1], "b", Unaccounted("scores"))
        assert any(note.startswith("No ε bounds all runs together") for note in comparison(*two).notes)

    def test_of_other_data_nothing_is_added(self, two, tmp_path):
        other = write_run(tmp_path / "c", settings={"privacy.data-identity": "elsewhere"})
        for place in (two[0], other):
            record_in(place, place.name, Gaussian(2.0))
        found = comparison(two[0], other)
        assert composed_epsilon(found.runs, found.kinds) is None and "their costs add up" in found.notes[-1]

    def test_a_budget_holds_over_runs_of_one_ledger_alone(self, tmp_path):
        places = [budgeted(tmp_path / name) for name in "ab"]
        record_in(places[0], "a", Gaussian(2.0))
        (places[1] / "ledger.jsonl").write_bytes((places[0] / "ledger.jsonl").read_bytes())
        record_in(places[1], "b", Gaussian(2.0))
        assert any("the budget of ε = 4 holds" in note for note in comparison(*places).notes)
        (places[1] / "ledger.jsonl").unlink()
        record_in(places[1], "b", Gaussian(2.0))
        notes = comparison(*places).notes
        assert any("come to ε" in note for note in notes) and not any("the budget of" in note for note in notes)

    def test_one_that_was_set_after_a_release_holds_on_a_condition(self, tmp_path):
        places = [budgeted(tmp_path / "a"), budgeted(tmp_path / "b", BUDGET_FIXED)]
        record_in(places[0], "a", Gaussian(2.0))
        (places[1] / "ledger.jsonl").write_bytes((places[0] / "ledger.jsonl").read_bytes())
        notes = comparison(*places).notes
        assert any("come to ε" in note for note in notes) and not any("the budget of" in note for note in notes)


def budgeted(place, *premises):
    """A run under a budget of ε = 4."""
    write_run(place)
    everything = replace(OF_ALL, epsilon=4.0, budget=True, filter="Gaussian DP", spent=0.5, premises=premises)
    said = Statement(replace(SOUND, figures=(OF_RUN, everything)), 3, "fixed, 100 % of the nodes", LEDGER, None)
    facts = record(said) | {"ended": {"how": "as-asked", "why": ""}}
    (place / "privacy.json").write_text(json.dumps(facts))
    return place


class TestDiverged:
    def scored(self, place, *losses):
        return write_run(place, rounds=[line(number, central={"loss": each}) for number, each in enumerate(losses)])

    def test_a_run_that_has_diverged_has_no_final_score(self, tmp_path):
        places = self.scored(tmp_path / "a", 0.5, 0.1, math.nan), self.scored(tmp_path / "b", 0.5, 0.3, 0.2)
        found = comparison(*places)
        columns = table_of(found).columns.index("final loss")
        assert [row[columns] for row in table_of(found).rows] == ["–", "0.2000"]
        assert any(note.startswith("a has diverged: its last loss is no finite number") for note in found.notes)
        assert [run.final("loss", False) for run in found.runs] == [None, 0.2]
        assert pictures(found)

    def test_one_that_has_come_back_has(self, tmp_path):
        (run,) = comparison(self.scored(tmp_path / "a", 0.5, math.inf, 0.4)).runs
        assert run.final("loss", False) == 0.4


class TestPage:
    def test_it_is_sound_html_whatever_names_are(self, tmp_path):
        settings = {"client.optimizer": "<script>alert(1)</script>&\u202e"}
        places = [write_run(tmp_path / "a<b&'\"", settings=settings), write_run(tmp_path / "c")]
        page = rendered(comparison(*places))
        tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
        assert not list(tree.iter("script")) and "\u202e" not in page
        rows = tree.findall(".//section[@id='table']//tbody/tr")
        assert len(rows) == 2 and len(tree.findall(".//figure")) == 2

    def test_no_name_is_a_formula_a_line_or_a_picture_of_letters(self, tmp_path):
        places = [write_run(tmp_path / name) for name in (r"$\frac$", "b\n\x1b[2J", ":bug:")]
        result = invoke(*places, "--png", tmp_path / "figure.png")
        assert result.exit_code == 0 and r"$\frac$" in result.output and ":bug:" in result.output
        found = write_run(tmp_path / "a\x1b[2J", privacy=RUNNING, rounds=[line(1, central={"s\n|": 1.0})])
        told = "\n".join([*lines(comparison(found)), markdown(comparison(found))])
        assert "broke off" in told and "\x1b" not in told and "s\n" not in told

    def test_it_loads_nothing(self, two):
        page = rendered(comparison(*two))
        assert "default-src 'none'" in page and not re.findall(r"(?:src|href)=\"(?!#)", page)

    def test_the_same_files_give_the_same_page(self, two):
        assert rendered(comparison(*two)) == rendered(comparison(*two))

    def test_the_command_writes_it(self, two, tmp_path):
        from PIL import Image

        result = invoke(*two, "--output", tmp_path / "page.html", "--png", tmp_path / "figure.png")
        assert result.exit_code == 0
        assert "Comparison of 2 runs" in (tmp_path / "page.html").read_text(encoding="utf-8")
        assert Image.open(io.BytesIO((tmp_path / "figure.png").read_bytes())).width > 1000

    @pytest.mark.usefixtures("undrawn")
    def test_a_folder_that_is_not_there(self, two, tmp_path):
        result = invoke(*two, "--output", tmp_path / "absent" / "page.html")
        assert result.exit_code == 1 and "cannot be written" in result.output

    def test_many_runs_stay_a_small_page(self, tmp_path):
        settings = [{"privacy.noise-multiplier": 1.0 + number} for number in range(20)]
        places = [write_run(tmp_path / f"r{number}", settings=each) for number, each in enumerate(settings)]
        write_page(comparison(*places), tmp_path / "page.html")
        assert (tmp_path / "page.html").stat().st_size < 250_000
