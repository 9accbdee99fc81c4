"""The page about a run: what it says, what it must not say, and that it is a sound HTML document."""

import functools
import hashlib
import io
import itertools
import json
import logging
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import html5lib
import pytest
from flwr.cli.build import build_fab_from_disk
from reported import evaluation, line, roc, write_run
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister.audits.findings import NAMES as TERMINAL
from cloister.audits.findings import Control, Finding, Measured
from cloister.cli import app
from cloister.config.io import read_toml
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.html.data import LONGEST, NAMES, Facts, Statements
from cloister.server.reports.html.figures import NAME_WIDTH
from cloister.server.reports.html.page import write_report
from cloister.server.reports.html.templates import code
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
HOSTILE = "</title></svg></style><script>alert(1)</script><img src=x onerror=y>&quot;\"' $x$ #010101 \x00\u202e\ud800"
NO_CURVES = [{"round": 0}]
"""Rounds of a run whose page has one figure, the confusion matrix."""
REJECTED = {"node_id": 12345678901, "code": "non-finite", "detail": "kernel holds NaN"}


def page_of(place, **run):
    return write_report(write_run(place, **run)).read_text(encoding="utf-8")


@functools.cache
def tree_of(page):
    """The document, for reading only; an error of its markup is an error of the test."""
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    for element in tree.iter():
        element.tag = str(element.tag).rpartition("}")[2]
    return tree


