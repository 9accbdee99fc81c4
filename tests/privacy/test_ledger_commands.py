"""Output about a ledger, its budgets and a plan for one."""

import time

import pytest
from forged_ledgers import EVENTS, chained, lines_of, rewrite, write
from typer.testing import CliRunner

from cloister.cli import app
from cloister.privacy.accounting import ledger as module
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.filters import GaussianFilter, filter_for
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.claims.premises import UNCHOSEN
from cloister.utils.errors import LedgerError
from cloister.utils.text import at_most


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget" / "ledger.jsonl"


class TestTheCommand:
    def invoke(self, *arguments):
        return CliRunner().invoke(app, ["ledger", *map(str, arguments)], env={"COLUMNS": "200"})

    def test_verify_names_the_head(self, path):
        head = write(path).head
        result = self.invoke("verify", path)
        assert result.exit_code == 0 and f"unbroken; 4 releases; last hash {head}" in result.output

    def test_verify_says_what_it_cannot_see(self, path):
        write(path)
        assert "cannot show whether lines were cut off at its end" in self.invoke("verify", path).output

    @pytest.mark.parametrize("left", [0, 1, 3, 7])
    def test_a_cut_is_seen_by_who_has_noted_the_last_hash(self, path, left):
        head = write(path).head
        kept = b"".join(path.read_bytes().splitlines(keepends=True)[:left])
        path.write_bytes(kept)
        told = self.invoke("verify", path).output
        assert ("unbroken" if left else "there is no whole line") in told, "without the hash it cannot be seen"
        result = self.invoke("verify", path, "--head", head)
        assert result.exit_code == 1 and f"LedgerError: {path}: no line has the hash {head}" in result.output

    def test_a_ledger_that_has_grown_since_is_whole(self, path):
        for head in (Ledger(path).head, write(path, EVENTS[:1]).head, write(path, EVENTS[1:2]).head):
            write(path, EVENTS[2:3])
            with path.open("ab") as file:
                file.write(b'{"a crash tore this":{}}')
            result = self.invoke("verify", path, "--head", head)
            assert result.exit_code == 0 and "was there when --head was noted has been cut off" in result.output
            assert "leave no trace" not in result.output

    @pytest.mark.parametrize("head", ["3f", "x" * 64])
    def test_a_head_that_is_no_hash_is_refused(self, path, head):
        write(path)
        result = self.invoke("verify", path, "--head", head)
        assert result.exit_code == 1 and "ConfigError: --head" in result.output

    def test_show_lists_the_releases_and_what_they_amount_to(self, path):
        write(path, EVENTS[:1] * 3, finish=False)
        result = self.invoke("show", path, "--delta", "1e-6")
        account = Ledger(path).account("client")
        assert result.exit_code == 0 and result.output.count("gaussian, z = 1.5") == 3
        units = [line.split()[2] for line in result.output.splitlines() if "gaussian, z = 1.5" in line]
        assert units == ["client"] * 3
        assert any(line.split()[:3] == ["opened", "round", "unit"] for line in result.output.splitlines())
        assert sum(line.rstrip().endswith(" unknown: counts") for line in result.output.splitlines()) == 3
        for name in ("rdp", "pld"):
            assert f"ε = {at_most(account.epsilon(1e-6, name))} by {name}" in result.output

    def test_show_has_both_relations(self, path):
        write(path, EVENTS[:1])
        adding, replacing = (self.invoke("show", path, "--relation", name) for name in ("add-or-remove", "replace-one"))
        assert adding.exit_code == replacing.exit_code == 0
        halved = Ledger(path).account("client", "replace-one").epsilon(1e-5, "pld")
        assert f"ε = {at_most(halved)} by pld" in replacing.output and adding.output != replacing.output

    def test_show_counts_no_draw_that_the_clients_together_know(self, path):
        write(path, [Gaussian(4.0, Sampling("without-replacement", cohort=1, population=1000))])
        shown = self.invoke("show", path, "--relation", "replace-one").output
        assert f"ε = {at_most(module.Account([Gaussian(2.0)]).epsilon(1e-5, 'pld'))} by pld" in shown

    def test_show_says_where_nothing_can_be_claimed(self, path):
        write(path)
        result = self.invoke("show", path)
        assert "no guarantee (1), unit client, 1 release: the noise is seeded" in result.output
        table = result.output.partition("no guarantee (1), ")[0]
        assert table.count("no guarantee (1)") == 1 and "seeded" not in table
        assert "client, add-or-remove: no ε bounds these releases" in result.output
        assert "inf" not in result.output and UNCHOSEN.sentence not in result.output
        assert "poisson 0.1" in result.output and "3 of 9" in result.output

    def test_show_begins_with_what_has_a_bound(self, path):
        """A site with DP-SGD protects its examples, and no client as a whole."""
        write(path, [Unaccounted("the server claims nothing for this round")])
        budget = PrivacyBudget(Ledger(path), "run", "example")
        with budget.release(Gaussian(2.0), 1):
            pass
        lines = self.invoke("show", path).output.splitlines()
        assert [line.split(",")[0] for line in lines if ", add-or-remove" in line] == ["example", "client"]

    def test_show_gives_every_reason_in_full_however_narrow_the_window(self, path):
        reason = "the server claims nothing for this round, " + "and says so at some length, " * 6 + "to the end"
        ledger = write(path, [Unaccounted(reason)] * 3)
        ledger.open(Unaccounted("scores left without noise"), "example", "run", 1, allow=lambda: None)
        result = CliRunner().invoke(app, ["ledger", "show", str(path)], env={"COLUMNS": "40"})
        assert f"no guarantee (1), unit client, 3 releases: {reason}\n" in result.output
        assert "no guarantee (2), unit example, 1 release: scores left without noise\n" in result.output

    def test_show_has_whole_days_and_runs_and_short_reasons_in_80_columns(self, path):
        """A site's ledger: a run of Flower's is 20 digits, and what the policy says of the server is long."""
        ledger, run = Ledger(path), "12105499748529253695"
        reason = "the policy of this node counts on no noise of the server's"
        allowed = {"allow": lambda: None}
        ledger.open(Unaccounted(reason), "client", run, 1, mechanism="as the server promised", **allowed)
        sampled = Repeated(Gaussian(1.0, Sampling("poisson", 0.0256)), 40)
        ledger.open(sampled, "example", run, 1, mechanism="dp-sgd", **allowed)
        shown = CliRunner().invoke(app, ["ledger", "show", str(path)], env={"COLUMNS": "80"}).output
        table, _, rest = shown.partition("no guarantee (1), ")
        assert table.count(time.strftime("%Y-%m-%d", time.gmtime())) == table.count(run) == 2
        assert "…" not in table and "counts on" not in table and reason in rest
        assert "handed on" in table and table.count("unknown: counts") == 2

    def test_show_tells_days_and_no_times(self, path, monkeypatch):
        monkeypatch.setattr(module.time, "time", lambda: 1_700_000_000.5)  # 2023-11-14, 22:13:20 UTC
        write(path, EVENTS[:1])
        PrivacyBudget(Ledger(path), "", max_epsilon=3.5).begin("run")
        assert {line["time"] for line in lines_of(path)} == {1_699_920_000.0}
        shown = self.invoke("show", path).output
        assert shown.count("2023-11-14") == 2 and "22:13" not in shown and "00:00" not in shown

    def test_show_knows_every_unit_and_how_much_of_its_budget_is_spent(self, path):
        for unit, events in (("client", [Gaussian(4.0)]), ("example", [Gaussian(2.0)]), ("group", [Pure(0.5)])):
            budget = PrivacyBudget(Ledger(path), "", unit, max_epsilon=5.0)
            budget.begin("run")
            for event in events:
                with budget.release(event, 1):
                    pass
        shown = self.invoke("show", path).output
        assert "pure, ε = 0.5" in shown
        for unit in ("client", "example", "group"):
            share = 100 * PrivacyBudget(Ledger(path), "", unit, max_epsilon=5.0).share()
            assert f"{unit}, add-or-remove, δ = 1e-05: ε = " in shown
            budget = f"{unit}, add-or-remove: ε ≤ 5 at δ = 1e-05, also if later runs were chosen by what earlier ones"
            assert f"{budget} released; {at_most(share, 3)} %" in shown
        assert shown.count("it holds if no run was chosen, ended early or resumed by what had been released") == 3
        assert shown.count("kept by Rényi DP of order") == 2 and "kept by Gaussian DP" in shown

    def test_show_does_not_claim_a_budget_that_was_passed_before_it_was_set(self, path):
        write(path, [Gaussian(0.5)])
        PrivacyBudget(Ledger(path), "", max_epsilon=1.0).begin("run")
        shown = self.invoke("show", path).output
        assert "more is spent than the budget of ε = 1" in shown and "ε ≤ 1" not in shown

    def test_show_leaves_brackets_alone(self, path):
        write(path, [Unaccounted("[/bold] and [red]")])
        assert "[/bold] and [red]" in self.invoke("show", path).output

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["verify", "absent.jsonl"], "LedgerError: no ledger at absent.jsonl"),
            (["show", "absent.jsonl"], "LedgerError: no ledger at absent.jsonl"),
            (["show", "{}", "--relation", "swap"], "ConfigError: relation must be one of"),
            (["show", "{}", "--delta", "1"], "ConfigError: delta must be above 0 and below 1, got 1"),
        ],
    )
    def test_an_error_is_one_line(self, path, arguments, says):
        write(path, EVENTS[:1])
        result = self.invoke(*(argument.format(path) for argument in arguments))
        assert result.exit_code == 1 and says in result.output and "Traceback" not in result.output


