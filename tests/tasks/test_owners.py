"""Tasks whose examples belong to somebody: hospitals and writers; and EMNIST, whose writers are not known."""

import zipfile

import numpy as np
import pytest
from support import failures
from test_tasks import real, task

from cloister.tasks.datasets import characters, regressions
from cloister.tasks.datasets.characters import rotated_writers
from cloister.tasks.partition import deal, numbered
from cloister.utils.errors import ConfigError, DataError

HEADER = (
    "DRG Definition,Provider Id,Provider Name,Provider Street Address,Provider City,Provider State,Provider Zip Code,"
    "Hospital Referral Region Description, Total Discharges , Average Covered Charges , Average Total Payments "
)
"""As published, with the spaces."""


def row(diagnosis, provider, zip_code="02134", payment="6082.42"):
    return f'{diagnosis:03d} - A NAME,{provider},"A, B",1 STREET,TOWN,XX,{zip_code},XX - TOWN,12,20000.5,{payment}'


def charges(folder, rows, header=HEADER, places="zip,lat,lon,src\n02134,42.35,-71.13,x\n501,40.8,-73.0,x\n"):
    with zipfile.ZipFile(folder / regressions.CHARGES, "w") as archive:
        archive.writestr("Medicare_Provider_Charge_Inpatient_DRG100_FY2011.csv", "\r\n".join([header, *rows]) + "\r\n")
    (folder / regressions.PLACES).write_text(places)
    return task("hospital-charges", data_path=str(folder))


def twenty_hospitals():
    """Two services each, and one that the task does not take; no two payments are equal."""
    return [
        row(drg, 10_000 + hospital, payment=str(4000 + 100 * hospital + drg / 10))
        for hospital in range(20)
        for drg in (194, 690, 470)
    ]


# Owners


def test_owners_are_numbered_in_random_order():
    owners = np.repeat([7, 5, 9, 1000], 3)
    numbers = numbered(owners, np.random.default_rng(0))
    assert sorted(numbers[::3]) == [0, 1, 2, 3] and np.array_equal(numbers, np.repeat(numbers[::3], 3))
    assert len({tuple(numbered(owners, np.random.default_rng(seed))) for seed in range(20)}) > 1


# Hospital charges


def test_a_row_becomes_a_service_and_a_place(tmp_path):
    rows = [
        row(drg, number, zip_code) for number, drg in enumerate((194, 292, 392, 690)) for zip_code in ("02134", "501")
    ]
    data = charges(tmp_path, rows).load()
    x = np.concatenate([data.train.x, data.test.x])
    assert x.dtype == np.float32 and sorted(set(x[:, 0])) == [0, 1, 2, 3]
    places = {tuple(place) for place in np.round(x[:, 1:], 4).tolist()}
    assert {(round(a, 3), round(b, 3)) for a, b in places} == {(-7.113, 4.235), (-7.3, 4.08)}
    np.testing.assert_allclose(np.concatenate([data.train.y, data.test.y]), 6.08242, rtol=1e-6)


def test_other_diagnoses_are_left_out(tmp_path):
    data = charges(tmp_path, twenty_hospitals()).load()
    assert len(data.train) + len(data.test) == 40
    assert set(data.train.x[:, 0]) == {0, 3}


def test_hospitals_train_or_test_and_a_hospital_is_a_client(tmp_path):
    charged = charges(tmp_path, twenty_hospitals())
    data = charged.load()
    assert sorted(np.unique(data.owners)) == list(range(14)) and sorted(np.unique(data.test_owners)) == list(range(6))
    parts = deal(charged.config, charged.partition, data, 14, charged.classes, 0)
    assert [len(part) for part in parts] == [2] * 14
    few = deal(charged.config, charged.partition, data, 3, charged.classes, 0)
    assert all(np.array_equal(part, same) for part, same in zip(few, parts[:3], strict=True))
    with pytest.raises(ConfigError, match="has 14 owners for 15 clients"):
        deal(charged.config, charged.partition, data, 15, charged.classes, 0)


def test_wrong_tables_are_refused_without_quoting_them(tmp_path):
    def check(rows, changes, message):
        with pytest.raises(DataError, match=message) as caught:
            charges(tmp_path, rows, **changes).load()
        assert "task.data-path" in str(caught.value) and "secret" not in str(caught.value)

    assert not failures(
        [
            ([row(194, 1)], {"header": HEADER.replace("Provider Id", "Hospital")}, "lacks the columns Provider Id"),
            ([row(470, 1)], {}, "has no row of the diagnoses"),
            ([row(194, 1, "99999")], {}, "lacks the ZIP codes of 1 rows"),
            ([row(194, 1, payment="secret")], {}, "holds what is not of its kind"),
            ([row(194, 1, payment="")], {}, "has rows without an average total payment"),
            ([row(194, 1)], {"places": "zip,lat\n02134,42.35\n"}, "lacks the columns lon"),
            ([row(194, 1)], {"places": "zip,lat,lon\n02134,1,1\n02134,2,2\n"}, "holds what is not of its kind"),
        ],
        check,
    )