def texts(tree, path):
    return [" ".join(" ".join(found.itertext()).split()) for found in tree.iterfind(path)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rounds = [line(0), line(1, rejected=[REJECTED]), line(2, rejected=[REJECTED]), line(3)]
    return page_of(tmp_path_factory.mktemp("run"), rounds=rounds)


class TestWhatItSays:
    def test_the_claim_comes_first(self, page):
        tree = tree_of(page)
        assert texts(tree, ".//main/section/h2")[0] == "What is guaranteed"
        sentences = texts(tree, ".//section[@id='claim']/div[1]/p")
        assert len(sentences) == 3 and "every client" in sentences[0] and "not against the server" in sentences[1]
        assert (
            "at most 73.2 % instead of 50 %" in sentences[2]
            and "all runs in the ledger it is at most 88.1 %" in sentences[2]
        )

    def test_commands_in_sentences_are_set_as_code_and_nothing_else_is_markup(self):
        assert code("see `cloister plan` <here>") == "see <code>cloister plan</code> &lt;here&gt;"
        assert code("no `end <b>") == "no <code>end &lt;b&gt;</code>"

    @pytest.mark.usefixtures("undrawn")
    def test_a_weak_claim_is_not_shown_as_protection(self, tmp_path_factory):
        def check(epsilon, practical):
            folder = tmp_path_factory.mktemp("case")
            place = write_run(folder)
            privacy = json.loads((place / "privacy.json").read_text())
            privacy["claims"][0]["epsilon"] = epsilon
            (place / "privacy.json").write_text(json.dumps(privacy))
            (claim,) = tree_of(write_report(place).read_text()).findall(".//section[@id='claim']/div[@class]/h3/..")
            told = " ".join(" ".join(claim.itertext()).split())
            assert claim.attrib["class"] == ("claim sound" if practical else "claim")
            assert told.startswith("Guaranteed by" if practical else "Weak: the guarantee by")
            assert ("it hides whether" in told) is practical and ("hardly hides" in told) is not practical

        assert failures([(9.9, True), (10.1, False), (30.0, False)], check) == []

    @pytest.mark.usefixtures("undrawn")
    def test_without_a_curve_of_epsilon_the_page_says_why(self, tmp_path_factory):
        def check(kind, told):
            folder = tmp_path_factory.mktemp("case")
            rounds = [line(number) for number in range(4)]
            for each in rounds[1:]:
                each["measured"]["epsilon"] = None
            course = " ".join(texts(tree_of(page_of(folder, kind=kind, rounds=rounds)), ".//section[@id='course']"))
            assert all(sentence in course for sentence in told)
            assert ("keep ledgers" in course) is (kind == "dp-sgd") and "claims none" not in course

        cases = [
            (
                "mixed",
                ["the ledger holds releases without a guarantee, so that ε over everything in it is unknown"],
            ),
            ("none", ["nothing on the server claims one"]),
            ("dp-sgd", ["nothing on the server claims one", "simulated clients keep none"]),
        ]
        assert failures(cases, check) == []

    def test_an_officer_reads_which_epsilon_is_over_what(self, page):
        officer = " ".join(texts(tree_of(page), ".//section[@id='officer']"))
        assert "ε = 1 (this run) and 2 (all runs" in officer

    @pytest.mark.usefixtures("undrawn")
    def test_an_officer_reads_whose_epsilon_no_ledger_bounds(self, tmp_path_factory):
        """The server's ledger has no guarantee for a client, and each site's bounds that of its examples."""

        def check(kind, told):
            folder = tmp_path_factory.mktemp("case")
            place = write_run(folder, kind=kind)
            privacy = json.loads((place / "privacy.json").read_text())
            privacy["ledger"]["holds-releases-without-a-guarantee"] = True
            (place / "privacy.json").write_text(json.dumps(privacy))
            officer = " ".join(texts(tree_of(write_report(place).read_text()), ".//section[@id='officer']"))
            assert "about whole clients: no ε bounds all runs for a client." in officer
            assert ("counted over all runs by that client, in its own ledger" in officer) is told

        assert failures([("none", False), ("dp-sgd", True)], check) == []

    @pytest.mark.usefixtures("undrawn")
    def test_premises_and_whose_epsilon_it_is_are_said_in_words(self, tmp_path):
        tree = tree_of(page_of(tmp_path, kind="dp-sgd"))
        claim, officer = (" ".join(texts(tree, f".//section[@id='{name}']")) for name in ("claim", "officer"))
        assert "The ε of this run is that of a client with" in claim and "rounds of this run" in claim
        assert "each site's own ledger has the sum" in claim and "Nothing to protect" not in claim
        assert "Premises of dp-sgd: no node learns from the SuperLink" in officer and "(apart: enforced)" in officer

    @pytest.mark.usefixtures("undrawn")
    def test_where_no_client_trained_there_is_no_figure(self, tmp_path):
        place = write_run(tmp_path, kind="dp-sgd")
        privacy = json.loads((place / "privacy.json").read_text())
        for size in privacy["clients"]["by-examples"]:
            size["rounds"] = 0
        (place / "privacy.json").write_text(json.dumps(privacy))
        tree = tree_of(write_report(place).read_text())
        told = " ".join(texts(tree, ".//section[@id='claim']"))
        assert "Nothing to protect for the clients' mechanism No client trained" in told
        assert "50 %" not in told and "The figures" not in told
        assert "dp-sgd: no client trained" in " ".join(texts(tree, ".//section[@id='officer']"))

    def test_the_accuracy_of_always_guessing_the_largest_class_is_told(self, page):
        assert "Always guessing the largest class would be right for 33.33 % of them." in " ".join(page.split())

    @pytest.mark.usefixtures("undrawn")
    def test_without_a_guarantee_it_says_so(self, tmp_path_factory):
        def check(kind):
            folder = tmp_path_factory.mktemp("case")
            tree = tree_of(page_of(folder, kind=kind))
            assert texts(tree, ".//section[@id='claim']/div[1]/p")[0].startswith("There is no guarantee")
            assert not tree.findall(".//section[@id='claim']//table")

        assert failures(["none", "heuristic", "laplace"], check) == []

    def test_curves_have_their_numbers_in_words(self, page):
        told = dict(zip(texts(tree_of(page), ".//svg/title"), texts(tree_of(page), ".//svg/desc"), strict=True))
        assert "0.25 at round 1" not in told["Accuracy by round"] and "0.75 at round 3" in told["Accuracy by round"]
        assert "largest 1 at round 0" in told["Loss by round"]
        assert "0.9 at round 3" in told["ε of the ledger by round"]
        assert {"Noise on a weight by round: standard deviation", "Confusion matrix"} < set(told)

    def test_rejected_replies_with_their_reasons(self, page):
        (row,) = texts(tree_of(page), ".//section[@id='course']/div[@class='wide']/table/tbody/tr")
        assert row == "non-finite kernel holds NaN 2 1 1 to 2"

    def test_classes(self, page):
        rows = texts(tree_of(page), ".//section[@id='results']//tbody/tr")
        assert rows[0] == "0 0.900 0.800 0.850 10 1 (2)" and len(rows) == 3
        assert "macro F1 0.91" in " ".join(texts(tree_of(page), ".//section[@id='results']/p"))

    def test_long_names_of_classes_are_wrapped_and_not_cut(self, tmp_path):
        names = ["moderately differentiated adenocarcinoma", "benign", "healthy tissue beside a tumour"]
        text = page_of(tmp_path, rounds=NO_CURVES, evaluation=evaluation(names))
        tree = tree_of(text)
        labels = texts(tree, ".//svg//text")
        assert {"moderately", "differentiated", "adenocarcinoma"} <= set(labels)
        assert not any("…" in label for label in labels) and "ellipsis" not in text
        rows = texts(tree, ".//section[@id='results']//tbody/tr")
        assert rows[0].startswith(names[0]) and rows[0].endswith("benign (2)")

    def test_a_name_of_joined_words_ends_lines_between_them(self, tmp_path):
        found = evaluation(["Very_Mild_Demented", "Moderate-Demented", "None"])
        text = page_of(tmp_path, rounds=NO_CURVES, evaluation=found)
        labels = texts(tree_of(text), ".//svg//text")
        assert {"Very_Mild_", "Demented", "Moderate-"} <= set(labels)
        assert "Very_<wbr>Mild_<wbr>Demented" in text

    def test_a_name_has_as_many_lines_as_there_is_room_for(self, tmp_path_factory):
        def check(classes, lines):
            folder = tmp_path_factory.mktemp("case")
            found = evaluation([f"{number} " + "very " * 40 for number in range(classes)])
            tree = tree_of(page_of(folder, rounds=NO_CURVES, evaluation=found))
            labels = [label for label in texts(tree, ".//svg//text") if "very" in label]
            assert len(labels) == 2 * classes * lines and max(map(len, labels)) <= NAME_WIDTH

        assert failures([(6, 4), (12, 2), (20, 1)], check) == []

    def test_many_classes_and_rounds_stay_a_small_page(self, tmp_path):
        rounds = [line(number) for number in range(3000)]
        found = page_of(tmp_path, rounds=rounds, evaluation=evaluation([f"class {n}" for n in range(62)]))
        assert len(found.encode()) < 500_000
        assert len(tree_of(found).findall(".//section[@id='results']//tbody/tr")) == 12

    def test_roc_curves_of_few_classes_with_their_average(self, tmp_path):
        curves = {"roc": roc(["well", "ill", "worse"])}
        tree = tree_of(page_of(tmp_path, rounds=NO_CURVES, evaluation=evaluation() | curves))
        assert "ROC curve of each class against the others" in texts(tree, ".//figcaption")
        told = next(text for text in texts(tree, ".//svg/desc") if text.startswith("Area"))
        assert told == "Area under the curve: well 1.000, ill 0.833, worse 0.667, macro average 0.833."
        assert {"well 1.000", "macro average 0.833"} <= set(texts(tree, ".//svg//text"))

    def test_of_many_classes_the_curves_of_least_area_are_drawn(self, tmp_path):
        curves = {"roc": roc([f"class {number}" for number in range(40)])}
        tree = tree_of(page_of(tmp_path, rounds=NO_CURVES, evaluation=evaluation() | curves))
        drawn = [text for text in texts(tree, ".//svg//text") if text.startswith("class ")]
        assert [text.split()[1] for text in drawn] == [str(number) for number in range(30, 40)]
        assert any(title.endswith("the 10 of smallest area of 40") for title in texts(tree, ".//figcaption"))

    def test_a_finding_without_classes_has_its_curve(self, tmp_path):
        scores = {"examples": 5, "metrics": {"loss": 0.25, "auc": 0.75}, "roc": roc(["1"])}
        tree = tree_of(page_of(tmp_path, rounds=NO_CURVES, evaluation=scores))
        assert texts(tree, ".//figcaption") == ["ROC curve of 1"]

    def test_damaged_curves_are_refused(self, tmp_path):
        for found in ([0.5], [float("nan")] * 101, ["x"] * 101):
            curves = {"roc": [{"name": "1", "auc": 0.5, "found": found}]}
            with pytest.raises(ConfigError, match=r"evaluation\.json is not what a run writes"):
                page_of(tmp_path, evaluation=evaluation() | curves)

    def test_hashes_can_be_checked(self, page):
        model = hashlib.sha256(b"weights").hexdigest()
        assert model in page and "ab" * 32 in page and "1.41.0" in page

    @pytest.mark.usefixtures("undrawn")
    def test_the_bundle_that_flower_ran(self, tmp_path):
        place = write_run(tmp_path)
        facts = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(facts | {"bundle-sha256": "cd" * 32}))
        assert "cd" * 32 in write_report(place).read_text()

    @pytest.mark.usefixtures("undrawn")
    def test_a_regression_has_no_classes(self, tmp_path):
        scores = {"examples": 5, "metrics": {"loss": 0.25, "rmse": 0.5}}
        found = page_of(tmp_path, evaluation=scores)
        assert "rmse <strong>0.5</strong>" in found and "Confusion" not in found

    @pytest.mark.usefixtures("undrawn")
    def test_an_audit_is_shown(self, tmp_path):
        loss = Measured("loss", "auc", 0.61, "example", 0.5, 0.7, delta=1e-5)
        tells = [Measured("loss", "tpr", number / 100, alarms=0.01) for number in range(9)]
        failed = Control("exchanged", "fails", loss, met=False)
        finding = Finding("membership", "Members are found.", (*tells, loss), (failed,), details={"x": [1]})
        audit = {"lines": ["measured: little"], "findings": [finding.facts()]}
        text = page_of(tmp_path, audit=audit)
        rows = texts(tree_of(text), ".//section[@id='results']//table/tbody/tr")
        row = next(row for row in rows if row.startswith("loss"))
        assert row.startswith("loss AUC 0.610 (0.500 to 0.700)"), "what says most is first"
        assert row.endswith("unit example, δ = 1e-05")
        assert "shows nothing" in row and "2 more are in audit.json" in text
        assert "measured: little" in text and "more than is claimed" not in text
        assert "more than is claimed" in page_of(tmp_path, audit=audit | {"contradicted": [{"value": 9}]})
        left = [{"name": "canaries", "why": "it was not asked for"}]
        assert "Not made: canaries: it was not asked for." in page_of(tmp_path, audit=audit | {"skipped": left})
        sound = [replace(finding, controls=()).facts()]
        assert "shows nothing" not in page_of(tmp_path, audit=audit | {"findings": sound})

    @pytest.mark.usefixtures("undrawn")
    def test_an_audit_is_told_in_the_words_of_a_terminal(self, tmp_path):
        rounded_down = {"value": 1.2389, "delta": 1.9998e-5, "confidence": 0.9996}
        sure = Measured("ratio", "epsilon", unit="client", assumption="of a shape", **rounded_down)
        found = Measured("ratio", "tpr", 0.25, "client", alarms=0.001)
        finding = Finding("membership", "", (found, sure), ())
        tree = tree_of(page_of(tmp_path, audit={"findings": [finding.facts()]}))
        rows = [row for row in texts(tree, ".//section[@id='results']//table/tbody/tr") if row.startswith("ratio")]
        assert rows == [
            "ratio ε at least 1.23 unit client, δ = 1.999e-05, 99.9 % sure, of a shape",
            "ratio members found 0.250 unit client, at 0.1 % false alarms",
        ]
        assert {key: TERMINAL[key] for key in NAMES} == NAMES

    @pytest.mark.usefixtures("undrawn")
    def test_it_is_told_how_many_figures_of_an_audit_are_left_out(self, tmp_path_factory):
        def check(findings):
            folder = tmp_path_factory.mktemp("case")
            told = Finding("membership", "", tuple(Measured("loss", "tpr", n / 100, alarms=0.01) for n in range(13)))
            audit = {"findings": [told.facts()] * findings}
            tree = tree_of(page_of(folder, audit=audit))
            shown = {kind: texts(tree, f".//p[@class='small {kind}']") for kind in ("on-screen", "in-print")}
            printed = 5 if findings == 1 else 10
            assert shown == {
                "on-screen": ["5 more are in audit.json."] * findings,
                "in-print": [f"{printed} more are in audit.json."] * findings,
            }
            (few,) = {
                table.attrib["class"] for table in tree.iter("table") if "figures-of" in table.attrib.get("class", "")
            }
            assert few == ("figures-of" if findings == 1 else "figures-of few")

        assert failures([1, 2], check) == []

    @pytest.mark.usefixtures("undrawn")
    def test_kinds_without_noise_are_counted_as_they_are_listed(self, tmp_path):
        tree = tree_of(page_of(tmp_path, kind="dp-sgd"))
        listed = texts(tree, ".//section[@id='claim']/ul[last()]/li")
        officer = " ".join(texts(tree, ".//section[@id='officer']"))
        assert f"{len(listed)} kinds of facts left without noise" in officer and len(listed) == 2
        assert "for the operator and the officer" in listed[-1] and "so are the replies" not in officer

    def test_an_audit_that_no_audit_wrote_is_refused(self, tmp_path):
        for number, audit in enumerate(({}, {"findings": [{"name": "x"}]}, {"findings": 3})):
            with pytest.raises(ConfigError, match=r"audit\.json is not what a run writes"):
                page_of(tmp_path / str(number), audit=audit)

    @pytest.mark.usefixtures("undrawn")
    def test_a_run_that_was_killed_claims_nothing(self, tmp_path):
        privacy = {"status": "running", "mechanism": "global-dp", "claims": [], "see": "the ledger"}
        place = write_run(tmp_path, privacy=privacy, evaluation=None)
        with (place / "rounds.jsonl").open("a") as file:
            file.write('{"round": 4, "cen')
        text = write_report(place).read_text()
        assert "has not ended, or not in order" in text and "Guaranteed by" not in text

    def test_a_model_that_diverged_has_no_figure(self, tmp_path):
        rounds = [line(0), line(1, central={"loss": float("nan"), "accuracy": 0.1})]
        tree_of(page_of(tmp_path, rounds=rounds))

    def test_no_directory_of_a_run_is_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"is no run directory: it has no config\.json"):
            write_report(tmp_path)


