"""Files that an earlier version wrote are read, or refused with the remedy, and no budget is reset.

`golden` has them as written at 19635e9, without private keys: three runs of 12 rounds that were killed after round 3, a
a finished run, the ledger that one of them shares, the ledger of a node, and the kits of two sites. FOLDER stands for
the folder on the machine that wrote them.
"""

import json
import shutil
from pathlib import Path

import pytest
from quick_runs import coarse_accounts, quick_runs  # noqa: F401
from typer.testing import CliRunner, Result

from cloister.cli import app
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import Ledger

GOLDEN = Path(__file__).with_name("golden")
SHARED = Path("ledgers/digits-413a363079dd.jsonl")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files to a folder of this machine, and make it the working directory."""
    folder = tmp_path / "written"
    shutil.copytree(GOLDEN, folder)
    for path in (folder / "runs/global/ledger.json", folder / "kits/operator/config.toml"):
        path.write_text(path.read_text().replace("FOLDER", str(folder)))
    monkeypatch.chdir(folder)
    return folder


def told(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def rounds(folder: Path, run: str) -> list[int]:
    lines = (folder / "runs" / run / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["round"] for line in lines]


@pytest.mark.parametrize("path", [SHARED, Path("nodes/digits.jsonl"), Path("runs/secure/ledger.jsonl")], ids=str)
def test_every_line_of_an_older_ledger_is_verified(written, path):
    done = told("ledger", "verify", written / path)
    assert done.exit_code == 0 and "unbroken" in done.stdout, done.output


def test_a_node_keeps_what_its_older_ledger_has_spent(written):
    budget = PrivacyBudget(Ledger(written / "nodes/digits.jsonl"), "run-2", "example", 1e-5, 8.0, kind="renyi")
    assert budget.spent() == pytest.approx(0.65, rel=1e-12)


def test_a_resumed_older_run_adds_to_its_ledger(written):
    before = (written / SHARED).read_text()
    done = told("run", "--resume", written / "runs/global")
    after = (written / SHARED).read_text()
    assert done.exit_code == 0, done.output
    assert after.startswith(before) and after.count('"kind": "open"') == before.count('"kind": "open"') + 10
    assert rounds(written, "global") == [*range(13)]


def test_an_older_run_of_clients_that_add_noise_goes_on(written):
    done = told("run", "--resume", written / "runs/examples")
    assert done.exit_code == 0, done.output
    assert rounds(written, "examples") == [*range(13)]


def test_an_older_secure_run_is_refused_with_the_remedy(written):
    before = (written / "runs/secure/ledger.jsonl").read_bytes()
    done = told("run", "--resume", written / "runs/secure")
    assert done.exit_code == 1
    assert "another version of Cloister or of a plugin wrote it, finish it with that version" in done.output
    assert (written / "runs/secure/ledger.jsonl").read_bytes() == before


def test_the_status_of_an_older_run_is_read(written):
    for run in ("examples", "global", "secure"):
        shutil.rmtree(written / "runs" / run)
    done = told("status", "--runs", written / "runs")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", ["report", "compare"])
def test_claims_without_premises_are_refused_with_the_remedy(written, command):
    before = sorted((written / "runs/finished").rglob("*"))
    done = told(command, written / "runs/finished")
    assert done.exit_code == 1 and "use the version that config.json beside it names" in done.output
    assert sorted((written / "runs/finished").rglob("*")) == before


def test_the_policy_of_an_older_kit_is_read(written):
    done = told("policy", written / "kits/sites/north/policy.toml")
    assert done.exit_code == 0 and "at most ε = 8 at δ = 1e-05" in done.stdout, done.output


def test_no_key_of_older_kits_is_made_anew(written):
    before = {path: path.read_bytes() for path in (written / "kits").rglob("*.pub")}
    done = told("provision", written / "federation.toml", "--output", written / "kits")
    assert done.exit_code == 0, done.output
    assert "server was made before and is not here: it is not made again" in " ".join(done.stdout.split())
    assert {path: path.read_bytes() for path in (written / "kits").rglob("*.pub")} == before
    assert not [*(written / "kits").rglob("*.key")]
