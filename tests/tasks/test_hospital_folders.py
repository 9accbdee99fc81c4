"""Folders of images as hospitals have them: nested, without suffixes, with a table of labels, and by patient."""

import sys

import cv2
import numpy as np
import pytest
from hospital import RAMP, SIDE, dicom, scans, written
from mri import put
from pydicom import DataElement
from support import failures

from cloister import predict
from cloister.client.data import split
from cloister.simulation.checking import check_task
from cloister.tasks.columns import LONGEST
from cloister.tasks.datasets.alzheimer_mri import CLASSES
from cloister.tasks.pictures.task import PictureTask
from cloister.utils.errors import DataError


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("CLOISTER_CACHE", str(tmp_path / "caches"))


def of(patient, shade=0):
    return written(dicom((RAMP // 16 + shade).astype(np.uint8), 8, PatientID=patient))


def png(image=RAMP):
    return cv2.imencode(".png", image)[1].tobytes()


@pytest.fixture
def archive(tmp_path):
    """A medium as an archive of pictures writes it: three patients, of whom A has two images."""
    root = tmp_path / "medium"
    for name, patient in (("PA0/ST0/SE0/IM0", "A"), ("PA0/ST0/SE1/IM0", "A"), ("PA1/ST0/SE0/1.2.840.3", "B")):
        put(root / name, of(patient))
    put(root / "PA2" / "IM0.dcm", of("C"))
    put(root / "DICOMDIR", of("nobody"))
    put(root / "README", b"how to open this medium")
    return root


def table(root, text, name="labels.csv"):
    put(root / name, text.encode())
    return root


def test_class_folders_may_hold_files_of_any_depth_without_a_suffix(archive, tmp_path):
    for name, patients in (("healthy", ("PA0", "PA2")), ("ill", ("PA1",))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for patient in patients:
            (archive / patient).rename(tmp_path / "images" / name / patient)
    put(tmp_path / "images" / "ill" / "DICOMDIR", of("nobody"))
    examples = scans().read(tmp_path / "images")
    assert examples.y.tolist() == [0, 0, 0, 1] and examples.x.shape == (4, SIDE, SIDE, 1) and examples.groups is None
    assert scans({"group": "PatientID"}).read(tmp_path / "images").groups.tolist() == ["A", "A", "C", "B"]


TABLES = {
    "commas": "file,label\nPA0/ST0/SE0/IM0,ill\nPA2/IM0.dcm,healthy\n",
    "semicolons and a mark": "\ufefffile;age;label\nPA0/ST0/SE0/IM0;61;ill\nPA2/IM0.dcm;70;Healthy\n",
    "tabs and numbers": "label\tfile\n1\tPA0\\ST0\\SE0\\IM0\n0\tPA2/IM0.dcm\n",
    "quotes": '"file","label"\n"PA0/ST0/SE0/IM0","ill"\r\n"PA2/IM0.dcm","healthy"\r\n',
}


def test_a_table_labels_files_by_name(archive, caplog):
    def check(name):
        root = table(archive, TABLES[name])
        for place in (root, root / "labels.csv"):
            examples = scans().read(place)
            assert examples.y.tolist() == [1, 0] and len(examples.x) == 2

    assert not failures(TABLES, check)
    assert "3 files or links left out" in caplog.text and "PA1/ST0/SE0/1.2.840.3" in caplog.text


def test_a_table_of_labels_has_the_dialects_of_other_tables(tmp_path):
    put(tmp_path / "mü0.png", png())
    text = "file|label\nmü0.png|ill\n"

    def check(content):
        put(tmp_path / "labels.csv", content)
        assert scans(bits=12).read(tmp_path).y.tolist() == [1]

    dialects = [text.encode(), text.encode("cp1252"), text.replace("|", ";").encode("cp1252")]
    assert not failures([*dialects, text.replace("\n", "||\n").encode()], check)


def test_a_table_labels_the_files_of_patients(archive):
    root = table(archive, "PatientID,label\nC,healthy\nA,ill\nB,healthy\n")
    examples = scans({"group": "PatientID"}).read(root)
    assert examples.y.tolist() == [1, 1, 0, 0] and examples.groups.tolist() == ["A", "A", "B", "C"]


def test_groups_are_a_column_of_the_table_or_the_patients_of_dicom(archive):
    text = "file,label,person\nPA0/ST0/SE0/IM0,ill,x\nPA2/IM0.dcm,healthy,y\n"
    assert scans({"group": "person"}).read(table(archive, text)).groups.tolist() == ["x", "y"]
    assert scans({"group": "PatientID"}).read(archive).groups.tolist() == ["A", "C"]
    assert scans().read(archive).groups is None
    data = scans({"group": "person", "data_path": str(archive)})
    table(archive, text + "".join(f"PA{n}/ST0/SE0/IM0,ill,{n}\n" for n in [0] * 4) + "PA2/IM0.dcm,healthy,z\n" * 4)
    assert set(data.load().groups["person"]) <= {"x", "y", "z", "0"}


def test_all_images_of_a_patient_are_in_one_part_of_a_simulation(tmp_path):
    patients = [f"P{number}" for number in range(12)]
    for place, patient in enumerate(2 * patients):
        put(tmp_path / "medium" / f"IM{place}", of(patient, place))
    labels = "".join(f"{patient},{('healthy', 'ill')[place % 2]}\n" for place, patient in enumerate(patients))
    table(tmp_path / "medium", "PatientID,label\n" + labels)
    data = scans({"group": "PatientID", "data_path": str(tmp_path / "medium")}).load()
    trained = np.unique(data.groups["PatientID"])
    assert len(data.test) == 2 * (12 - len(trained)) > 0


def test_all_images_of_a_patient_are_on_one_side_of_a_split(archive):
    root = table(archive, "PatientID,label\nC,healthy\nA,ill\nB,healthy\n")
    examples = scans({"group": "PatientID"}).read(root)
    for key in range(20):
        train, test = split(examples, 0.5, bytes([key]))
        assert not set(examples.groups[train]) & set(examples.groups[test])


REFUSED = {
    "an unknown column": (
        {"group": "ward"},
        "file,label\nPA2/IM0.dcm,ill\n",
        "none of .*: file, label, PatientID",
    ),
    "another column by patient": (
        {"group": "ward"},
        "PatientID,label,ward\nA,ill,1\n",
        "none of .*: PatientID",
    ),
    "no label": ({}, "file,outcome\nPA2/IM0.dcm,ill\n", "columns file or PatientID, and label; found file, outcome"),
    "two columns": ({}, "file,label,label\nPA2/IM0.dcm,ill,ill\n", "has the column label 2 times"),
    "no table": ({"group": "ward"}, "", "needs an .npz file with that array, or labels.csv with that column"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tables_without_what_the_run_needs_are_refused(archive, name):
    config, text, expected = REFUSED[name]
    with pytest.raises(DataError, match=expected):
        scans(config).read(table(archive, text) if text else archive)


FAULTS = {
    "PA2/IM0.dcm,unknown,p": "has a label that is no class: healthy, ill",
    "PA2/IM0.dcm,,p": "has a label that is no class",
    "PA9/IM0,ill,p": "is absent, unreadable or empty",
    "../medium/PA2/IM0.dcm,ill,p": "is absent, unreadable or empty",
    "/etc/passwd,ill,p": "is absent, unreadable or empty",
    "README,ill,p": "is damaged, too large, or of another kind",
    "PA2/IM0.dcm,ill,": "has no cell of 1 to 200 characters in the column person",
    f"PA2/IM0.dcm,ill,{201 * 'p'}": "has no cell of 1 to 200 characters in the column person",
    "PA2/IM0.dcm": "is a row with another number of cells than the header",
}


def test_a_faulty_row_is_named_and_changes_no_other(archive):
    good = ["PA0/ST0/SE0/IM0,ill,x", "PA1/ST0/SE0/1.2.840.3,healthy,y"]
    task, head = scans({"group": "person"}), "file,label,person\n"
    whole = task.read(table(archive, head + "\n".join(good)))

    def check(fault):
        root = table(archive, head + "\n".join([good[0], fault, good[1]]))
        with pytest.raises(DataError, match="1 of 3 images cannot be used: ") as refused:
            task.read(root)
        assert FAULTS[fault] in str(refused.value) and "row 2 of the table" in refused.value.first
        assert "IM0" not in str(refused.value)
        found = task.rows(root)
        kept = task.usable(found) & (found.groups != "")
        assert kept.tolist() == [True, False, True]
        assert np.array_equal(found.take(np.flatnonzero(kept)).x, whole.x)
        lenient = scans({"group": "person", "skip_damaged": True}).read(root)
        assert lenient.y.tolist() == [1, 0] and lenient.groups.tolist() == ["x", "y"]

    assert not failures(FAULTS, check)


def test_a_patient_of_several_labels_or_none_changes_no_other(archive):
    rows = {"A": "ill", "B": "healthy", "C": "healthy"}
    task = scans({"group": "PatientID"})
    for patient, more in (("A", "A,healthy\n"), ("B", "B,unknown\n"), ("C", "")):
        own = [f"{name},{label}\n" for name, label in rows.items() if more or name != patient]
        found = task.rows(table(archive, "PatientID,label\n" + "".join(own) + more))
        assert (found.groups[task.usable(found)] == [name for name in "AABC" if name != patient]).all()
        with pytest.raises(DataError, match="cannot be used: is of a PatientID with"):
            task.read(archive)


def test_a_picture_without_a_patient_is_named(tmp_path, caplog):
    """So is one whose patient has an endless name: all names take the room of the longest."""

    def long(patient):
        data = dicom((RAMP // 16).astype(np.uint8), 8)
        data.add(DataElement("PatientID", "UT", patient))  # a type without a limit
        return written(data)

    for name, content in (
        ("x.png", png(np.zeros((4, 4), np.uint8))),
        ("y", long("A" * LONGEST)),
        ("z", of("")),
        ("w", long("A" * 60_000)),
        ("v.png", b""),
    ):
        put(tmp_path / "ill" / name, content)
    with pytest.raises(DataError, match=r"4 of 5 images cannot be used: ") as refused:
        scans({"group": "PatientID"}).read(tmp_path)
    for expected in (
        "has no PatientID, as only DICOM files have: ill/x.png",
        "has no PatientID of 1 to 200 characters: ill/w, ill/z",
        "MiB: ill/v.png",
    ):
        assert expected in caplog.text and "ill/" not in str(refused.value)
    task = scans({"group": "PatientID"})
    found = task.rows(tmp_path)
    assert found.groups[task.usable(found) & (found.groups != "")].tolist() == ["A" * LONGEST]


def test_the_owner_is_told_what_was_found(tmp_path):
    put(tmp_path / "ill" / "a.png", png())
    put(tmp_path / "ill" / "b", of("A"))
    put(tmp_path / "healthy" / "c.png", png(np.zeros((6, 5, 3), np.uint8)))
    put(tmp_path / "healthy" / "d.png", b"")
    task = scans({"skip_damaged": True}, bits=12)
    task.read(tmp_path)
    left, ok, warned = task.described()
    assert left[0] == "warn" and "1 image left out: is absent" in left[1]
    assert ok == (
        "ok",
        f"{tmp_path}: 3 of 4 images can be used: PNG (2), DICOM (1); 8 bits (2), 12 bits (1); "
        "grey (2), colour (1); one page (3); 4 to 6 rows, 4 to 5 columns",
    )
    assert warned[0] == "warn" and "2 scales" in warned[1]
    (tmp_path / "ill" / "a.png").unlink()
    (tmp_path / "healthy" / "c.png").unlink()
    task.read(tmp_path)
    assert [kind for kind, _ in task.described()] == ["warn", "ok"]
    put(tmp_path / "ill" / "b", written(dicom(WindowCenter=5, WindowWidth=9)))
    task.read(tmp_path)
    assert [kind for kind, _ in task.described()] == ["warn", "ok", "note"]


def test_sixteen_bits_without_a_statement_are_no_example_and_the_check_says_why(tmp_path):
    put(tmp_path / "ill" / "a.png", png())
    put(tmp_path / "healthy" / "b.png", png())
    with pytest.raises(DataError, match=r"2 of 2 images cannot be used: has 16 bits a sample, .* such as bits = 12"):
        scans().read(tmp_path)
    assert len(np.unique(scans(bits=12).read(tmp_path).x)) == 16


def test_volumes_and_colours_are_inputs_of_their_own_shape(tmp_path):
    for name in ("ill", "healthy"):
        put(tmp_path / name / "a", written(dicom(np.stack([RAMP.astype(np.uint8)] * 5), 8)))
    for attributes, shape in (
        ({"slices": 3}, (3, SIDE, SIDE, 1)),
        ({"slices": 1}, (SIDE, SIDE, 1)),
        ({"slices": 3, "channels": 3}, (3, SIDE, SIDE, 3)),
    ):
        task = scans(**attributes)
        assert task.input_shape == shape and task.read(tmp_path).x.shape == (2, *shape)
        assert (task.image_shape is None) == (shape != (SIDE, SIDE, 1))
        assert predict.read(task, tmp_path).x.shape == (2, *shape)


def test_a_cache_of_before_an_extra_was_installed_is_not_used_after_it(tmp_path, monkeypatch):
    for name in ("ill", "healthy"):
        put(tmp_path / name / "a", of("A"))
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "pydicom", None)
        with pytest.raises(
            DataError, match=r"is a DICOM file, which needs pydicom: pip install 'cloister-fl\[dicom\]' \(2 images\)"
        ):
            scans().read(tmp_path)
    assert len(scans().read(tmp_path)) == 2


def test_files_to_predict_need_no_suffix_and_are_named_where_they_are_unusable(archive):
    assert len(predict.read(scans(), archive).x) == 4
    put(archive / "PA3" / "IM0", written(dicom()))
    found = predict.read(scans(), archive)
    (why,) = filter(None, found.reasons)
    assert len(found.x) == 4 and found.names[found.reasons.index(why)] == "PA3/IM0"
    assert why.startswith("is a DICOM file of 12 bits without a window")


def test_other_tasks_of_pictures_state_nothing():
    assert (PictureTask.channels, PictureTask.bits, PictureTask.window, PictureTask.slices) == (1, None, None, None)


def test_the_check_states_what_was_found_or_what_is_missing(tmp_path):
    given = {"task.image-size": 18, "task.model": "softmax"}
    for number in range(10):
        for label in CLASSES:
            put(tmp_path / label / str(number), of(f"{number}", shade=number))
    lines = [str(line) for line in check_task("alzheimer-mri", tmp_path, given)]
    scale = "40 of 40 images can be used: DICOM (40); 8 bits (40); grey (40); one page (40); 4 rows, 4 columns"
    assert f"ok     {tmp_path}: {scale}" in lines and lines[-1].startswith("ok     one round of 2 clients")
    for path in [path for label in CLASSES for path in (tmp_path / label).iterdir()]:
        path.write_bytes(png())
        path.rename(path.with_suffix(".png"))
    (fault, *_) = [str(line) for line in check_task("alzheimer-mri", tmp_path, given)]
    assert fault.startswith("fault  read(): data-path: ") and "bits = 12" in fault and "(40 images)" in fault