class TestWhatItMustNotSay:
    @pytest.mark.usefixtures("undrawn")
    def test_a_secret_cohort_stays_secret(self, tmp_path):
        rounds = [line(number, secret=True) for number in range(4)]
        place = write_run(tmp_path, rounds=rounds)
        text = write_report(place).read_text()
        assert Facts.read(place).secret_cohorts and "replies</th>" not in text and "3/4" not in text
        assert "was not written down" in text and "no times" in text

    def test_otherwise_replies_are_shown(self, page):
        assert "3/4" in page

    def test_what_comes_from_updates_without_noise_stays_out(self, page):
        assert "0.4321" not in page and "0.8765" not in page

    def test_who_was_rejected_stays_with_the_operator(self, page):
        assert str(REJECTED["node_id"]) not in page

    @pytest.mark.usefixtures("undrawn")
    def test_the_seed_of_the_noise_is_a_word(self, tmp_path):
        place = write_run(tmp_path, settings={"privacy.noise-seed": 7_654_321})
        facts = json.loads((place / "config.json").read_text())
        text = write_report(place).read_text()
        assert "seeded" in text and "7654321" not in text
        plain = hashlib.sha256(json.dumps(facts["config"], sort_keys=True).encode()).hexdigest()
        assert plain not in text and plain != facts["config-sha256"], "whoever tries seeds finds the one that fits it"
        assert facts["config-sha256"] in text

    @pytest.mark.usefixtures("undrawn")
    def test_a_digest_that_an_earlier_version_wrote_is_not_shown(self, tmp_path):
        place = write_run(tmp_path, settings={"privacy.noise-seed": 7_654_321})
        facts = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(facts | {"config-sha256": "e" * 64}))
        assert "e" * 64 not in write_report(place).read_text()

    def test_it_has_no_time(self, page):
        assert not re.search(r"\d\d:\d\d|\b20\d\d-\d\d|\b1\d{9}\b", page)


