"""Tables as hospitals have them: dialects, kinds of columns, rows of no use, and sites."""

import gzip
import logging

import numpy as np
import pytest
from support import every, failures

from cloister.client.data import _part, benchmark_of, local_data
from cloister.client.node import node_of
from cloister.config.run import TaskConfig
from cloister.tasks.base import Recipe
from cloister.tasks.columns import MISSING, Category, Date, Hashed, Number
from cloister.tasks.numpy_models import SoftmaxRegression
from cloister.tasks.tables import Table, TableRegression, TableTask
from cloister.utils.errors import DataError

COLUMNS = {
    "Größe": Number(100, 220),
    "sex": Category(("female", "male")),
    "ward": Hashed(16),
    "born": Date("%d.%m.%Y", 1920, 2019),
}
CLASSES = {"healthy": ("0",), "ill": ("1", "2")}
TABLE = Table(COLUMNS, "state", 2, CLASSES)
HEADER = ["Patient ID", "Größe", "sex", "ward", "born", "state"]
ROWS = [
    ["a", "180.5", "male", "North, 1", "31.12.2019", "1"],
    ["b", "?", "1.0", "South", "", "0.0"],
    ["a", "160", "FEMALE", "west", "01.01.1920", "2"],
]
GROUP = "Patient ID"
PACKED = b"\x1f\x8b"


class Wards(TableTask):
    """The task of the tests."""

    recipe = Recipe(local_epochs=1, batch_size=4, learning_rate=0.1)
    table = TABLE
    classes = 2
    class_names = tuple(CLASSES)
    input_shape = (TABLE.width,)
    models = ("softmax",)

    def build(self):
        return SoftmaxRegression(TABLE.width, 2)


def joined(rows, separator=","):
    return "\n".join(separator.join(f'"{cell}"' if separator in cell else cell for cell in row) for row in rows)


def written(folder, rows, separator=",", encode=lambda text: text.encode()):
    content = encode(joined([HEADER, *rows], separator))
    path = folder / f"table{len(list(folder.iterdir()))}.csv{'.gz' * content.startswith(PACKED)}"
    path.write_bytes(content)
    return path


def decimal_commas(rows):
    return [[row[0], row[1].replace(".", ","), *row[2:]] for row in rows]


DIALECTS = {
    "tab": ("\t", ROWS, lambda text: text.encode()),
    "bar": ("|", ROWS, lambda text: text.encode()),
    "semicolons and decimal commas": (";", decimal_commas(ROWS), lambda text: text.encode()),
    "tabs and decimal commas": ("\t", decimal_commas(ROWS), lambda text: text.encode()),
    "mark of UTF-8": (",", ROWS, lambda text: text.encode("utf-8-sig")),
    "Windows-1252": (";", ROWS, lambda text: text.encode("cp1252")),
    "gzip": (",", ROWS, lambda text: gzip.compress(text.encode())),
    "lines of Windows, and empty ones": (",", ROWS, lambda text: text.replace("\n", "\r\n\r\n").encode()),
    "separators behind the last column": (";", ROWS, lambda text: text.replace("\n", ";;\n", 2).encode()),
}


def test_every_dialect_gives_the_same_examples(tmp_path):
    plain = TABLE.read(written(tmp_path, ROWS), GROUP)
    assert plain.y.tolist() == [1, 0, 1] and plain.groups.tolist() == ["a", "b", "a"]

    def check(name):
        separator, rows, encode = DIALECTS[name]
        found = TABLE.read(written(tmp_path, rows, separator, encode), GROUP)
        assert found.x.tobytes() == plain.x.tobytes() and found.groups.tolist() == ["a", "b", "a"]

    assert failures(DIALECTS, check) == []


def test_what_cannot_be_read_is_refused_in_true_words(tmp_path):
    def check(content, says):
        path = tmp_path / "refused.csv"
        path.write_bytes(content)
        with pytest.raises(DataError, match=says):
            TABLE.read(path)

    header = ",".join(HEADER).encode()
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(header)[:-9])
    with pytest.raises(DataError, match="it is a damaged gzip file"):
        TABLE.read(tmp_path / "cut.csv.gz")
    assert not failures(
        [
            (",".join(HEADER).encode("utf-16"), "it is in UTF-16: save it as CSV in UTF-8"),
            (b"PK\x03\x04\x14\x00", "it is a spreadsheet or binary"),
            (gzip.compress(header), "it is packed by gzip, without .gz in its name"),
            (header + b",sex\na,1,male,w,,1,male", "has the column sex 2 times; rename or remove one"),
            (header, "has no rows of data"),
            (b"\n\n", "must be a .csv file with a header"),
        ],
        check,
    )


def test_kinds_of_columns_become_these_inputs(tmp_path):
    x = TABLE.read(written(tmp_path, ROWS)).x
    np.testing.assert_allclose(x[:, :2], [[80.5 / 120, 0], [0.5, 1], [0.5, 0]], rtol=1e-6)
    assert x[:, 2:6].tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]], "male; a text that is not listed; female"
    assert x[:, 6:23].sum(axis=1).tolist() == [1, 1, 1], "one bucket each"
    assert x[:, 23:].tolist() == [[1, 0], [0.5, 1], [0, 0]]


