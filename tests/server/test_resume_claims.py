"""Claims of a resumed run: every release counts, for any place of its directory and any process that died."""

import shutil

import numpy as np
import pytest
from resumed import LINEAR, PRIVATE, claims, died, go, numbers, planned_account, resume, state_round, stopped_after
from rich.console import Console

from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.premises import UNBROKEN
from cloister.privacy.claims.render import meanings, render_clients
from cloister.privacy.claims.to_json import statement_of
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate


class TestWithNoise:
    """Every release is in the ledger, the budget is never passed, and claims count everything."""

    BUDGET = PRIVATE | {"privacy.max-epsilon": 5.0, "privacy.noise-multiplier": 1.7}

    def ledger(self, folder):
        (path,) = (folder / "ledgers").iterdir()
        return Ledger(path)

    @pytest.mark.slow
    def test_killed_at_any_instant(self, tmp_path):
        folder, _whole, deaths = died(tmp_path, self.BUDGET)
        instants = list(deaths.different())
        repeated, ends = set(), set()
        for instant in instants[::3]:
            deaths.at(instant)
            if "ended" in claims(folder):
                continue
            before = (
                {entry.release for entry in self.ledger(folder).entries} if (folder / "ledgers").exists() else set()
            )
            resumed = resume(folder)
            ledger = self.ledger(folder)
            assert before <= {entry.release for entry in ledger.entries}, "what was recorded stays spent"
            budget = PrivacyBudget(ledger, "r", max_epsilon=5.0)
            assert budget.share() <= 1
            epsilon, _ = best_epsilon(budget.account_of_run(), 1e-5)
            this, everything = claims(folder)["claims"][0], claims(folder)["claims"][1]
            assert this["epsilon"] >= epsilon and everything["epsilon"] == 5.0
            if resumed.plan.resumes:
                said = claims(folder)
                assert said["status"] == "conditional" and "unbroken" in [each["name"] for each in said["premises"]]
            repeated.add(len(ledger.entries) - resumed.rounds[-1].number)
            ends.add(resumed.ended)
        assert repeated == {0, 1} and "as-asked" in ends

    def test_a_round_that_is_made_again_has_noise_of_its_own(self, tmp_path):
        """The release of the last round is recorded, made, and lost; the one in its place is another."""
        folder, _whole, deaths = died(tmp_path, PRIVATE)
        instant = max(instant for instant in deaths.different() if state_round(deaths.store / str(instant)) == 2)
        deaths.at(instant)
        lost = np.load(folder / "r" / "checkpoints" / "round-00003.npz")
        resumed = resume(folder)
        releases = [entry.round for entry in Ledger(folder / "r" / "ledger.jsonl").entries if entry.round]
        assert sorted(releases) == [1, 2, 3, 3]
        assert all((lost[name] != array).all() for name, array in numbers(resumed).items())

    @pytest.mark.slow
    def test_a_budget_that_a_lost_release_has_used_up_ends_the_run_in_order(self, tmp_path):
        settings = PRIVATE | {"privacy.max-epsilon": 5.0, "privacy.noise-multiplier": "auto"}
        folder, whole, deaths = died(tmp_path, settings)
        deaths.at(max(i for i in deaths.different() if state_round(deaths.store / str(i)) == 1))
        resumed = resume(folder)
        assert whole.ended == "as-asked" and resumed.ended == "budget" and resumed.rounds[-1].number == 2
        multipliers = {outcome.plan.strategy.mechanism.multiplier for outcome in (whole, resumed)}
        assert len(multipliers) == 1, "noise is calibrated once"

    def test_an_end_that_somebody_chose_is_claimed_with_every_round_that_may_have_been_released_twice(self, tmp_path):
        shorter = stopped_after(tmp_path, PRIVATE, 1)
        planned = shorter.privacy["claims"][0]
        again = stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
        more = again.privacy["claims"][0]
        assert planned["counts"] == more["counts"]
        assert (shorter.privacy["status"], again.privacy["status"]) == ("sound", "conditional")
        assert more["epsilon"] == pytest.approx(planned_account(again).epsilon(1e-5, "pld"), rel=1e-3)
        assert more["epsilon"] > planned["epsilon"]
        (meaning,) = meanings(statement_of(again.privacy))
        assert meaning.who.startswith(f"If {UNBROKEN.sentence}, the run protects")
        everything = again.privacy["claims"][1]
        assert everything["epsilon"] == pytest.approx(more["epsilon"], rel=1e-9), "its own rounds are counted once"