class TestHostileText:
    @pytest.fixture(scope="class")
    def hostile(self, tmp_path_factory):
        bad = dict.fromkeys(["name", "meaning"], HOSTILE)
        figure = {"attack": HOSTILE, "quantity": HOSTILE, "value": 1.0, "assumption": HOSTILE}
        audit = {"lines": [HOSTILE], "findings": [bad | {"measured": [figure]}]}
        scores = {"loss": 1.0, HOSTILE: 0.5}
        rejected = {"node_id": 1, "code": HOSTILE, "detail": HOSTILE}
        rounds = [line(n, rejected=[rejected], central=scores, federated=scores) for n in range(3)]
        more = {"task.model": HOSTILE, "output-dir": HOSTILE}
        place = write_run(
            tmp_path_factory.mktemp("hostile"), rounds=rounds, audit=audit, evaluation=evaluation([HOSTILE] * 3)
        )
        facts = json.loads((place / "config.json").read_text())
        facts = {**facts, "config": facts["config"] | more, "versions": {HOSTILE: HOSTILE}}
        (place / "config.json").write_text(json.dumps(facts))
        stated = Statements(**dict.fromkeys(["trust", "access"], HOSTILE.removesuffix("\ud800")))
        return write_report(place, stated).read_text(encoding="utf-8")

    def test_it_is_text_and_nothing_else(self, hostile):
        tree = tree_of(hostile)
        assert not tree.findall(".//script") and not tree.findall(".//img")
        handlers = [name for element in tree.iter() for name in element.attrib if name.startswith("on")]
        assert not handlers
        assert "alert(1)" in " ".join(tree.find(".//section[@id='officer']").itertext())

    def test_what_cannot_be_printed_is_replaced(self, hostile):
        assert not [letter for letter in hostile if not letter.isprintable() and letter != "\n"]

    def test_a_figure_shows_it_as_it_is(self, hostile):
        shown = [text for text in texts(tree_of(hostile), ".//svg//text") if "script" in text]
        assert shown and all("$x$" in text for text in shown if len(text) > 20)


