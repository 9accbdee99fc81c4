"""The first files of a new user: no patient, no target, codes of one column, two sites, and files that are left out."""

import csv
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hospital import RAMP, SIDE, dicom, scans, written
from mri import put
from rich.console import Console
from support import every, failures
from test_hospital_tables import CLASSES, COLUMNS, GROUP, ROWS, Wards, joined

from cloister import predict
from cloister.client.app import _examples as training_examples
from cloister.client.data import benchmark_of, task_of, tell_ungrouped
from cloister.client.node import node_of
from cloister.config.run import TaskConfig, parse
from cloister.estimate.preview import Options, preview
from cloister.server.reports.console import ConsoleReporter
from cloister.simulation.checking import check_task
from cloister.simulation.simulate import simulate
from cloister.tasks import TASKS
from cloister.tasks.base import Dataset, Examples, Recipe
from cloister.tasks.columns import MISSING, Category, Date, Hashed, Number
from cloister.tasks.datasets.patients import BreastCancer, HeartDisease
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.partition import deal
from cloister.tasks.pictures.task import PictureTask
from cloister.tasks.splits import dataset_at
from cloister.tasks.tables import Table
from cloister.utils.errors import DataError
from cloister.utils.text import spanned

HEADER = ["Patient ID", *COLUMNS, "state"]


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOISTER_CACHE", str(tmp_path / "caches"))


