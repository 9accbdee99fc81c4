"""`cloister audit`: what it reads, says and writes."""

import io
import json
import pkgutil
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import audits, cli
from cloister.audits.audit import AUDITS, Effort, Progress, audit
from cloister.audits.findings import NOTHING, Audited, Control, Finding, Measured, claimed, measured, strongest
from cloister.utils.errors import ConfigError

SOUND = {"epsilon": 0.01, "delta": 1e-5, "unit": "client", "relation": "add-or-remove", "scope": "this run"}


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def auc(value, attack="attack"):
    return Measured(attack, "auc", value, "example", value - 0.01, value + 0.01)


@pytest.fixture
def copied(plain_run, tmp_path):
    """A run directory that a test may change."""
    return shutil.copytree(plain_run, tmp_path / "run")


@pytest.fixture
def counted(monkeypatch):
    """Return the work that audits announce, and the work that they do."""
    found = {"expected": 0.0, "done": 0.0}
    expect, step = Progress.expect, Progress.step

    def expected(self, amount, *more):
        found["expected"] += amount
        expect(self, amount, *more)

    def done(self, amount=1.0):
        found["done"] += amount
        step(self, amount)

    monkeypatch.setattr(Progress, "expect", expected)
    monkeypatch.setattr(Progress, "step", done)
    return found


class Telling:
    """An audit that finds this AUC."""

    misfit = staticmethod(lambda run: "")

    def __init__(self, name, value=0.9):
        self.name, self.value = name, value

    def conduct(self, run, effort):
        low = Control("open", "succeeds", auc(self.value, self.name), True)
        return Finding(self.name, "It tells.", (auc(self.value, self.name),), (low,), details={"x": [1]})