class TestStructure:
    @pytest.fixture(scope="class")
    def tree(self, page):
        return tree_of(page)

    def test_it_loads_nothing(self, page, tree):
        assert not tree.findall(".//script") and not tree.findall(".//link")
        links = [element.attrib[key] for element in tree.iter() for key in ("href", "src") if key in element.attrib]
        assert links and all(link.startswith("#") for link in links)
        assert not re.search(r"https?://|@import|url\((?!#)", page)
        assert "default-src 'none'" in page

    def test_landmarks_and_headings(self, tree):
        for name in ("header", "nav", "main", "footer"):
            assert len(tree.findall(f".//{name}")) == 1
        assert len(tree.findall(".//h1")) == 1 and tree.attrib["lang"] == "en"
        levels = [int(element.tag[1]) for element in tree.iter() if re.fullmatch(r"h\d", str(element.tag))]
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        for section in tree.findall(".//section"):
            assert section.attrib["aria-labelledby"] == section.find("h2").attrib["id"]

    def test_ids_are_unique_and_lead_somewhere(self, tree):
        ids = [element.attrib["id"] for element in tree.iter() if "id" in element.attrib]
        assert len(ids) == len(set(ids))
        for element in tree.iter():
            for key in ("href", "clip-path", "aria-labelledby"):
                for target in re.findall(r"[\w.-]+", element.attrib.get(key, "").replace("url", "")):
                    assert target in ids, (key, target)

    def test_tables_have_captions_and_scopes(self, tree):
        tables = tree.findall(".//table")
        assert len(tables) >= 3
        for table in tables:
            assert texts(table, "caption")[0]
            assert all("scope" in cell.attrib for cell in table.iter("th"))

    def test_figures_are_described(self, tree):
        figures = tree.findall(".//svg")
        assert len(figures) == len(tree.findall(".//figure")) == 6
        for figure in figures:
            title, description = figure.attrib["aria-labelledby"].split()
            assert figure.find("title").attrib["id"] == title and figure.find("desc").attrib["id"] == description
            assert figure.attrib["role"] == "img" and len(figure.find("desc").text) > 30

    def test_figures_have_the_colours_of_the_page(self, tree):
        styles = " ".join(element.attrib.get("style", "") for element in tree.iter())
        assert "var(--ink)" in styles and "var(--series-1)" in styles
        assert not re.search(r"#[0-9a-f]{6}", styles.replace("#000000", "")), styles

    def test_contrast(self, page):
        """At least 4.5 to 1 for text, 3 to 1 for curves (WCAG 2.2, AA)."""

        def check(scheme):
            start = {"light": ":root", "dark": "prefers-color-scheme: dark", "print": "@media print"}[scheme]
            colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", page[page.index(start) :][:700]))
            for name in ("ink", "muted", "good", "warn", "link"):
                for ground in ("paper", "soft"):
                    assert contrast(colours.get(name, "#000000"), colours[ground]) >= 4.5 or name not in colours, name
            assert all(contrast(colours[name], colours["paper"]) >= 3 for name in ("series-1", "series-2"))

        assert failures(["light", "dark", "print"], check) == []


