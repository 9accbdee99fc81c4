"""`cloister plan --suggest`: settings within the budget, from public numbers alone."""

import json

import pytest
from typer.testing import CliRunner

from cloister import cli
from cloister.config.io import as_pairs, read_settings
from cloister.config.run import parse
from cloister.estimate.suggest import CLIP, STEPS, Pace, measured, suggest
from cloister.privacy.accounting.account import Account
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.tasks.datasets.characters import Digits
from cloister.utils.errors import ConfigError

DIGITS = {"task.name": "digits", "task.model": "softmax"}
PACE = Pace(seconds=1e-4, parameters=39_700, has_momentum=True)


def made(units=60_000, epsilon=1.0, minutes=10.0, clients=1, pace=PACE):
    return suggest(DIGITS, units, epsilon, minutes, clients, pace)


def epsilon_of(found, units):
    """ε of one example, by the accounting of claims."""
    config = parse({**DIGITS, **found.settings})
    steps = LocalSteps(units, config.client.batch_size, config.client.local_epochs)
    account = Account().plus(steps.event(config.privacy.client.noise_multiplier), config.num_rounds)
    return account.epsilon(config.privacy.target_delta)


@pytest.mark.parametrize(("units", "epsilon", "clients"), [(60_000, 1.0, 1), (2_000, 4.0, 3), (300, 0.5, 10)])
def test_the_settings_cost_at_most_the_budget(units, epsilon, clients):
    found = made(units, epsilon, clients=clients)
    assert 0.5 * epsilon < epsilon_of(found, units) <= epsilon


def test_more_time_gives_more_examples_in_all_steps():
    found = [made(minutes=minutes) for minutes in (0.2, 1, 3, 10)]
    work = [each.steps * each.batch for each in found]
    assert work == sorted(work) and len(set(work)) == len(work)
    assert found[-1].batch > found[0].batch


def test_the_settings_fit_the_time():
    for units, minutes in ((60_000, 0.2), (60_000, 3), (60_000, 30), (2_000, 0.02)):
        found = made(units, minutes=minutes)
        assert found.steps * found.batch * PACE.seconds <= 60 * minutes * 1.02  # the last batch of an epoch is whole


def test_with_time_enough_there_are_enough_steps():
    assert abs(made(minutes=60).steps / STEPS - 1) < 0.1


def test_with_endless_time_the_batch_stops_where_noise_does():
    assert made(2_000, minutes=1e6).batch < 2_000


def test_a_tiny_site_is_warned_that_nothing_is_learnt():
    assert any("nothing is likely learnt" in note for note in made(50, epsilon=0.5).notes)
    assert not any("likely learnt" in note for note in made().notes)


def test_a_large_delta_is_named():
    assert any("δ = 1e-05 is large for 60000 examples; use at most 2e-06" in note for note in made().notes)
    assert not any("δ" in note for note in made(2_000).notes)


def test_the_rate_follows_the_batch_and_stands_for_momentum():
    plain = made(pace=Pace(1e-4, 39_700, has_momentum=False))
    batch = plain.settings["client.batch-size"]
    assert plain.settings["client.learning-rate"] == pytest.approx(10 * (batch / 1024) ** 0.5, rel=0.05)
    assert "client.optimizer-options" not in plain.settings
    assert made().settings["client.optimizer-options"] == "momentum=0.9"
    assert made().settings["privacy.dp-sgd-clipping-norm"] == CLIP


def test_the_line_can_be_given_to_a_run():
    found = made(2_000, clients=3)
    line = next(found.lines())
    assert read_settings([line.removeprefix('-c "').removesuffix('"')]) == found.settings
    assert parse({**DIGITS, **found.settings}).privacy.client.noise_multiplier > 0


def test_every_setting_has_a_reason():
    assert set(made().settings) - {"privacy.target-delta"} == set(made().reasons)


def test_too_little_time_for_an_epoch_is_refused():
    with pytest.raises(ConfigError, match=r"--suggest 0\.05 minutes are fewer than one epoch of 60000 takes"):
        made(minutes=0.05)


def test_no_data_is_read(monkeypatch):
    monkeypatch.setattr(Digits, "load", lambda _: pytest.fail("data was read"))
    pace = measured(DIGITS)
    assert pace.parameters == 650 and not pace.has_momentum and pace.seconds > 0


def test_the_command_prints_settings_or_refuses():
    def invoke(*arguments):
        return CliRunner().invoke(cli.app, ["plan", "--suggest", "1", *arguments, "-c", as_pairs(DIGITS)])

    done = invoke("--public-size", "500", "--epsilon", "2", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["settings"]["privacy.client-max-epsilon"] == 2
    refused = invoke("--public-size", "500")
    assert refused.exit_code == 1 and "needs one --public-size and --epsilon" in str(refused.output) + str(
        refused.stderr
    )