class TestCommand:
    def test_a_small_run(self, copied, few_resamples, counted):
        told = invoke("audit", copied, "--only", "membership-inference", "--shadows", "4")
        assert told.exit_code == 0, told.output
        facts = json.loads((copied / "audit.json").read_text())
        (finding,) = facts["findings"]
        assert {"loss threshold", "LiRA, online", "LiRA, offline", "RMIA"} <= {
            item["attack"] for item in finding["measured"]
        }
        assert {item["expected"] for item in finding["controls"]} == {"succeeds", "fails"}
        assert [item["met"] for item in finding["controls"] if item["expected"] == "succeeds"].count(True) >= 3
        assert finding["details"]["members"] + finding["details"]["others"] == 1797
        assert facts["lines"][0] == "claimed: no ε (none, none)" and facts["lines"][1].startswith("measured: ")
        assert all((copied / picture).stat().st_size > 1000 for picture in finding["pictures"])
        assert all(line in told.output for line in facts["lines"]) and finding["meaning"] in told.output
        assert counted["done"] == counted["expected"] == 4 * 3 and finding["seconds"] > 0
        assert "membership-inference: 12 rounds of the attacker's own federations, about 0:" in told.output
        assert "membership-inference: 8 of 12, about 0:" in told.output and "\x1b" not in told.output

    @pytest.mark.slow
    def test_a_claim_that_an_attack_contradicts_is_called_false(self, copied, few_resamples, counted):
        privacy = json.loads((copied / "privacy.json").read_text())
        pretended = privacy | {"status": "sound", "mechanism": "global-dp", "claims": [SOUND]}
        (copied / "privacy.json").write_text(json.dumps(pretended))
        told = invoke("audit", copied, "--only", "client-inference", "--shadows", "8")
        assert told.exit_code == 1 and "the claim is contradicted, 95 % sure" in told.output
        assert json.loads((copied / "audit.json").read_text())["contradicted"]
        assert counted["done"] == counted["expected"] == 2 * (3 * 8 + 2 * 2)

    def test_settings_are_run_first(self, tmp_path):
        settings = f"task.name='linear' num-rounds=1 tensorboard=false output-dir='{tmp_path}' seed=1"
        told = invoke("audit", "-c", settings, "--only", "gradient-inversion")
        assert told.exit_code == 0, told.output
        assert "not run: gradient-inversion: examples of task 'linear' are no images" in told.output
        assert len(list(tmp_path.glob("*/audit.json"))) == 1

    def test_what_is_found_is_written_before_the_next_attack(self, copied, monkeypatch):
        class Breaking(Telling):
            def conduct(self, run, effort):
                raise KeyboardInterrupt

        only = ("membership-inference", "client-inference")
        kinds = dict(zip(only, (Telling, Breaking), strict=True))
        monkeypatch.setattr(AUDITS, "load", lambda name: kinds[name](name))
        with pytest.raises(KeyboardInterrupt):
            audit(copied, Effort(shadows=4), only)
        facts = json.loads((copied / "audit.json").read_text())
        assert [finding["name"] for finding in facts["findings"]] == ["membership-inference"]

    def test_what_was_found_before_stays(self, copied, monkeypatch):
        def told(name, value):
            monkeypatch.setattr(AUDITS, "load", lambda name: Telling(name, value))
            audited = audit(copied, Effort(), [name])
            written = json.loads((copied / "audit.json").read_text())["findings"]
            assert written == [finding.facts() for finding in audited.findings]
            return [(finding.name, finding.measured[0].value) for finding in audited.findings], audited.lines[1]

        told("first", 0.9)
        found, line = told("second", 0.7)
        assert found == [("first", 0.9), ("second", 0.7)] and line.startswith("measured: AUC 0.900")
        assert told("first", 0.6)[0] == [("first", 0.6), ("second", 0.7)], "one that is made again replaces its own"
        privacy = json.loads((copied / "privacy.json").read_text())
        (copied / "privacy.json").write_text(json.dumps(privacy | {"rounds": 3}))
        assert told("third", 0.6)[0] == [("third", 0.6)], "what was found of other models does not"
        (copied / "audit.json").write_text('{"rounds": 3, "findings": [{"name": "x"}]}')
        with pytest.raises(ConfigError, match=r"audit\.json is not what an audit writes: remove it"):
            told("third", 0.6)

    def test_what_cannot_be_audited_is_one_line(self, plain_run, tmp_path):
        def check(name, content, said):
            run = shutil.copytree(plain_run, tmp_path / f"{name}-{content is None}-{len(said)}")
            (run / name).unlink() if content is None else (run / name).write_text(content)
            told = invoke("audit", run, "--only", "membership-inference", "--shadows", "4")
            lines = [line for line in told.output.splitlines() if not line.endswith(" ...")]
            assert told.exit_code == 1 and len(lines) == 1 and said in lines[0]

        cases = [
            ("config.json", None, "is no run directory: it has no config.json"),
            ("privacy.json", '{"status": "running"}', "this run has not ended"),
            ("privacy.json", "[]", "privacy.json is not what a run writes"),
            ("config.json", '{"config": {}}', "its config.json is not that of a run"),
            ("model.npz", None, "holds no model.npz"),
        ]
        assert failures(cases, check) == []

    def test_a_run_of_nodes_is_skipped_with_the_reason(self, copied):
        (copied / "simulation.json").unlink()
        told = invoke("audit", copied, "--only", "membership-inference")
        assert told.exit_code == 0 and "not run: membership-inference: its clients were nodes" in told.output
        assert "measured: nothing that its controls bear out" in told.output

    def test_what_was_not_asked_for_is_named_unless_it_was_made_before(self, copied, monkeypatch):
        load = AUDITS.load
        monkeypatch.setattr(
            AUDITS, "load", lambda name: Telling(name) if name == "membership-inference" else load(name)
        )

        def left_out(*only):
            return {each["name"] for each in json.loads(audit(copied, Effort(4), only).write().read_text())["skipped"]}

        assert left_out("membership-inference") == {"canaries", "client-inference", "gradient-inversion"}
        assert "membership-inference" not in left_out("canaries")

    def test_an_unknown_audit_and_too_little_to_go_by(self, copied):
        assert "unknown audit 'palmistry'" in invoke("audit", copied, "--only", "palmistry").output
        assert "give either a run directory or settings" in invoke("audit").output
        assert "give either" in invoke("audit", copied, "-c", "num-rounds=1").output