class TestBudgets:
    def test_one_line_for_each_change(self, path):
        for run, epsilon in (("first", 8.0), ("second", 8.0), ("third", 9.0)):
            PrivacyBudget(Ledger(path), "", max_epsilon=epsilon).begin(run)
        assert [(budget.run, budget.epsilon) for budget in Ledger(path).budgets] == [("first", 8.0), ("third", 9.0)]

    def test_taking_it_away_is_a_change_too(self, path):
        for epsilon in (0.0, 1.0, 0.0):
            PrivacyBudget(Ledger(path), "", max_epsilon=epsilon).begin("run")
        assert [budget.epsilon for budget in Ledger(path).budgets] == [1.0, 0.0]

    def test_it_is_in_the_chain(self, path):
        PrivacyBudget(Ledger(path), "", max_epsilon=1.0).begin("run")
        (line,) = lines_of(path)
        rewrite(path, [line | {"epsilon": 100.0}])
        with pytest.raises(LedgerError, match="the line was changed"):
            Ledger(path)

    def test_each_unit_has_its_own(self, path):
        PrivacyBudget(Ledger(path), "", "client", max_epsilon=1.0).begin("run")
        PrivacyBudget(Ledger(path), "", "example", max_epsilon=2.0).begin("run")
        assert [(budget.unit, budget.epsilon) for budget in Ledger(path).budgets] == [("client", 1.0), ("example", 2.0)]

    def test_another_delta_is_another_budget(self, path):
        for delta in (1e-5, 1e-5, 1e-6):
            PrivacyBudget(Ledger(path), "", delta=delta, max_epsilon=1.0).begin("run")
        assert [(budget.epsilon, budget.delta) for budget in Ledger(path).budgets] == [(1.0, 1e-5), (1.0, 1e-6)]

    def test_that_of_another_unit_in_between_is_none_of_its_own(self, path):
        """Neither a line for what did not change, nor none for what did."""
        for unit, epsilon in (("client", 1.0), ("example", 2.0), ("client", 1.0), ("client", 2.0), ("example", 2.0)):
            PrivacyBudget(Ledger(path), "", unit, max_epsilon=epsilon).begin("run")
        found = [(budget.unit, budget.epsilon) for budget in Ledger(path).budgets]
        assert found == [("client", 1.0), ("example", 2.0), ("client", 2.0)]

    @pytest.mark.parametrize(
        ("unit", "kind", "expected"),
        [
            ("client", None, GaussianFilter()),
            ("client", "renyi", filter_for("renyi", 8.0, 1e-5)),
            ("example", None, filter_for("renyi", 8.0, 1e-5)),
            ("group", None, filter_for("renyi", 8.0, 1e-5)),
            ("example", "gaussian", GaussianFilter()),
        ],
    )
    def test_the_first_one_names_the_filter(self, path, unit, kind, expected):
        budget = PrivacyBudget(Ledger(path), "", unit, max_epsilon=8.0, kind=kind)
        assert budget.filter == expected, "a run is calibrated before its budget is entered"
        budget.begin("run")
        assert lines_of(path)[0]["filter"]["kind"] == ("gaussian" if expected == GaussianFilter() else "renyi")
        (budget,) = Ledger(path).budgets
        assert budget.filter == expected == Ledger(path).filter_of(unit)

    def test_later_ones_keep_the_filter_of_the_first(self, path):
        """An order picked anew would be picked after seeing what was released."""
        for epsilon, kind in ((8.0, "renyi"), (1.0, "renyi"), (0.0, None), (20.0, "gaussian")):
            PrivacyBudget(Ledger(path), "", max_epsilon=epsilon, kind=kind).begin("run")
        first = filter_for("renyi", 8.0, 1e-5)
        assert [budget.filter for budget in Ledger(path).budgets] == [first] * 4
        assert filter_for("renyi", 1.0, 1e-5) != first
        raised = PrivacyBudget(Ledger(path), "", max_epsilon=20.0, kind="gaussian")
        assert raised.filter == first and raised.limit == first.limit(20.0, 1e-5) > first.limit(8.0, 1e-5)

    def test_a_forged_change_of_the_filter_is_refused(self, path):
        for epsilon in (8.0, 9.0):
            PrivacyBudget(Ledger(path), "", "example", max_epsilon=epsilon).begin("run")
        first, second = lines_of(path)
        rewrite(path, chained([first, second | {"filter": {"kind": "renyi", "order": 2.0}}]))
        with pytest.raises(LedgerError, match="line 2: the filter of unit 'example' is another than that of its first"):
            Ledger(path)
        rewrite(path, chained([first | {"filter": {"kind": "pld"}}]))
        with pytest.raises(LedgerError, match="line 1: unknown kind of filter 'pld'; known: gaussian, renyi"):
            Ledger(path)

    def test_whether_it_was_set_beforehand_is_known(self, path):
        """A budget that answers what was released is a weaker promise."""
        PrivacyBudget(Ledger(path), "", max_epsilon=1.0).begin("run")
        PrivacyBudget(Ledger(path), "", max_epsilon=2.0).begin("run")
        write(path, [Gaussian(9.0)])
        PrivacyBudget(Ledger(path), "", "example", max_epsilon=2.0).begin("run")
        assert Ledger(path).was_set_beforehand("client") and Ledger(path).was_set_beforehand("example")
        assert not Ledger(path).was_set_beforehand("group")
        PrivacyBudget(Ledger(path), "", max_epsilon=3.0).begin("run")
        assert not Ledger(path).was_set_beforehand("client") and Ledger(path).was_set_beforehand("example")

    def test_it_is_shown(self, path):
        PrivacyBudget(Ledger(path), "", max_epsilon=3.5).begin("run")
        shown = CliRunner().invoke(app, ["ledger", "show", str(path)]).output
        assert "ε = 3.5 at δ = 1e-05" in shown
        PrivacyBudget(Ledger(path), "", max_epsilon=0.0).begin("run")
        assert "run run, unit client: none, kept by" in CliRunner().invoke(app, ["ledger", "show", str(path)]).output

    def test_releases_go_on_around_it(self, path):
        write(path, EVENTS[:1])
        PrivacyBudget(Ledger(path), "", max_epsilon=50.0).begin("run")
        write(path, EVENTS[1:2])
        assert [entry.event for entry in Ledger(path).entries] == EVENTS[:2]