@every(["nowhere", "ß", "1e5", "x" * 500, "\x01", "'; drop"])
def test_a_category_that_no_list_has_makes_no_row_useless(text):
    for kind in (Category(("a", "b")), Hashed(8)):
        (inputs,), (reason,) = kind.features([text], ())
        assert inputs.sum() == 1 and not reason
    assert Category(("a", "b")).features([text], ())[0][0, 2] == 1, "all others together"


@every(["none", "None", "-"])
def test_a_mark_is_a_missing_number_or_date_and_a_word_among_words(text):
    for kind in (Number(0, 1), Date("%d.%m.%Y", 1920, 2019)):
        inputs, (reason,) = kind.features([text], MISSING)
        assert inputs.tolist() == [[0.5, 1]] and not reason
    for kind in (Category(("a",)), Hashed(8)):
        assert kind.features([text], MISSING)[0][0, -1] == 0, "the last input is that of a missing value"


def test_spellings_of_one_category_are_one():
    for kind in (Category(("North  Ward", "1", "-9")), Hashed(1024)):
        for same in (["North Ward", "NORTH WARD", "north  ward"], ["1", "1.0", "01", "+1", "1.00"], ["-9", "-9.0"]):
            inputs, _ = kind.features(same, ())
            assert (inputs == inputs[0]).all(), same


@every(
    [
        ("2024-03-05T10:11:12", "%Y-%m-%d"),
        ("2024-03-05 10:11", "%Y-%m-%d"),
        ("5 Mar 2024", "%d %b %Y"),
        ("05/03/2024", "%d/%m/%Y"),
    ]
)
def test_a_time_of_day_does_not_count(cell, form):
    (inputs,), (reason,) = Date(form, 2024, 2024).features([cell], ())
    assert inputs[0] == pytest.approx(64 / 365) and not reason


USELESS = {
    "column Größe must hold numbers only": ["a", "tall", "male", "w", "", "1"],
    "column Größe must hold numbers from 100 to 220": ["a", "999", "male", "w", "", "1"],
    "column born must hold dates such as 31.12.2019": ["a", "180", "male", "w", "2019-12-31", "1"],
    "column born must hold dates from 1920 to 2019": ["a", "180", "male", "w", "01.01.1890", "1"],
    "column state is empty": ["a", "180", "male", "w", "", "NA"],
    "column state must hold 0, 1, 2 only": ["a", "180", "male", "w", "", "dead"],
    "has another number of cells than there are columns": ["a", "180", "male"],
}


@pytest.mark.parametrize("separator", [",", ";"])
def test_rows_of_no_use_are_left_out_and_counted_by_column_and_reason_without_values(tmp_path, separator):
    useless = [row for number, row in enumerate(USELESS.values(), 1) for _ in range(number)]
    examples = Wards(TaskConfig(name="wards")).read(written(tmp_path, [*useless, *ROWS], separator))
    assert sorted(examples.faults) == sorted(f"{number} where {why}" for number, why in enumerate(USELESS, 1))
    assert len(examples) == 3 and np.isfinite(examples.x).all()
    assert not any(word in fault for fault in examples.faults for word in ("tall", "999", "dead", "1890"))


def test_a_table_without_a_row_that_can_be_used_is_refused_without_counts(tmp_path):
    with pytest.raises(DataError, match=r"has no row that can be used$") as refused:
        Wards(TaskConfig(name="wards")).read(written(tmp_path, [USELESS["column state is empty"]]))
    assert refused.value.first == "1 where column state is empty"


LINES = [joined([row], ";").encode("cp1252") for row in ROWS] * 3
GARBAGE = [
    b'"',
    b'a;180;"male;w;;1',
    b"\xff\xfe;;;;;",
    b"\x00",
    b";;;;;",
    b"1,5" * 99,
    b"PK\x03\x04",
    PACKED,
    b"a;1;2;3;4;5;6",
    "ä;ß;;;;2".encode(),
]


@pytest.mark.parametrize("order", [(), tuple(HEADER)], ids=["with a header", "without"])
def test_a_line_changes_no_other(tmp_path, order):
    """One person's row is one that is there or not: it moves no cell of another row."""
    table = Table(COLUMNS, "state", 2, CLASSES, order=order)
    first = [] if order else [";".join(HEADER).encode("cp1252")]
    rng = np.random.default_rng(3)
    garbage = [*GARBAGE, *(rng.integers(0, 256, rng.integers(1, 60), np.uint8).tobytes() for _ in range(60))]

    def found(lines):
        path = tmp_path / "lines.csv"
        path.write_bytes(b"\n".join([*first, *lines]))
        return table.rows(path, GROUP)

    alone = found(LINES)
    usable = np.isfinite(alone.x).all(axis=1)
    assert usable.all()

    def check(line):
        place = int(rng.integers(0, len(LINES) + 1))
        beside = found([*LINES[:place], line, *LINES[place:]])
        others = np.r_[:place, len(beside) - len(LINES) + place : len(beside)]
        assert beside.x[others].tobytes() == alone.x.tobytes()
        assert beside.y[others].tolist() == alone.y.tolist()
        assert beside.groups[others].tolist() == alone.groups.tolist()

    assert failures(garbage, check) == []