def test_files_that_are_no_tables_are_refused(tmp_path):
    charged = charges(tmp_path, twenty_hospitals())
    (tmp_path / regressions.CHARGES).write_bytes(b"PK\x03\x04cut")
    with pytest.raises(DataError, match="is not a CSV file with a header, or a zip"):
        charged.load()
    (tmp_path / regressions.CHARGES).unlink()
    with pytest.raises(DataError, match=f"must be a folder with {regressions.CHARGES}: the inpatient charges"):
        charged.load()


def test_real_charges_have_the_published_counts():
    charged = task("hospital-charges", data_path=real("cms-inpatient"))
    data = charged.load()
    assert len(data.train) + len(data.test) == 11_915
    owners = len(np.unique(data.owners)), len(np.unique(data.test_owners))
    assert sum(owners) == 3151 and owners == (2206, 945)
    counts = np.bincount(np.concatenate([data.owners, data.test_owners + owners[0]]))
    assert (counts == 4).sum() == 2738 and counts.max() == 4
    x = np.concatenate([data.train.x, data.test.x])
    assert set(x[:, 0]) == {0, 1, 2, 3}
    assert -17 < x[:, 1].min() < x[:, 1].max() < -6 and 1.9 < x[:, 2].min() < x[:, 2].max() < 6.5
    assert data.train.y.min() > 3.4 and data.train.y.max() < 23.3
    # The first of them are a sample of the country, not its first state by the alphabet.
    first = data.train.x[data.owners < 300]
    assert abs(first[:, 1].mean() - x[:, 1].mean()) < 0.3


# Writers


@pytest.fixture
def written(tmp_path):
    """30 images of 6 writers to train on and 10 of 2 others to test on, each brighter in its upper half."""
    images = np.zeros((40, 28, 28), np.uint8)
    images[:, :14] = np.arange(40)[:, None, None] + 100
    labels = (np.arange(40) % 10).astype(np.uint8)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "writers").mkdir()
    np.savez(
        tmp_path / "mnist" / characters.IMAGES,
        x_train=images[:30], y_train=labels[:30], x_test=images[30:], y_test=labels[30:],
    )  # fmt: skip
    np.savez(
        tmp_path / "writers" / characters.WRITERS,
        train_writer=np.arange(30, dtype=np.int32) % 6 * 100, test_writer=np.arange(10, dtype=np.int32) % 2 + 5000,
    )  # fmt: skip
    return tmp_path


def test_every_writer_is_a_client(written):
    writers = task("mnist-writers", data_path=str(written))
    data = writers.load()
    assert data.train.x.shape == (30, 28, 28, 1) and data.train.x.dtype == np.float32
    assert np.bincount(data.owners).tolist() == [5] * 6 and np.bincount(data.test_owners).tolist() == [5] * 2
    parts = deal(writers.config, writers.partition, data, 6, 10, 0)
    assert all(len({index % 6 for index in part.tolist()}) == 1 for part in parts)
    with pytest.raises(ConfigError, match="has 6 owners for 7 clients"):
        deal(writers.config, writers.partition, data, 7, 10, 0)


def test_a_writer_is_turned_with_all_images_or_with_none(written):
    def check(fraction):
        data = task("mnist-writers", data_path=str(written), rotated_fraction=fraction).load()
        for examples, owners in ((data.train, np.arange(30) % 6 * 100), (data.test, np.arange(10) % 2 + 5000)):
            upright = examples.x[:, 0, 27, 0] > 0.3
            assert np.array_equal(~upright, np.isin(owners, rotated_writers(owners, fraction)))
            # Counter-clockwise the upper half comes to lie on the left.
            assert (examples.x[~upright][:, :, :14] > 0.3).all() and not examples.x[~upright][:, :, 14:].any()

    assert not failures([0.0, 0.5, 1.0], check)


def test_turning_goes_by_the_writer_alone():
    writers = np.arange(2000)
    turned = rotated_writers(writers, 0.5)
    assert abs(len(turned) - 1000) < 6 * 2000**0.5 / 2
    assert set(turned) == set(rotated_writers(writers[::-1], 0.5)) and set(turned) < set(rotated_writers(writers, 0.7))
    assert set(rotated_writers(writers[:50], 0.5)) == set(turned[turned < 50])


