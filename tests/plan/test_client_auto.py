"""Noise of the clients that is calibrated to their budget: what a plan says is what a run does."""

import json

import pytest
from flwr.app import Context, RecordDict
from planned import TINY, run

from cloister.client.app import app as client
from cloister.config.run import parse
from cloister.estimate.preview import Options, preview
from cloister.server.app import main
from cloister.simulation.grid import LocalGrid
from cloister.utils.crash import Crash

OWN = TINY | {"privacy.server": "none", "privacy.client-max-epsilon": 6.0, "num-rounds": 3}
NOISE = {name: f"privacy.{name}-noise-multiplier" for name in ("dp-sgd", "gaussian")}
DEALT = {"dp-sgd": {"task.partition": "dirichlet", "task.alpha": 2.0, "client.batch-size": 64}, "gaussian": {}}


@pytest.mark.parametrize("name", NOISE)
def test_all_clients_train_in_all_rounds_of_a_run_and_stay_within(tmp_path, name):
    settings = OWN | DEALT[name] | {"privacy.client": name, NOISE[name]: "auto", "output-dir": str(tmp_path)}
    expected = preview(settings, Options(4, timing=False)).config.flat()[NOISE[name]]
    outcome = run(settings)
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [4, 4, 4]
    recorded = json.loads((outcome.directory.path / "config.json").read_text())["config"]
    assert recorded[NOISE[name]] == expected == outcome.plan.config.privacy.client.noise_multiplier
    claim = json.loads((outcome.directory.path / "privacy.json").read_text())["clients"]
    assert claim["parameters"][NOISE[name]] == expected
    for figures in [size["claims"] for size in claim.get("by-examples", [claim])]:
        assert min(figure["epsilon"] for figure in figures) <= 6.0, "that of the relation that the budget has"


def test_a_drawn_seed_is_the_one_whose_sizes_count(tmp_path):
    settings = OWN | DEALT["dp-sgd"] | {"privacy.client": "dp-sgd", NOISE["dp-sgd"]: "auto", "seed": -1}
    outcome = run(settings | {"output-dir": str(tmp_path), "task.alpha": 0.3})
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [4, 4, 4]
    assert outcome.plan.config.seed == outcome.plan.seed


def test_a_plan_for_sites_prints_a_number_that_lets_them_train_in_all_rounds():
    settings = OWN | {"privacy.client": "dp-sgd", NOISE["dp-sgd"]: "auto", "client.batch-size": 64}
    found = preview(settings, Options(4, sizes=(300,), timing=False))
    number = found.config.privacy.client.noise_multiplier
    assert [each.rounds for each in found.allowances] == [3]
    less = preview(settings | {NOISE["dp-sgd"]: 0.95 * number}, Options(4, sizes=(300,), timing=False))
    assert [each.rounds for each in less.allowances] == [2]


def started_by_flower(settings, tmp_path):
    """Run the ServerApp as Flower does: server and nodes receive the settings as they were written."""
    flat = parse(settings | {"output-dir": str(tmp_path), "run-name": "r"}).flat()
    main(LocalGrid.simulated(client, flat, 4), Context(1, 0, {}, RecordDict(), flat))


def test_server_and_nodes_calibrate_noise_on_the_update_alike(tmp_path):
    started_by_flower(OWN | {"privacy.client": "gaussian", NOISE["gaussian"]: "auto"}, tmp_path)
    recorded = json.loads((tmp_path / "r" / "config.json").read_text())["config"][NOISE["gaussian"]]
    claim = json.loads((tmp_path / "r" / "privacy.json").read_text())["clients"]
    assert claim["status"] == "sound" and "not-covered" not in claim, "all nodes state the releases that it is about"
    assert claim["parameters"][NOISE["gaussian"]] == recorded > 0


def test_a_server_without_its_clients_data_refuses_noise_that_depends_on_it(tmp_path):
    with pytest.raises(Crash, match=r"'auto' needs the number of examples of each client, .* `cloister run` alone"):
        started_by_flower(OWN | {"privacy.client": "dp-sgd", NOISE["dp-sgd"]: "auto"}, tmp_path)
    assert not list(tmp_path.iterdir())