def png(image=RAMP // 16):
    return cv2.imencode(".png", image.astype(np.uint8) if image.max() < 256 else image)[1].tobytes()


def table(folder, rows, name="own.csv", header=HEADER):
    put(folder / name, joined([header, *rows]).encode())
    return folder / name


def test_the_check_counts_rows_without_a_patient(tmp_path, monkeypatch):
    monkeypatch.setattr(TASKS, "load", lambda name: Wards)
    nobody = [["  ", *row[1:]] for row in ROWS[:2]]
    path, given = table(tmp_path, [*ROWS, *nobody]), {"task.group": GROUP}
    parts = table(tmp_path / "parts", ROWS, "train.csv"), table(tmp_path / "parts", [*ROWS, *nobody], "test.csv")
    for own, at in ((path, ""), (None, path), (None, parts[0].parent)):
        settings = given | ({"task.data-path": str(at)} if at else {})
        with closing(check_task("wards", own, settings)) as lines:
            found = next(line.text for line in lines if line.kind == "warn")
        assert "2 where Patient ID is empty" in found


def test_the_check_tells_that_dicom_files_have_patients(tmp_path):
    for number, patient in enumerate("AAB"):
        put(tmp_path / "ill" / str(number), written(dicom((RAMP // 16).astype(np.uint8), 8, PatientID=patient)))
    put(tmp_path / "healthy" / "a.png", png())
    says = f"{tmp_path}: 3 files have a PatientID of 2 patients; task.group = 'PatientID' protects patients"
    task = scans()
    task.read(tmp_path)
    assert ("note", says) in list(task.described())
    task = scans({"group": "PatientID", "skip_damaged": True})
    task.read(tmp_path)
    assert any("1 image left out: has no PatientID" in text for _, text in task.described())
    assert not any("protects patients" in text for _, text in task.described())


def repeated_patients(folder):
    for number in range(40):
        own = dicom((RAMP // 16 + number).astype(np.uint8), 8, PatientID=f"p{number % 10}")
        put(folder / ("ill", "healthy")[number % 2] / str(number), written(own))
    return "40 files have a PatientID of 10 patients; task.group = 'PatientID' protects patients"


class Nets(PictureTask):
    recipe, classes, class_names, usual_size = Recipe(1, 8, 0.1), 2, ("healthy", "ill"), SIDE
    models = ("softmax",)

    def build(self):
        return SoftmaxRegression(SIDE * SIDE, 2)


def test_a_simulation_under_dp_sgd_tells_once_of_repeated_patients(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TASKS, "load", lambda name: Nets)

    def told(settings, use):
        caplog.clear()
        for cached in (task_of, benchmark_of, tell_ungrouped):
            cached.cache_clear()
        use(settings)
        return sum(message.endswith(says) for message in caplog.messages)

    def trained(settings):
        simulate(settings, 2, ConsoleReporter(1, Console(quiet=True)))

    def planned(settings):
        preview(settings, Options(clients=2, timing=False))

    says = repeated_patients(tmp_path / "scans")
    plain = {"task.name": "nets", "task.data-path": str(tmp_path / "scans"), "num-rounds": 1, "tensorboard": False}
    plain |= {"output-dir": str(tmp_path / "runs"), "privacy.server": "none", "seed": 1}
    private = plain | {"privacy.client": "dp-sgd"}
    assert [told(private, use) for use in (trained, planned)] == [1, 1]
    assert not told(plain, trained) and not told(private | {"task.group": "PatientID"}, trained)


def test_a_node_keeps_the_note_on_repeated_patients_to_its_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TASKS, "load", lambda name: Nets)
    says = repeated_patients(tmp_path / "own")
    for cached in (task_of, tell_ungrouped):
        cached.cache_clear()
    config = parse({"task.name": "nets", "privacy.client": "dp-sgd", "privacy.server": "none"}).for_clients
    node = SimpleNamespace(config=node_of({"data-path": str(tmp_path / "own")}), policy=None)
    for _ in range(2):
        assert len(training_examples(SimpleNamespace(config=config, seed=0), node)) == 40
    assert [message.endswith(says) for message in caplog.messages].count(True) == 1


def test_images_of_a_new_package_that_do_not_fit_are_to_be_replaced(tmp_path):
    for name in ("ring", "square"):
        put(tmp_path / "test" / name / "a.png", png())
    put(tmp_path / "beside" / "other" / "a.png", png())
    put(tmp_path / "beside" / "ill" / "a.png", png())
    remedy = "replace the images there, if they are made up, or set task.data-path"
    for place in (tmp_path, tmp_path / "beside"):
        with pytest.raises(DataError, match=f"^task.data-path: .*{place}.*; {remedy}"):
            scans().load_from(place)
    with pytest.raises(DataError) as refused:
        scans({"data_path": str(tmp_path)}).load()
    assert remedy not in str(refused.value)


def test_sites_below_a_table_of_all_images_are_told_of(tmp_path, caplog):
    root = tmp_path / "scans"
    lines = ["file,label"]
    for number in range(20):
        place = f"{('north', 'south')[number % 2]}/{('ill', 'healthy')[number // 2 % 2]}/{number}.png"
        put(root / place, png())
        lines.append(f"{place},{('ill', 'healthy')[number // 2 % 2]}")
    put(root / "labels.csv", "\n".join(lines).encode())
    scans({"data_path": str(root)}).load()
    assert f"{root}: 2 folders of images; task.partition = 'natural' makes each a site" in caplog.messages
    caplog.clear()
    assert scans({"data_path": str(root), "partition": "natural"}).load().owners.max() == 1
    scans({"data_path": str(root), "partition": "iid"}).load()
    scans({"data_path": str(root / "north")}).load()
    assert "a site" not in caplog.text


def test_auto_deals_sites_where_examples_have_owners():
    part = Examples(np.zeros((12, 2), np.float32), np.arange(12) % 2)
    owned, config = Dataset(part, part, owners=np.arange(12) // 4), TaskConfig(name="digits")
    assert [part.tolist() for part in deal(config, "iid", owned, 3, 2, 0)] == np.arange(12).reshape(3, 4).tolist()
    by_class = deal(config, "shards", owned, 3, 2, 0)
    assert any(set(part) != set(range(start, start + 4)) for part, start in zip(by_class, (0, 4, 8)))
    assert len(deal(config, "iid", replace(owned, owners=None), 4, 2, 0)) == 4
    of_two = config.model_copy(update={"examples_per_client": 2})
    assert [len(part) for part in deal(of_two, "iid", owned, 5, 2, 0)] == [2] * 5


def test_one_number_is_said_where_both_are_equal(tmp_path):
    for number in range(2):
        put(tmp_path / "ill" / f"{number}.png", png())
    task = scans()
    task.read(tmp_path)
    (_, ok), *_ = task.described()
    assert ok.endswith("; 4 rows, 4 columns") and spanned(4, 6) == "4 to 6"


def test_folders_of_pictures_are_sites(tmp_path):
    for site in ("north", "south", "west"):
        for number in range(10):
            put(tmp_path / "sites" / site / ("ill", "healthy")[number % 2] / f"{number}.png", png())
    config = {"data_path": str(tmp_path / "sites")}
    with pytest.raises(DataError, match=r"all hold images; .* a simulation: task.partition = 'natural'"):
        scans(config).load()
    task = scans(config | {"partition": "natural"})
    data = task.load()
    assert np.bincount(data.owners).tolist() == [8] * 3 and len(data.test) == 6
    assert [len(part) for part in deal(task.config, task.partition, data, 3, 2, 0)] == [8] * 3
    with pytest.raises(DataError, match=r"no images at .*healthy; .* takes each part of .*north as a site"):
        scans({"data_path": str(tmp_path / "sites" / "north"), "partition": "natural"}).load()


def test_arrays_in_a_folder_are_sites_and_two_parts_are_none(tmp_path):
    task = BreastCancer(TaskConfig(name="breast-cancer", partition="natural", group="who"))
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((20, 30)), y=np.arange(20) % 2, who=np.arange(20) // 2)
    data = dataset_at(task, tmp_path, ".npz")
    assert np.bincount(data.owners).tolist() == [16, 16] and len(data.groups["who"]) == 32
    (tmp_path / "a.npz").rename(tmp_path / "train.npz")
    (tmp_path / "b.npz").rename(tmp_path / "test.npz")
    assert dataset_at(task, tmp_path, ".npz").owners is None


def test_rows_without_a_target_are_predicted_and_every_row_has_a_line(tmp_path):
    task, bad = Wards(TaskConfig(name="wards")), ["c", "tall", "male", "w", "", "1"]
    rows = [ROWS[0], [*ROWS[1][:-1], ""], bad, ["d", "180"], ROWS[2]]
    bare = table(tmp_path, [row[:-1] for row in rows], "bare.csv", HEADER[:-1])
    for path, labelled in ((table(tmp_path, rows), [True, False, True]), (bare, None)):
        found = predict.read(task, path)
        assert found.reasons == (
            *("", "", "column Größe must hold numbers only", "has another number of cells than there are columns", ""),
        )
        assert len(found.x) == 3 and found.names == tuple("01234")
        assert (found.y is None) == (labelled is None) and (labelled is None or found.labelled.tolist() == labelled)
    outputs, names = np.array([[0.25, 0.75]] * 3), tuple(CLASSES)
    lines = predict.Predictions(found.names, outputs, {}, 0, 1, names, task.targets, found.reasons).lines()
    head, *cells = csv.reader(lines)
    assert head[-1] == "reason" and [row[0] for row in cells] == list("01234") and {len(row) for row in cells} == {7}
    assert [row[1] for row in cells] == ["1", "1", "", "", "1"] and cells[2][-1] == found.reasons[2]


def test_a_row_of_heart_disease_is_predicted_without_its_diagnosis(tmp_path):
    known = "63,1,1,145,233,1,2,150,0,2.3,3,0,3"
    put(tmp_path / "own.data", "\n".join([known, f"x{known}"]).encode())
    found = predict.read(HeartDisease(TaskConfig(name="heart-disease")), tmp_path / "own.data")
    assert found.y is None and found.x.shape == (1, 38)
    assert found.reasons == ("", "column age must hold numbers only")
    put(tmp_path / "own.data", "\n".join([f"{known},?", f"{known},2", f"{known},1,2"]).encode())
    found = predict.read(HeartDisease(TaskConfig(name="heart-disease")), tmp_path / "own.data")
    assert found.labelled.tolist() == [False, True] and found.reasons[2].startswith("has another number of cells")


def test_pictures_to_predict_are_named_and_labelled_by_a_table(tmp_path):
    for name in ("one.png", "below/two.png", "three.png"):
        put(tmp_path / name, png())
    put(tmp_path / "four.png", b"")
    put(tmp_path / "labels.csv", b"file;label\nbelow/two.png;ill\none.png;\ngone.png;ill\n")
    found = predict.read(scans(), tmp_path)
    assert found.names == ("below/two.png", "one.png", "gone.png", "four.png", "three.png")
    assert [bool(reason) for reason in found.reasons] == [False, False, True, True, False]
    assert found.labelled.tolist() == [True, False, False] and found.y[0] == 1
    put(tmp_path / "labels.csv", b"file\none.png\n")
    assert predict.read(scans(), tmp_path).y is None


CODED = [Number(-10, 10, missing=("-9",)), Category(("1",), ("-9",)), Hashed(8, ("-9",)), Date("%Y", 1, 9, ("-9",))]


@every(CODED)
def test_a_code_of_a_missing_value_is_one_of_its_column_alone(kind):
    for cell in ("-9", "-9.0"):
        (inputs,), (reason,) = kind.features([cell], MISSING)
        assert inputs[-1] == 1 and not reason
    other = Table({"a": kind, "b": Number(-10, 10)}, "c", 2, CLASSES)
    assert other.width == kind.width + 2
    assert Number(-10, 10).features(["-9"], MISSING)[0].tolist() == [[0.05, 0]]


def test_texts_of_missing_values_count_in_any_case(tmp_path):
    own = Table({"a": Number(0, 9), "w": Hashed(4)}, "c", 2, CLASSES, missing=(*MISSING, "Pending"))
    path = table(tmp_path, [["PENDING", "pending", "1"]], header=["a", "w", "c"])
    assert own.read(path).x[0, [1, -1]].tolist() == [1, 1]


def test_the_reason_of_many_pictures_is_said_once(tmp_path, caplog):
    for number in range(40):
        put(tmp_path / "ill" / f"{number:02}.png", png(RAMP))
    with pytest.raises(DataError, match=r"40 of 40 images cannot be used: .* bits = 12") as refused:
        scans().read(tmp_path)
    assert not [line for line in caplog.messages if "cannot be used" in line]
    scans().rows(tmp_path)
    for text in (caplog.messages[-1], f"{refused.value}; {refused.value.first}"):
        assert text.count("16 bits") == 1 and len(text.replace(str(tmp_path), "")) < 3 * 120
    assert caplog.messages[-1].endswith("and 30 more") and "skip-damaged" not in str(refused.value)


def test_files_that_are_left_out_are_counted_by_every_way_of_reading(tmp_path, caplog):
    root = tmp_path / "images"
    for name in ("ill/a.png", "healthy/b.png", "ill/c.webp", "other/d.png", "notes.txt", ".hidden/e.png"):
        put(root / name, png())

    def check(text, count, read):
        (root / "labels.csv").unlink(missing_ok=True)
        if text:
            put(root / "labels.csv", text)
        caplog.clear()
        read(scans(), root)
        assert f"{count} files or links left out" in caplog.text

    def rows(task, path):
        assert task.rows(path).x.shape[1:] == (SIDE, SIDE, 1)

    def read(task, path):
        task.read(path)

    names = b"file,label\nill/a.png,ill\n"
    assert not failures([(None, 3, rows), (names, 4, rows), (names, 4, read)], check)