class TestClaimsOfADirectoryThatWasMoved:
    """The recorded releases of a run do not depend on the place of its directory, or its earlier content."""

    def test_a_new_name_leaves_nothing_out(self, tmp_path):
        go(tmp_path / "whole", PRIVATE)
        stopped_after(tmp_path / "parts", PRIVATE, 2)
        (tmp_path / "parts" / "r").rename(tmp_path / "parts" / "renamed")
        simulate({"resume": str(tmp_path / "parts" / "renamed")}, None, ConsoleReporter(3, Console(quiet=True)))
        (tmp_path / "parts" / "renamed").rename(tmp_path / "parts" / "r")
        assert claims(tmp_path / "parts")["claims"][0]["epsilon"] == claims(tmp_path / "whole")["claims"][0]["epsilon"]
        assert {entry.run for entry in Ledger(tmp_path / "parts" / "r" / "ledger.jsonl").entries} == {"r"}

    def test_a_page_with_an_earlier_claim_does_not_stay(self, tmp_path):
        stopped_after(tmp_path, PRIVATE, 1)
        (tmp_path / "r" / "report.html").write_text("ε of what was released until then")
        resume(tmp_path)
        assert not (tmp_path / "r" / "report.html").exists()

    def test_an_earlier_copy_leaves_nothing_out(self, tmp_path):
        lasting = PRIVATE | {"privacy.data-identity": "d"}
        stopped_after(tmp_path, lasting, 1)
        shutil.copytree(tmp_path / "r", tmp_path / "copy")
        for _ in range(4):
            shutil.rmtree(tmp_path / "r")
            shutil.copytree(tmp_path / "copy", tmp_path / "r")
            outcome = stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
        recorded = PrivacyBudget(Ledger(tmp_path / "ledgers" / "d.jsonl"), "r").account_of_run()
        planned = planned_account(outcome)
        claimed = claims(tmp_path)["claims"][0]["epsilon"]
        assert claimed == best_epsilon(recorded, 1e-5)[0] > best_epsilon(planned, 1e-5)[0]

    def test_an_earlier_copy_leaves_no_round_of_the_clients_noise_out(self, tmp_path):
        noise = {f"privacy.{name}": value for name, value in (("client", "gaussian"), ("data-identity", "d"))}
        noise |= {"privacy.gaussian-noise-multiplier": 50.0, "privacy.gaussian-clipping-norm": 1.0}
        stopped_after(tmp_path, PRIVATE | noise, 1)
        shutil.copytree(tmp_path / "r", tmp_path / "copy")
        for _ in range(4):
            shutil.rmtree(tmp_path / "r")
            shutil.copytree(tmp_path / "copy", tmp_path / "r")
            stopped_after(tmp_path, {"resume": str(tmp_path / "r")}, 1)
        rounds = len(PrivacyBudget(Ledger(tmp_path / "ledgers" / "d.jsonl"), "r").of_run())
        planned = 3 + 1
        assert rounds > planned and f"all {rounds} rounds" in claims(tmp_path)["clients"]["claims"][0]["scope"]

    @pytest.mark.parametrize("client", ["gaussian", "laplace"])
    def test_what_clients_are_told_rests_on_the_same_condition(self, tmp_path, client):
        """The server decides how often it resumes, and clients' claims are about the server."""
        bound = "privacy.gaussian-clipping-norm" if client == "gaussian" else "privacy.radius"
        noise = {"privacy.client": client, f"privacy.{client}-noise-multiplier": 50.0, bound: 1.0}
        stopped_after(tmp_path, LINEAR | noise, 1)
        assert claims(tmp_path)["clients"]["status"] == "sound"
        said = statement_of(resume(tmp_path).privacy)
        assert said.clients.status == "conditional" and said.clients.figures
        assert UNBROKEN.sentence in render_clients(said.clients)[0]
        assert any(f"If {UNBROKEN.sentence}" in meaning.who for meaning in meanings(said))

    def test_releases_of_other_runs_cannot_be_called_its_own(self, tmp_path):
        """A state that names them would have what all runs have released counted without them."""
        ledger = Ledger(tmp_path / "ledger.jsonl")
        other = PrivacyBudget(ledger, "other")
        ids = [other.spend(Gaussian(1.0), number) for number in (1, 2)]
        own = PrivacyBudget(ledger, "own")
        own.load_state_dict({"opened": np.array([list(bytes.fromhex(release)) for release in ids], np.uint8)})
        nothing = Account((), "add-or-remove", insiders=True)
        assert own.account_with(nothing).epsilon(1e-5, "pld") == other.account().epsilon(1e-5, "pld")