@pytest.fixture
def wards(monkeypatch):
    """Register the task under the name `wards`."""
    from cloister.tasks import TASKS

    monkeypatch.setattr(TASKS, "load", lambda name: Wards)
    for kept in (benchmark_of, _part):
        kept.cache_clear()
    yield lambda **settings: TaskConfig(name="wards", **settings)
    for kept in (benchmark_of, _part):
        kept.cache_clear()


def test_a_site_with_a_header_alone_trains_on_noise_and_its_log_says_so(tmp_path, wards, caplog):
    """Under DP-SGD a site with one row and one with none must answer alike."""
    node = node_of({"data-path": str(written(tmp_path, [])), "ledger-dir": str(tmp_path / "ledgers")})
    with caplog.at_level(logging.WARNING, "cloister.client"):
        data = local_data(wards(group=GROUP, test_fraction=0.0), node, seed=0, tolerant=True)
    assert len(data.train) == 0 and "no row that can be used: this site trains on noise alone" in caplog.text


def test_a_site_s_log_counts_rows_by_column_and_reason(tmp_path, wards, caplog):
    path = written(tmp_path, [*ROWS, ["a", "999", "male", "w", "", "1"]])
    node = node_of({"data-path": str(path), "ledger-dir": str(tmp_path / "ledgers")})
    with caplog.at_level(logging.WARNING, "cloister.client"):
        for tolerant, says in ((True, "1 of 4 rows are left out: 1 where"), (False, "rows are left out: 1 where")):
            assert len(local_data(wards(test_fraction=0.0), node, seed=0, tolerant=tolerant).train) == 3
            assert f"{says} column Größe" in caplog.text and "999" not in caplog.text
            caplog.clear()


def many(site=""):
    """Twenty patients with two rows each."""
    row = ["180", "male", "w", ""]
    return [[f"{site}p{number // 2}", *row, str(number % 4 // 2)] for number in range(40)]


def test_files_in_a_folder_are_sites(tmp_path, wards):
    (tmp_path / "sites").mkdir()
    for site, ending in (("north", ".csv"), ("south", ".data"), ("east", ".csv.gz")):
        text = joined([HEADER, *many(site)]).encode()
        (tmp_path / "sites" / f"{site}{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    (tmp_path / "sites" / "read.me").write_text("no table")
    config = wards(data_path=str(tmp_path / "sites"), group=GROUP)
    data = Wards(config).load()
    assert Wards(config).partition == "natural" and np.bincount(data.owners).tolist() == [32] * 3
    whose = [set(zip(part.groups.tolist(), [part is data.test] * len(part))) for part in (data.train, data.test)]
    assert not {name for name, _ in whose[0]} & {name for name, _ in whose[1]}, "patients train or test as a whole"
    for owner in range(3):
        assert len({name[:4] for name in data.groups[GROUP][data.owners == owner]}) == 1
    assert len(benchmark_of(config).train) == 96


def test_a_column_of_sites_makes_clients_and_rows_without_a_site_are_counted(tmp_path):
    class ByColumn(Wards):
        table = Table({"Größe": Number(100, 220)}, "state", 2, CLASSES, site="ward")
        input_shape = (table.width,)

    rows = [[*row[:3], f" {'AB'[number % 2]}", *row[4:]] for number, row in enumerate(many())]
    rows[0][3] = ""
    data = ByColumn(TaskConfig(name="wards", data_path=str(written(tmp_path, rows)))).load()
    assert sorted(np.bincount(data.owners)) == [15, 16]
    assert data.train.faults == ("1 where column ward is empty",)


def test_a_regression_has_shares_as_targets_and_its_error_in_the_units_of_the_column(tmp_path):
    class Heights(TableRegression):
        table = Table({"sex": Category(("male",))}, "Größe", 0, span=(100, 220))
        recipe, input_shape, models, build = Wards.recipe, (3,), Wards.models, Wards.build

    rows = [["a", height, "male", "w", "", "1"] for height in ("100", "160", "220", "", "999", "tall")]
    task = Heights(TaskConfig(name="heights"))
    examples = task.read(written(tmp_path, rows))
    assert examples.y.tolist() == [0, 0.5, 1] and len(examples.faults) == 3
    assert task.metrics(examples.y, examples.y + 0.1)["rmse"] == pytest.approx(12, rel=1e-5)


def test_files_without_a_header_are_scored_with_and_without_the_target(tmp_path):
    table = Table(COLUMNS, "state", 2, CLASSES, order=HEADER)
    path = tmp_path / "bare.data"
    path.write_text(joined(ROWS))
    assert table.judged(path).y.tolist() == table.read(path).y.tolist() == [1, 0, 1]
    path.write_text(joined([row[:-1] for row in ROWS]))
    bare = table.judged(path)
    assert bare.y is None and bare.x.shape == (3, TABLE.width) and not any(bare.reasons)
