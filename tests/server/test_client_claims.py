"""What `privacy.json` says of the clients never says more than their own books."""

import json

import pytest
from rich.console import Console

from cloister.local.simulation import simulate
from cloister.server import loop
from cloister.server.console import Narrator

SETTINGS = {
    "task.model": "softmax",
    "client.local-epochs": 1,
    "client.batch-size": 32,
    "client.learning-rate": 0.1,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "num-rounds": 1,
    "tensorboard": False,
}


def clients_of(tmp_path, **changes):
    keys = SETTINGS | {"output-dir": str(tmp_path)}
    keys |= {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return simulate(keys, 4, Narrator(1, Console(quiet=True))).privacy["clients"]


def test_noise_alone_is_claimed_for_clients_of_several_sizes(tmp_path):
    facts = clients_of(tmp_path)
    assert facts["status"] == "sound"
    spent = {size["examples"]: size["claims"][0]["epsilon"] for size in facts["by-examples"]}
    assert list(spent) == [32, 33, 320, 3200]
    assert max(spent.values()) == spent[33]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluation__federated": "on"}, "scores of models"),
        ({"privacy__server": "laplace-clustering", "privacy__clusters": 2}, "chooses among hypotheses"),
    ],
)
def test_what_leaves_beside_the_noise_takes_the_claim_away(tmp_path, changes, reason):
    facts = clients_of(tmp_path, **changes)
    assert facts["status"] == "heuristic" and any(reason in each for each in facts["reasons"])
    assert not any(size["claims"] for size in facts["by-examples"])


def test_scores_of_those_who_never_train_do_not(tmp_path):
    assert clients_of(tmp_path, evaluation__held_out_clients=0.25)["status"] == "sound"


def test_scores_take_it_away_under_laplace_too(tmp_path):
    laplace = {"privacy__client": "laplace", "privacy__radius": 1.0}
    assert clients_of(tmp_path, **laplace)["claims"]
    assert not clients_of(tmp_path, evaluation__federated="on", **laplace)["claims"]


def test_a_round_whose_replies_came_counts_though_nothing_was_made_of_it(tmp_path):
    class Broken(loop.RoundLoop):
        def _replies(self, number, messages):
            replies = super()._replies(number, messages)
            if number == 2:
                raise KeyboardInterrupt
            return replies

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("cloister.server.run.RoundLoop", Broken)
        clients_of(tmp_path, num_rounds=3)
    (path,) = tmp_path.glob("*/privacy.json")
    facts = json.loads(path.read_text())
    assert facts["rounds"] == 1 and facts["clients"]["by-examples"][0]["rounds"] == 2


def test_raw_models_are_named_where_hypotheses_are_trained_without_noise(tmp_path):
    keys = {"privacy__server": "laplace-clustering", "privacy__client": "none"}
    outcome = SETTINGS | {"output-dir": str(tmp_path)}
    outcome |= {key.replace("__", "."): value for key, value in keys.items()}
    facts = simulate(outcome, 4, Narrator(1, Console(quiet=True))).privacy
    assert "every client's model, to the server" in facts["unprotected"]
