"""A run with canaries: what it leaves behind, what it says, and where it refuses them."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from support import failures

from cloister.audits.canaries import canary_bounds
from cloister.config.run import parse
from cloister.server.build import build
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError

SETTINGS = {
    "task.model": "softmax",
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 0.5,
    "privacy.canaries": 60,
    "num-rounds": 2,
    "tensorboard": False,
    "seed": 1,
}


def go(tmp_path, **more):
    console = Console(file=io.StringIO(), width=200, soft_wrap=True)
    settings = SETTINGS | {"output-dir": str(tmp_path)} | {f"privacy.{key}": value for key, value in more.items()}
    outcome = simulate(settings, 3, ConsoleReporter(2, console))
    return outcome.directory.path, console.file.getvalue()


class TestARun:
    @pytest.fixture(scope="class")
    def left(self, tmp_path_factory):
        return go(tmp_path_factory.mktemp("runs"))

    def test_coins_and_scores_are_written_down(self, left):
        facts = json.loads((left[0] / "canaries.json").read_text())
        assert (facts["canaries"], facts["guesses"], facts["rounds"], facts["parameters"]) == (60, 24, 2, 650)
        assert len(facts["coins"]) == len(facts["scores"]) == 60 and set(facts["coins"]) == {0, 1}
        assert facts["drawn"] == "from the operating system's entropy"

    def test_the_claim_is_that_of_a_run_without_them(self, tmp_path):
        (among, _), (alone, said) = (go(tmp_path / str(canaries), canaries=canaries) for canaries in (60, 0))
        claims = [json.loads((path / "privacy.json").read_text())["claims"] for path in (among, alone)]
        assert claims[0] == claims[1] and claims[0][0]["epsilon"] > 0
        assert not (alone / "canaries.json").exists() and "canaries" not in said

    def test_both_bounds_stand_beside_the_claim(self, left):
        found = canary_bounds(left[0])
        claim = json.loads((left[0] / "privacy.json").read_text())["claims"][0]
        assert (found.claimed, found.delta, found.canaries) == (claim["epsilon"], claim["delta"], 60)
        # Nothing is seeded here: at 95 % confidence one run in twenty would show too much.
        certain = canary_bounds(left[0], confidence=1 - 1e-9)
        assert not certain.contradicted and certain.gaussian < found.gaussian
        for word in ("Claimed: ε = ", "Distribution-free: ", "Under the Gaussian shape: ", "proves nothing"):
            assert any(word in sentence for sentence in certain.words())

    def test_what_they_cost_and_how_to_see_them_is_said(self, left):
        path, said = left
        assert "canaries       60: secret coins let about half of them take part; the mean is over 30 more" in said
        assert f"what the canaries show of ε: cloister audit {path}" in said


def test_a_claim_below_a_bound_is_contradicted(tmp_path):
    path, _ = go(tmp_path)
    found = canary_bounds(path)
    false = replace(found, claimed=found.gaussian / 2, distribution_free=0.0)
    assert false.contradicted == ("Gaussian shape",) and "The claim is contradicted, 95 % sure" in false.words()[-1]


def test_seeded_noise_seeds_them_too_and_says_so(tmp_path):
    one, other = (go(tmp_path / name, **{"noise-seed": 4})[0] for name in "ab")
    facts = [json.loads((path / "canaries.json").read_text()) for path in (one, other)]
    assert facts[0] == facts[1] and facts[0]["drawn"] == "from privacy.noise-seed"
    found = canary_bounds(one)
    assert found.claimed is None and not found.contradicted and "nothing is claimed" in found.words()[0]


def test_a_run_without_them_has_nothing_to_bound(tmp_path):
    with pytest.raises(ConfigError, match=r"no finished run with canaries.*set privacy\.canaries"):
        canary_bounds(go(tmp_path, canaries=0)[0])


def test_a_broken_file_is_no_bound(tmp_path):
    def check(content):
        (tmp_path / "canaries.json").write_text(content)
        (tmp_path / "privacy.json").write_text('{"claims": []}')
        with pytest.raises(ConfigError):
            canary_bounds(tmp_path)

    cases = ["", "{}", '{"coins": [1], "scores": [2, 3], "guesses": 0, "rounds": 1}']
    assert failures(cases, check) == []


def test_they_are_refused_where_they_do_not_fit():
    def check(keys, reason):
        settings = {"task.model": "softmax", "privacy.server": "global-dp", "privacy.noise-multiplier": 0.5}
        if keys.get("privacy.server") in ("none", "laplace-clustering"):
            del settings["privacy.noise-multiplier"]
        with pytest.raises(ConfigError, match=reason):
            build(parse(settings | {"privacy.canaries": 60} | keys))

    cases = [
        ({"privacy.server": "none"}, r"privacy\.canaries = 60 has no effect with privacy\.server = 'none'"),
        ({"privacy.server": "laplace-clustering"}, r"has no effect with privacy\.server = 'laplace-clustering'"),
        ({"privacy.server": "metric"}, "would decide the distance"),
        ({"privacy.placement": "model"}, r"contradicts privacy\.placement = 'model'"),
        ({"privacy.placement": "rule", "strategy.name": "fedmedian"}, r"contradicts privacy\.placement = 'rule'"),
        ({"privacy.clipping": "adaptive"}, r"contradicts privacy\.clipping = 'adaptive'"),
        ({"strategy.sampling": "poisson"}, r"contradicts strategy\.sampling = 'poisson'"),
        ({"privacy.population": 3}, r"contradicts strategy\.sampling = 'poisson' and privacy\.population"),
        ({"privacy.client": "gaussian"}, r"privacy\.canaries = 60 contradicts privacy\.client = 'gaussian'"),
        ({"privacy.client": "dp-sgd"}, r"privacy\.canaries = 60 contradicts privacy\.client = 'dp-sgd'"),
        ({"privacy.canaries": -1}, r"privacy\.canaries = -1 is not valid"),
    ]
    assert failures(cases, check) == []
