"""Output of a run for a person: its settings, the worth of its claim, the scores of the kept model, and curves."""

import io
import json

import pytest
from claimed import HELD
from rich.console import Console
from support import failures
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cloister.config.privacy import PrivacyConfig
from cloister.config.run import changed, parse
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.render import strength
from cloister.server.reports.console import ConsoleReporter, JsonReporter, contract_of_clients
from cloister.simulation.simulate import simulate

SOUND = {"task.model": "softmax", "privacy.server": "global-dp", "privacy.noise-multiplier": 2.0, "num-rounds": 2}


def told(tmp_path, settings, kind=ConsoleReporter):
    said = io.StringIO()
    narrator = kind(2, Console(file=said, width=10**6, soft_wrap=True, markup=False, highlight=False))
    outcome = simulate(settings | {"output-dir": str(tmp_path)}, 4, narrator)
    return outcome, said.getvalue()


def test_settings_that_are_not_at_their_defaults_are_said_before_the_first_round(tmp_path):
    _, said = told(tmp_path, SOUND | {"tensorboard": False, "strategy.name": "fedprox", "strategy.proximal-mu": 0.25})
    line = next(line for line in said.splitlines() if line.startswith("settings"))
    assert "privacy.server='global-dp'" in line and "strategy.proximal-mu=0.25" in line
    assert "privacy.clipping-norm" not in line and said.index("settings") < said.index("round ")
    assert changed(parse({}).flat()) == {} and changed(parse({"num-rounds": 10, "seed": 4}).flat()) == {"seed": 4}


def test_a_log_for_machines_has_them_too(tmp_path):
    _, said = told(tmp_path, SOUND | {"tensorboard": False}, JsonReporter)
    start, *lines, end = (json.loads(line) for line in said.splitlines())
    assert start["event"] == "start" and start["settings"]["privacy.noise-multiplier"] == 2.0
    assert start["epsilon"] == pytest.approx(end["privacy"]["claims"][0]["epsilon"], rel=0.05)
    assert end["ended"] == "as-asked" and end["kept"] == 2
    (kept,) = (line["scores"] for line in lines if line["event"] == "round" and line["round"] == 2)
    assert end["scores"] == kept and 0 <= kept["accuracy"] <= 1


@pytest.mark.parametrize("kind", [ConsoleReporter, JsonReporter])
def test_a_seed_of_the_noise_is_told_to_nobody(tmp_path, kind):
    seeded = {"tensorboard": False, "report": False, "num-rounds": 1, "privacy.noise-seed": 7_654_321}
    outcome, said = told(tmp_path, SOUND | seeded, kind)
    assert "seeded" in said and "7654321" not in said
    assert "7654321" in (outcome.directory.path / "config.json").read_text(), "a run must be repeatable"


@pytest.mark.parametrize(("multiplier", "weak"), [(2.0, False), (0.1, True)])
def test_a_sound_claim_that_is_worth_nothing_says_so_at_the_start_and_at_the_end(tmp_path, multiplier, weak):
    _, said = told(tmp_path, SOUND | {"tensorboard": False, "privacy.noise-multiplier": multiplier})
    opening, closing = said.split("Result")
    assert ("sound, weak" in opening) is weak, "one process: its premises are known"
    assert ("sound, weak" in closing) is weak
    assert "ε at most" in opening


def test_a_sound_claim_has_a_tier_where_its_epsilon_is_known():
    def check(epsilon, told):
        assert strength(Claim("global-dp", premises=HELD), epsilon) == told

    assert failures([(None, "sound"), (0.5, "sound, strong"), (10.5, "sound, weak")], check) == []


def test_early_stopping_shows_the_scores_of_the_model_it_keeps(tmp_path, monkeypatch):
    losses = iter([0.9, 0.5, 0.1, 0.7, 0.8, 0.6])

    class Scores:
        examples = majority = None

        def __call__(self, arrays):
            return {"loss": next(losses)}

    monkeypatch.setattr("cloister.server.run.CentralEvaluation", lambda *_: Scores())
    settings = SOUND | {"tensorboard": False, "num-rounds": 5, "evaluation.patience": 2}
    outcome, said = told(tmp_path, settings)
    table = said.split("Result")[1]
    assert outcome.ended == "as-asked" and "round 2" in outcome.stopped
    assert "0.1000" in table and "0.8000" not in table and "the model kept is that of round" in table


@pytest.mark.parametrize(
    ("settings", "shown", "hidden"),
    [
        (SOUND, {"privacy/epsilon", "privacy/clipping-norm", "replies/rejected"}, {"privacy/clipped-fraction"}),
        (
            {"task.model": "softmax", "num-rounds": 2},  # metric with an exact distance: heuristic
            {"privacy/clipped-fraction", "privacy/clipping-norm", "replies/rejected"},
            {"privacy/epsilon"},
        ),
        (
            SOUND | {"strategy.sampling": "poisson", "strategy.fraction-train": 0.5},
            {"privacy/epsilon", "privacy/clipping-norm"},
            {"privacy/clipped-fraction", "replies/rejected"},
        ),
    ],
    ids=["sound", "heuristic", "secret"],
)
def test_curves_show_what_may_be_shown(tmp_path, settings, shown, hidden):
    outcome, _ = told(tmp_path, settings)
    events = EventAccumulator(str(outcome.directory.path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert shown <= tags and not hidden & tags
    assert [point.step for point in events.Scalars("privacy/clipping-norm")] == [1, 2]


def test_the_contract_of_every_mechanism_on_clients():
    def check(client, says):
        bound = {} if client == "laplace" else {f"{client}_clipping_norm": 0.5}
        assert contract_of_clients(PrivacyConfig(server="none", client=client, **bound)) == says

    cases = [
        ("dp-sgd", "dp-sgd (dp-sgd-noise-multiplier 1, dp-sgd-clipping-norm 0.5, poisson batches)"),
        ("gaussian", "gaussian (gaussian-noise-multiplier 1, gaussian-clipping-norm 0.5)"),
        ("laplace", "laplace (laplace-noise-multiplier 1, radius of the update)"),
    ]
    assert failures(cases, check) == []