def contrast(first, second):
    """Of two colours, by WCAG 2.2."""

    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(map(luminance, (first, second)))
    return (light + 0.05) / (dark + 0.05)


def test_the_same_files_give_the_same_page(tmp_path_factory):
    def check(kind):
        folder = tmp_path_factory.mktemp("case")
        first, second = (page_of(folder / str(number) / "run", kind=kind) for number in range(2))
        assert first == second
        tree_of(first)

    assert failures(["sound", "dp-sgd"], check) == []


class TestTheOfficersPage:
    def test_every_question_is_answered_or_left_open(self, page):
        questions = tree_of(page).findall(".//div[@class='question']")
        assert len(questions) == 9
        for question in questions:
            assert len(question.findall("div/p")) >= 2 and "To be stated by the operator" in "".join(
                question.itertext()
            )

    @pytest.mark.usefixtures("undrawn")
    def test_nothing_is_promised_where_there_was_no_mechanism(self, tmp_path):
        tree = tree_of(page_of(tmp_path, kind="none"))
        assert all(len(question.findall("div/p")) >= 2 for question in tree.findall(".//div[@class='question']"))
        text = " ".join(texts(tree, ".//section[@id='officer']"))
        assert "each recipient may learn" in text and "claim holds" not in text and "ε =" not in text
        assert "an entry stands for all rounds that follow it" in text and "Releases are not rounds" not in text

    @pytest.mark.usefixtures("undrawn")
    def test_statements_stand_where_they_were_missing(self, tmp_path):
        stated = Statements(**{name: f"We state {name}." for name in Statements.model_fields})
        text = write_report(write_run(tmp_path), stated).read_text()
        assert text.count("The operator states:") == 9 and "To be stated" not in text and "We state trust." in text

    def test_a_bad_file_is_refused_by_the_name_of_its_key(self, tmp_path_factory):
        def check(content, named):
            folder = tmp_path_factory.mktemp("case")
            path = folder / "stated.toml"
            path.write_text(content)
            with pytest.raises(ConfigError, match=re.escape(named)):
                read_toml(Statements, path, str(path))

        cases = [
            ("trust = 'us'\ntrsut = 'us'", "unknown key 'trsut'"),
            ("trust = 3", "trust = 3"),
            (f"access = '{'x' * (LONGEST + 1)}'", "access"),
            ("trust = ", "is no TOML"),
        ]
        assert failures(cases, check) == []

    @pytest.mark.usefixtures("undrawn")
    def test_the_command(self, tmp_path):
        place = write_run(tmp_path / "run")
        (tmp_path / "stated.toml").write_text("collection = 'with consent'")
        done = CliRunner().invoke(app, ["report", str(place), "--statements", str(tmp_path / "stated.toml")])
        assert done.exit_code == 0 and done.output.strip() == str(place / "report.html")
        assert "with consent" in (place / "report.html").read_text()
        assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 1