class TestFinding:
    def test_a_figure_whose_control_was_not_met_does_not_count(self):
        weak = Control("open", "succeeds", auc(0.5, "weak"), False)
        good = Control("open", "succeeds", auc(0.9, "good"), True)
        finding = Finding("name", "", (auc(0.99, "weak"), auc(0.7, "good")), (weak, good))
        assert [item.value for item in finding.borne_out("auc")] == [0.7]
        assert strongest((finding,), "auc").value == 0.7 and strongest((finding,), "epsilon") is None
        assert [item["borne-out"] for item in finding.facts()["measured"]] == [False, True]
        assert measured((finding,)) == "AUC 0.700 (0.690 to 0.710) by good, unit example"

    def test_an_audit_whose_controls_all_failed_says_first_that_it_shows_nothing(self):
        failed = [Control("open", "succeeds", auc(0.5, name), False) for name in ("one", "two")]
        met = Control("open", "succeeds", auc(0.9, "two"), True)
        beside = Measured("score of one", "score", 3.0)  # has no control of its own
        finding = Finding("name", "Nobody could tell.", (auc(0.5, "one"), auc(0.5, "two"), beside), tuple(failed))
        assert finding.in_sum == finding.facts()["meaning"] == NOTHING
        assert replace(finding, controls=(failed[0], met)).in_sum == "Nobody could tell."
        assert replace(finding, controls=()).in_sum == "Nobody could tell."

    def test_a_bound_contradicts_a_claim_for_its_own_unit_and_delta_alone(self, tmp_path):
        bound = Measured("attack", "epsilon", 1.0, "client", delta=1e-5, confidence=0.95)
        finding = Finding("name", "", (bound,))

        def contradicted(**changes):
            privacy = {"status": "sound", "mechanism": "global-dp", "claims": [SOUND | changes]}
            return Audited(tmp_path, privacy, (finding,), ()).contradicted

        assert contradicted() == (bound,)
        for other in ({"epsilon": 1.0}, {"unit": "example"}, {"delta": 1e-6}, {"relation": "replace-one"}):
            assert contradicted(**other) == ()

    def test_a_bound_from_below_is_rounded_down_with_its_delta_and_its_confidence(self, tmp_path):
        bound = Measured("attack", "epsilon", 1.2389, "client", delta=1.9998e-5, confidence=0.9996)
        assert (
            measured((Finding("name", "", (bound,)),))
            == "ε ≥ 1.23 at δ = 1.999e-05, 99.9 % sure by attack, unit client"
        )
        privacy = {"status": "sound", "mechanism": "global-dp", "claims": [SOUND | {"delta": bound.delta}]}
        console = Console(record=True, width=200, file=io.StringIO())
        Audited(tmp_path, privacy, (Finding("name", "", (bound,)),), ()).show(console)
        told = console.export_text()
        assert "the claim is contradicted, 99.9 % sure: ε ≥ 1.23" in told and "ε at least 1.23 " in told

    def test_what_is_claimed(self):
        sound = {"status": "sound", "mechanism": "global-dp", "claims": [SOUND, SOUND | {"scope": "all runs"}]}
        assert claimed(sound) == "ε = 0.01 at δ = 1e-05 for one client, add-or-remove (global-dp, sound)"
        assert claimed({"status": "heuristic", "mechanism": "metric", "claims": []}) == "no ε (metric, heuristic)"
        clients = {"status": "none", "mechanism": "none", "claims": [], "clients": sound | {"mechanism": "gaussian"}}
        assert claimed(clients).endswith("(gaussian, sound)")
        of_size = [SOUND | {"unit": "example", "epsilon": 2.0}, SOUND | {"epsilon": 900.0}]
        dp_sgd = {"status": "sound", "mechanism": "dp-sgd", "by-examples": [{"examples": 16, "claims": of_size}]}
        assert claimed(clients | {"clients": dp_sgd}).startswith("ε = 2 at δ = 1e-05 for one example")


def test_importing_audits_imports_nothing_heavy():
    names = [name for _, name, _ in pkgutil.iter_modules(audits.__path__)]
    modules = [f"cloister.audits.{name}" for name in names if "keras" not in name and "torch" not in name]
    assert len(modules) > 7
    script = (
        f"import sys, {', '.join(modules)};"
        "print([name for name in ('tensorflow', 'keras', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_audit_has_the_name_it_is_known_by():
    assert [AUDITS.load(name).name for name in AUDITS.names()] == AUDITS.names()


@pytest.mark.usefixtures("repeated_entropy")
class TestCanaries:
    """A run with canaries is audited by them; any other is not."""

    SETTINGS: ClassVar = {
        "privacy.server": "global-dp",
        "privacy.canaries": 200,
        "privacy.clipping-norm": 1.0,
        "num-rounds": 1,
    }

    @pytest.mark.parametrize("noise", [1.0, 0.0])
    def test_of_a_run(self, run_of, noise):
        run = run_of(**self.SETTINGS | {"privacy.noise-multiplier": noise})
        told = invoke("audit", run, "--only", "canaries")
        (finding,) = json.loads((run / "audit.json").read_text())["findings"]
        assert [item["quantity"] for item in finding["measured"]] == ["epsilon", "epsilon"]
        assert all(item["met"] for item in finding["controls"]) and len(finding["controls"]) == 4
        largest = max(item["value"] for item in finding["measured"])
        claims = [claim["epsilon"] for claim in json.loads((run / "privacy.json").read_text())["claims"]]
        # A bound at 95 % contradicts a claim that is true in one run of twenty.
        assert told.exit_code == (1 if claims and largest > max(claims) else 0), told.output
        # Without noise the canaries still blur each other: 200 directions in 650 dimensions.
        assert largest < 8 if noise else largest > 5
        assert ("nothing is claimed" in finding["meaning"]) == (noise == 0.0)

    def test_a_claim_that_they_contradict_is_false(self, run_of):
        run = run_of(**self.SETTINGS | {"privacy.noise-multiplier": 0.05})
        privacy = json.loads((run / "privacy.json").read_text())
        privacy["claims"] = [claim | {"epsilon": 1.0} for claim in privacy["claims"]]
        (run / "privacy.json").write_text(json.dumps(privacy))
        told = invoke("audit", run, "--only", "canaries")
        assert told.exit_code == 1 and "the claim is contradicted, 95 % sure" in told.output

    def test_another_run_is_skipped(self, copied):
        told = invoke("audit", copied, "--only", "canaries")
        assert "not run: canaries: it had no canaries (privacy.canaries)" in told.output
