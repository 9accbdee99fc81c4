"""Federations on brain scans: simulated clients of a published partition, nodes with data of their own, predictions."""

import io

import numpy as np
import pytest
from mri import SIZE, folders, jpeg, parquet, scan
from rich.console import Console

from cloister.client.app import app
from cloister.config.run import parse
from cloister.predict import predict
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate

pytestmark = pytest.mark.slow
SETTINGS = {
    "task.name": "alzheimer-mri",
    "task.image-size": SIZE,
    "client.local-epochs": 3,
    "num-rounds": 1,
    "tensorboard": False,
    "seed": 1,
}


def quiet():
    return ConsoleReporter(1, Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A run of four clients from a model that the server has trained on its half of the test part."""
    root = folders(tmp_path_factory.mktemp("images"), 60)
    settings = {"task.data-path": str(root), "task.partition": "table-3", "strategy.pretrain-epochs": 80}
    places = {"output-dir": str(root.parent / f"runs-{root.name}"), "privacy.server": "none"}
    return simulate(SETTINGS | settings | places, 4, quiet())


def test_a_published_partition_is_learned_from_a_pretrained_model(pretrained):
    first, last = pretrained.rounds
    assert first.central["accuracy"] > 0.6, "the server's 24 images tell the classes"
    assert last.central["accuracy"] > 0.6 and set(last.central) == {"loss", "accuracy", "f1", "precision", "auc"}
    assert last.measured.accepted == 4 and last.federated["accuracy"] > 0.6


def test_a_folder_of_images_is_predicted_and_its_folders_are_labels(pretrained, tmp_path):
    images = folders(tmp_path / "new", 5, ("Mild Demented",))
    found = predict(pretrained.directory.path, images)
    assert found.names[0] == "Mild Demented/scan (0).jpg" and found.metrics["accuracy"] > 0.7
    file = parquet(tmp_path / "new.parquet", [0] * 5, images=[jpeg(scan(0, number)) for number in range(5)])
    np.testing.assert_allclose(predict(pretrained.directory.path, file).outputs, found.outputs, rtol=1e-4)


def test_nodes_with_data_of_their_own_in_both_layouts(tmp_path):
    parquet(tmp_path / "hospital.parquet", [0, 1, 2, 3] * 8)
    folders(tmp_path / "clinic", 8)
    nodes = [
        {"data-path": str(tmp_path / name), "ledger-dir": str(tmp_path / "ledgers" / name)}
        for name in ("hospital.parquet", "clinic")
    ]
    for node in nodes:
        node["public-size"] = 20
    settings = {"privacy.client": "dp-sgd", "privacy.server": "none", "output-dir": str(tmp_path / "runs")}
    config = parse(SETTINGS | settings)
    outcome = run(LocalGrid(app, config.flat(), nodes), config, quiet())
    assert outcome.ended == "as-asked" and outcome.rounds[-1].measured.accepted == 2