class TestTheEndOfARun:
    @pytest.fixture
    def settings(self, tmp_path):
        return {"task.model": "softmax", "num-rounds": 1, "output-dir": str(tmp_path), "client.local-epochs": 1}

    def quiet(self):
        return ConsoleReporter(1, Console(file=io.StringIO(), width=200))

    @pytest.mark.usefixtures("runs_end_with_a_page")
    def test_it_leaves_the_page_and_the_classes(self, settings):
        narrator = self.quiet()
        outcome = simulate(settings, 2, narrator)
        tree = tree_of((outcome.directory.path / "report.html").read_text())
        assert len(tree.findall(".//section[@id='results']//tbody/tr")) == 10
        found = json.loads((outcome.directory.path / "evaluation.json").read_text())
        assert found["metrics"] == pytest.approx(dict(outcome.rounds[-1].central))
        assert sum(map(sum, found["confusion"])) == found["examples"] == 359
        assert "report.html" in narrator.console.file.getvalue()

    @pytest.mark.usefixtures("runs_end_with_a_page")
    def test_the_key_switches_it_off(self, settings):
        outcome = simulate(settings | {"report": False}, 2, self.quiet())
        assert not (outcome.directory.path / "report.html").exists()
        assert (outcome.directory.path / "evaluation.json").exists()

    @pytest.mark.usefixtures("runs_end_with_a_page")
    def test_a_page_that_fails_is_one_warning(self, settings, monkeypatch, caplog):
        def fail(path):
            raise RuntimeError("0.123456 of an array")

        monkeypatch.setattr("cloister.server.reports.html.page.write_report", fail)
        with caplog.at_level(logging.WARNING, "cloister.server"):
            outcome = simulate(settings, 2, self.quiet())
        told = [record.getMessage() for record in caplog.records]
        assert told == ["report.html was not written: RuntimeError"]
        assert outcome.ended == "as-asked" and (outcome.directory.path / "model.npz").exists()


@pytest.mark.slow
def test_the_page_is_written_by_what_flower_ships(tmp_path):
    """From an unpacked bundle, where no file but Python's is left."""
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))) as bundle:
        bundle.extractall(tmp_path / "app")
    place = write_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; import cloister.server.reports.html.page as page;"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules;"
        "print(page.__file__); page.write_report(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(place)],
        capture_output=True, text=True, cwd=tmp_path / "app", env={"PATH": "", "PYTHONPATH": str(tmp_path / "app")},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "app"))
    assert (place / "report.html").read_bytes() == write_report(place).read_bytes()


def test_a_run_of_an_earlier_schema_is_refused_with_the_remedy(tmp_path):
    place = write_run(tmp_path / "run")
    content = json.loads((place / "privacy.json").read_text())
    del content["schema"]
    (place / "privacy.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"privacy.json: schema 1 was found and 2 is read.*config.json beside it names"
    ):
        Facts.read(place)
