"""Sums over the ledgers of clients that noise their own models."""

import json
import math

import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.privacy.accounting.events import Gaussian, Laplace, Unaccounted
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.report import leakage_report, render_leakage


class TestReport:
    def test_median_maximum_and_histogram(self):
        report = leakage_report([0.0, 0.4, 0.4, 0.8, 2.4])
        assert report["clients"] == 5 and report["that-released"] == 4
        assert report["median"] == pytest.approx(0.6) and report["maximum"] == 2.4
        assert sum(report["histogram"]["counts"]) == 4 and report["histogram"]["edges"][-1] == 2.4
        json.dumps(report, allow_nan=False)

    def test_nobody_released_anything(self):
        assert leakage_report([0.0, 0.0]) == {"clients": 2, "that-released": 0, "without-limit": 0}

    def test_what_has_no_limit_has_no_place_in_a_median(self):
        report = leakage_report([0.4, math.inf])
        assert report["maximum"] == 0.4 and report["without-limit"] == 1
        json.dumps(report, allow_nan=False)
        assert any("no limit" in line for line in render_leakage(report))

    def test_the_bars_are_in_proportion_to_the_counts(self):
        lines = render_leakage(leakage_report([1.0] * 3 + [10.0] * 4))
        assert [line.count("#") for line in lines[2:]] == [0, 30, 0, 0, 0, 0, 0, 0, 0, 40]

    def test_longest_bar_and_shortest(self):
        lines = render_leakage(leakage_report([1.0] * 10 + [2.0] * 5))
        assert "median 1, maximum 2" in lines[1]
        assert lines[7].endswith("#" * 40) and lines[-1].endswith("#" * 20) and len(lines) == 12


class TestToTheLetter:
    def test_a_report(self):
        report = leakage_report([0.0, 1.0, 1.0, 3.0, math.inf, math.inf])
        assert report == {
            "clients": 6,
            "that-released": 3,
            "without-limit": 2,
            "median": 1.0,
            "maximum": 3.0,
            "histogram": {
                "edges": pytest.approx([0.3 * edge for edge in range(11)]),
                "counts": [0, 0, 0, 2, 0, 0, 0, 0, 0, 1],
            },
        }
        assert {type(edge) for edge in report["histogram"]["edges"]} == {float}
        assert {type(count) for count in report["histogram"]["counts"]} == {int}
        assert type(report["median"]) is type(report["maximum"]) is float

    def test_each_line(self):
        first, second, third, *bars = render_leakage(leakage_report([0.0, 1.0, 1.0, 3.0, math.inf]))
        assert first == "5 clients, of which 3 released something with noise"
        assert second == "1 clients released something without noise: their leakage has no limit"
        assert third == "composed leakage: median 1, maximum 3"
        assert len(bars) == 10
        assert bars[0] == "          0 to       0.3      0"
        assert bars[3] == "        0.9 to       1.2      2 " + "#" * 40
        assert bars[9] == "        2.7 to         3      1 " + "#" * 20

    def test_in_words_where_there_is_little_to_say(self):
        assert render_leakage(leakage_report([0.0])) == ["1 clients, of which 0 released something with noise"]
        assert render_leakage(leakage_report([math.inf])) == [
            "1 clients, of which 0 released something with noise",
            "1 clients released something without noise: their leakage has no limit",
        ]


class TestCommand:
    def ledger(self, folder, name, *events):
        book = Ledger(folder / f"{name}.jsonl")
        for event in events:
            unit = "neighbourhood" if isinstance(event, Laplace) else "client"
            book.open(event, unit, "run", 1, allow=lambda: None)
        return str(book.path)

    def run(self, *paths):
        return CliRunner().invoke(app, ["ledger", "leakage", *paths])

    def test_each_ledger_then_all_of_them(self, tmp_path):
        two = self.ledger(tmp_path, "two", Laplace(0.2, 2.0), Laplace(0.4, 1.0), Unaccounted("nothing claimed"))
        one = self.ledger(tmp_path, "one", Laplace(0.1, 4.0), Gaussian(1.0))
        none = self.ledger(tmp_path, "none", Gaussian(1.0))
        result = self.run(two, one, none)
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert [line.rsplit(" ", 1)[-1] for line in lines[:3]] == ["0.8", "0.4", "0"]
        assert "3 clients, of which 2" in result.output and "median 0.6, maximum 0.8" in result.output

    def test_a_release_without_noise_has_no_limit(self, tmp_path):
        book = Ledger(tmp_path / "bad.jsonl")
        book.open(Unaccounted("no noise"), "neighbourhood", "run", 1, allow=lambda: None)
        assert "without noise" in self.run(str(book.path)).output

    def test_what_is_no_ledger(self, tmp_path):
        (tmp_path / "broken.jsonl").write_text("{}\n")
        for path in ("broken.jsonl", "absent.jsonl"):
            result = self.run(str(tmp_path / path))
            assert result.exit_code == 1 and "LedgerError" in result.output and "Traceback" not in result.output