def test_a_task_that_does_not_turn_says_so():
    with pytest.raises(ConfigError, match=r"task.rotated-fraction = 0.5 has no effect with task.name = 'digits'"):
        task("digits", rotated_fraction=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_writer": np.zeros(29, np.int32)}, "must name the writer of each of 30 train images"),
        ({"test_writer": np.zeros(10)}, "must name the writer of each of 10 test images"),
        ({"test_writer": np.full(10, -1)}, "must name the writer of each of 10 test images"),
    ],
)
def test_writers_that_do_not_fit_the_images_are_refused(written, changes, message):
    path = written / "writers" / characters.WRITERS
    np.savez(path, **({**np.load(path)} | changes))
    with pytest.raises(DataError, match=message):
        task("mnist-writers", data_path=str(written)).load()


@pytest.mark.parametrize("changes", [{"x_test": np.zeros((10, 28))}, {"y_train": np.full(30, 10)}, {"y_train": None}])
def test_images_that_are_not_mnist_are_refused(written, changes):
    path = written / "mnist" / characters.IMAGES
    arrays = {**np.load(path)} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(DataError, match=r"task.data-path: .*mnist.npz must "):
        task("mnist-writers", data_path=str(written)).load()


@pytest.mark.parametrize("absent", ["mnist", "writers"])
def test_an_absent_file_is_named(written, absent):
    for path in (written / absent).iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"must be a folder with mnist.npz, .* found no .*npz"):
        task("mnist-writers", data_path=str(written)).load()
    with pytest.raises(DataError, match=r"task\.data-path = '' must be a folder"):
        task("mnist-writers").load()


def test_real_writers_are_those_that_were_published():
    real("mnist-writers"), real("mnist")
    data = task("mnist-writers", data_path=real("."), rotated_fraction=0.5).load()
    assert len(data.train) == 60_000 and len(data.test) == 10_000
    counts = np.bincount(data.owners)
    assert len(counts) == 539 and (counts >= 100).sum() == 440
    assert len(np.unique(data.test_owners)) == 297


# EMNIST


@pytest.fixture
def letters(tmp_path):
    labels = np.repeat(np.arange(62), 5).astype(np.uint8)
    np.savez(tmp_path / "emnist_byclass_test.npz", x=np.full((310, 28, 28), 255, np.uint8), y=labels)
    return tmp_path


def test_emnist_is_split_by_class(letters):
    def check(given):
        data = task("emnist", data_path=str(letters / given)).load()
        assert np.bincount(data.train.y).tolist() == [4] * 62 and np.bincount(data.test.y).tolist() == [1] * 62
        assert data.train.x.shape == (248, 28, 28, 1) and data.train.x.dtype == np.float32 and data.train.x.max() == 1

    assert not failures(["", "emnist_byclass_test.npz"], check)


@pytest.mark.parametrize(
    "changes", [{"y": np.full(310, 62)}, {"x": np.zeros((310, 784), np.uint8)}, {"x": np.zeros((9, 28, 28), np.uint8)}]
)
def test_a_file_that_is_not_emnist_is_refused(letters, changes):
    path = letters / "emnist_byclass_test.npz"
    np.savez(path, **({**np.load(path)} | changes))
    with pytest.raises(DataError, match=r"task.data-path: .* must hold x, images of 28 by 28 bytes"):
        task("emnist", data_path=str(letters)).load()


def test_an_absent_emnist_is_refused(tmp_path):
    for given in ("", str(tmp_path)):
        with pytest.raises(DataError, match=r"must be an .npz file, or a folder with emnist_byclass_test.npz"):
            task("emnist", data_path=given).load()


def test_real_emnist_has_62_classes():
    data = task("emnist", data_path=real("emnist-byclass-test")).load()
    assert len(data.train) + len(data.test) == 116_323 and np.unique(data.test.y).size == 62


# Models


@pytest.mark.parametrize(
    ("name", "model", "outputs", "parameters"),
    [
        ("emnist", "auto", 62, 1_206_590),
        ("mnist-writers", "cnn-62", 62, 1_206_590),
        ("mnist-writers", "auto", 10, 1_199_882),
        ("emnist", "softmax", 62, 48_670),
        ("mnist-writers", "softmax", 10, 7850),
    ],
)
def test_models_have_the_published_size(name, model, outputs, parameters):
    built = task(name, model=model).build()
    assert sum(array.size for array in built.arrays().values()) == parameters
    assert built.predict(np.zeros((2, 28, 28, 1), np.float32)).shape == (2, outputs)
