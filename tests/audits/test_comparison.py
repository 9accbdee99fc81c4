"""The comparison of all mechanisms, at a tiny scale."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "comparison.py"
FEW = ("none", "global DP, fixed clip")


@pytest.fixture
def comparison(monkeypatch):
    """The script."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("comparison", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attack(name, auc, borne_out=True, unit="client"):
    return {"attack": name, "unit": unit, "auc": auc, "interval": [auc - 0.1, auc + 0.1], "borne-out": borne_out}


def seeds(*attacks):
    return [{"attacks": list(each)} for each in attacks]


class TestStrongest:
    def test_it_is_the_attack_with_the_largest_mean_over_seeds(self, comparison):
        runs = seeds([attack("a", 0.9), attack("b", 0.7)], [attack("a", 0.5), attack("b", 0.8)])
        assert comparison.strongest(runs, "client") == pytest.approx(("b", 0.75, 0.65, 0.85))

    def test_what_controls_do_not_bear_out_counts_for_nothing(self, comparison):
        runs = seeds([attack("a", 0.9, borne_out=False), attack("b", 0.6)], [attack("a", 0.7), attack("b", 0.6)])
        assert comparison.strongest(runs, "client").auc == pytest.approx(0.7)

    def test_an_attack_that_its_controls_bear_out_in_few_seeds_counts_for_nothing(self, comparison):
        runs = seeds([attack("a", 0.9)], [attack("a", 0.9, borne_out=False)], [attack("a", 0.9, borne_out=False)])
        assert comparison.strongest(runs, "client") is None

    def test_it_is_about_the_unit_that_is_asked_for(self, comparison):
        runs = seeds([attack("a", 0.9), attack("b", 0.6, unit="example")])
        assert comparison.strongest(runs, "example").attack == "b"


def test_every_cell_is_a_configuration(comparison):
    from cloister.config.run import parse

    for name, mechanism in comparison.MECHANISMS.items():
        for strength in mechanism.strengths:
            flat = parse(comparison.Cell("digits", name, strength, 0).settings()).flat()
            assert not mechanism.key or flat[mechanism.key] == strength


@pytest.mark.slow
def test_cells_are_run_once_and_shown(comparison, few_resamples, tmp_path, capsys):
    comparison.CLIENTS = 3
    comparison.TASKS = {"digits": comparison.Benchmark({"task.name": "digits", "client.local-epochs": 1}, 4, 6.0)}
    comparison.COMMON = {**comparison.COMMON, "num-rounds": 1}
    comparison.MECHANISMS = {name: comparison.MECHANISMS[name]._replace(strengths=(1.0,)) for name in FEW}
    options = ["run", "--results", str(tmp_path), "--seeds", "1", "--mechanisms"]
    place = tmp_path / "comparison" / "digits.jsonl"
    comparison.main([*options, "none"])
    first = comparison.results(place)
    comparison.main([*options, *FEW])
    assert capsys.readouterr().out.count("1 cells to go") == 2
    done = comparison.results(place)
    assert len(done) == 2 and first.items() < done.items()
    open_run, private = comparison.points(place)
    assert open_run.epsilon is None and private.epsilon > 0 and private.unit == "client"
    for result in done.values():
        assert len(result["attacks"]) == 8 and {item["unit"] for item in result["attacks"]} == set(comparison.UNITS)
        assert all(item["interval"][0] <= item["auc"] <= item["interval"][1] for item in result["attacks"])
    text = place.with_name("table.md").read_text()
    assert f"| {open_run.mean:.3f} | – |" in text and f"| {private.epsilon:.3g}, one client |" in text
    assert place.with_name("figure.png").stat().st_size > 10_000
