"""Use the task that `cloister new task --from csv --data FILE` writes: it states columns, and no row of the file."""

import json
import random
import re
import sys
from datetime import date

import pytest
from support import every, failures
from test_new import IN_TURN, within
from typer.testing import CliRunner

from cloister.cli import app
from cloister.config.run import TaskConfig
from cloister.scaffold.inference import Asked, guess, rounded
from cloister.scaffold.package import write_package
from cloister.utils.errors import ConfigError

HEARTS = "63.0,1.0,4.0,145.0,?,0\n41,0,2,130.5,204,1\n67,1,?,?,233,3\n"
HEADLESS = ("age", "sex", "cp", "pressure", "chol", "num")


def visits(folder, patients=40):
    """A table after a public one: several rows a patient, `;`, decimal commas, dates, words, and remarks."""
    rng = random.Random(0)
    rows = ['Patient ID;Clinic;Sex;Admitted;Temp;Grade;Record;Remark;Out"come']
    for number in range(patients * 3):
        day = date(2021, 1, 1).fromordinal(date(2021, 1, 1).toordinal() + number)
        temperature = f"{rng.uniform(35.5, 41.9):.1f}".replace(".", ",") if number % 7 else "NA"
        word = ("recovered", "ill")[(number // 3) % 2]
        sex, ward = ("female", "male", "")[number % 3], f"Ward{number // 3 % 3}"
        rows.append(
            f"P{number // 3:03};{ward};{sex};{day:%d.%m.%Y};{temperature};"
            f"{number % 4};{90210 + 7 * number};remark{number}x;{word if number else ''}"
        )
    path = folder / "visits.csv"
    path.write_bytes("\r\n".join(rows).encode("cp1252"))
    return path


def asked(path, **more):
    return Asked(path, **({"target": 'Out"come', "site": "Clinic", "patient": "Patient ID"} | more))


def test_kinds_of_columns_are_guessed(tmp_path):
    found = guess(asked(visits(tmp_path)))
    assert found.columns == {
        "Sex": "Hashed(64)",
        "Admitted": 'Date("%d.%m.%Y", 2020, 2029)',
        "Temp": "Number(30, 50)",
        "Grade": "Category(DIGITS)",
        "Record": "",
        "Remark": "",
    }
    assert "whole number in every row" in found.notes["Record"] and "another text" in found.notes["Remark"]
    assert found.classes == {"ill": ("ill",), "recovered": ("recovered",)} and found.sites == 3


def test_a_number_to_predict_is_a_regression(tmp_path):
    found = guess(asked(visits(tmp_path), target="Temp"))
    assert not found.classes and found.span == (30, 50)
    assert "target 'Temp': regression" in next(found.told(tmp_path))


def test_files_without_a_header_need_names_and_codes_with_fractions_are_digits(tmp_path):
    path = tmp_path / "processed.data"
    path.write_text(HEARTS)
    with pytest.raises(ConfigError, match="has no header: its first line holds 6 values; name the columns"):
        guess(Asked(path))
    found = guess(Asked(path, names=HEADLESS))
    assert found.target == "num" and list(found.classes) == ["0", "1", "3"]
    assert [found.columns[name] for name in ("sex", "cp")] == ["Category(DIGITS)"] * 2
    assert found.columns["chol"] == "Number(200, 250)"


WORDS = ("none", "mild", "severe", "-")


def test_words_that_look_like_missing_values_are_classes_and_inputs_and_missing_cells_are_named(tmp_path):
    path = tmp_path / "grades.csv"
    rows = [
        f"{'-' if n % 4 else 20 + n},{('none', 'NA')[n % 2]},0{1 + n % 9}.02.2020,{WORDS[n % 4]}" for n in range(40)
    ]
    path.write_text("\n".join(["age,smoking,seen,grade", *rows, "none,-,none,?", ""]))
    found = guess(Asked(path))
    assert list(found.classes) == ["-", "mild", "none", "severe"]
    assert found.columns == {
        "age": "Number(0, 100)",
        "smoking": "Hashed(64)",
        "seen": 'Date("%d.%m.%Y", 2020, 2029)',
    }
    says = "'age' has 30 '-', 'age' has 1 'none', 'smoking' has 20 'NA', 'seen' has 1 'none', 'grade' has 1 '?'; rows "
    assert any(
        f"cells taken for missing values: {says}without 'grade' are left out" in line for line in found.told(path)
    )
    made = write_package("task", "grades", "csv", tmp_path / "made", found)
    space = {"__file__": str(made / "grades" / "task.py")}
    exec(compile((made / "grades" / "task.py").read_text(), "task.py", "exec"), space)
    examples = space["Grades"](TaskConfig(name="grades")).read(path)
    assert len(examples) == 40 and examples.faults == ("1 where column grade is empty",)


def test_a_mark_among_numbers_to_predict_is_a_missing_value(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("a,b\n1,0.5\n2,none\n3,-\n4,2\n")
    found = guess(Asked(path))
    assert found.span == (0, 2) and found.missing == {"b": {"none": 1, "-": 1}}


def test_the_commands_for_a_site_name_what_its_own_table_has(tmp_path):
    own = guess(asked(visits(tmp_path)))
    texts = {}
    for name, table in (("own", own), ("made-up", None)):
        write_package("task", name, "csv", tmp_path / name, table)
        texts[name] = (tmp_path / name / "README.md").read_text()
    assert """--node-config "data-path='FILE' public-size=N group='Patient ID'"\n""" in texts["own"]
    assert """--node-config "data-path='site-a.csv' public-size=200"\n""" in texts["made-up"]
    for word in ("site-a", "`public = True`"):
        assert word in texts["made-up"] and word not in texts["own"]


def test_no_row_of_the_file_is_in_the_package(tmp_path):
    path = visits(tmp_path)
    made = write_package("task", "ward-visits", "csv", tmp_path / "made", guess(asked(path)))
    texts = "".join(file.read_text() for file in made.rglob("*") if file.is_file())
    cells = {cell for line in path.read_text("cp1252").splitlines()[1:] for cell in line.split(";") if len(cell) > 3}
    assert {cell for cell in cells if cell in texts} == {"recovered"}, "the texts of the classes, as is said"
    assert not (made / "ward_visits" / "data").exists() and "    public = True" not in texts


NAMES = ['Patient "ID"', "it's", "a\\b", "größe (cm)", "{{ x }}", "x\ty", '"""', "#", "$HOME`id`"]


def test_any_name_of_a_column_makes_a_module_that_reads_the_file(tmp_path):
    def check(name):
        quoted = '"' + name.replace('"', '""') + '"'
        path = tmp_path / "odd.csv"
        path.write_text(f'{quoted};{quoted[:-1]}2";who\n' + "".join(f"1{n % 9},5;w{n % 3};p{n}\n" for n in range(30)))
        table = guess(Asked(path, target=f"{name}2", patient="who"))
        made = write_package("task", "odd", "csv", tmp_path / f"made{NAMES.index(name)}", table)
        space = {"__file__": str(made / "odd" / "task.py")}
        exec(compile((made / "odd" / "task.py").read_text(), "task.py", "exec"), space)
        assert len(space["Odd"](TaskConfig(name="odd", group="who")).read(path)) == 30

    assert failures(NAMES, check) == []


@every([(0.0, 1.0), (29, 77), (-2.6, 6.2), (1990, 2020), (0.053, 0.163), (1e-7, 1e9), (5, 5), (-3, -3), (0, 0)])
def test_a_range_is_rounded_outwards(low, high):
    first, last = rounded(low, high)
    assert first <= low <= high <= last and first < last
    assert last - first <= 10 * max(high - low, abs(high), 1) and len(f"{last:.12g}") <= len("10000000000")


def test_what_was_guessed_and_what_becomes_public_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    visits(tmp_path)
    arguments = ["--data", "visits.csv", "--target", 'Out"come', "--site", "Clinic", "--patient", "Patient ID"]
    done = CliRunner().invoke(app, ["new", "task", "ward-visits", *arguments])
    assert done.exit_code == 0, done.output
    assert "target 'Out\"come': classification in 2 classes; 4 of 6 other columns are inputs" in done.output
    assert "A package is public: put public knowledge in their place" in done.output
    assert '''-c "task.group='Patient ID'"''' in (tmp_path / "ward-visits" / "README.md").read_text()


def test_a_number_to_predict_may_be_missing_or_a_word_in_a_few_rows(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text(
        "age,score\n" + "".join(f"{20 + n % 30},{n / 2}\n" for n in range(60)) + "30,pending\n31,n.k.\n" * 2
    )
    found = guess(Asked(path))
    assert found.span == (0, 50) and not found.classes
    assert found.notes["score"].startswith("4 cells hold no number: 'pending' (2), 'n.k.' (2). Rows with them are left")
    path.write_text("age,stage\n" + "".join(f"{20 + n},{n % 3}\n" for n in range(60)) + "30,pending\n")
    found = guess(Asked(path))
    assert list(found.classes) == ["0", "1", "2", "pending"]
    assert found.notes["stage"].startswith("'pending' (1) are classes beside numbers; take them out")
    path.write_text("age,score\n" + "".join(f"{20 + n % 9},{n / 2 if n % 3 else 'x'}\n" for n in range(60)))
    with pytest.raises(ConfigError, match=r"40 cells hold numbers, others 'x' \(20\)\); name another"):
        guess(Asked(path))


def test_a_number_that_may_be_a_code_is_named(tmp_path):
    path = tmp_path / "codes.csv"
    for code, count, is_named in ((-9, 5, True), (999, 5, True), (-9, 1, False), (21, 5, False)):
        rows = [f"{20 + n / 4},{n % 2}" for n in range(40)] + [f"{code},0"] * count
        path.write_text("\n".join(["age,ill", *rows]))
        found = guess(Asked(path)).notes.get("age", "")
        assert found.startswith(f"{code} recurs far from all other numbers") == is_named, code


ROW = {
    "words, a date and a number": ("P{n:03},{sex},{day:02}.03.2020,38.{n},{end}", "who,sex,day,temp,end"),
    "decimal commas": ("P{n:03};ward;{n},5;{end}", "who;ward;temp;end"),
    "words alone": ("P{n:03},{sex},{end}", "who,sex,end"),
    "missing numbers": ("P{n:03},NA,{sex},{n}", "who,sex,other,2020"),
}


def test_a_first_line_like_all_others_is_no_header(tmp_path):
    def check(name):
        form, header = ROW[name]
        rows = [
            form.format(n=n, day=1 + n % 28, sex=("female", "male")[n % 2], end=("ill", "well")[n % 3 > 0])
            for n in range(40)
        ]
        path = tmp_path / "bare.csv"
        path.write_text("\n".join(rows))
        with pytest.raises(ConfigError, match=r"has no header: .* as in --columns") as refused:
            guess(Asked(path))
        assert not any(word in str(refused.value) for word in ("P000", "female"))
        path.write_text("\n".join([header, *rows, header]))
        assert guess(Asked(path)).target == header.replace(";", ",").split(",")[-1]

    assert not failures(ROW, check)


def test_what_no_task_can_be_made_of_is_refused(tmp_path):
    def check(content, more, says):
        path = tmp_path / "refused.csv"
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            guess(Asked(path, **more))

    assert not failures(
        [
            ("a,b\n", {}, "no rows below the header"),
            ("a,a,b\n1,2,3\n", {}, "the column 'a' is there 2 times"),
            ("a,b\n1,2\n", {"target": "c"}, "--target 'c' is no column of .*, which has a, b"),
            ("a,b\n1,x\n2,x\n", {}, "--target 'b' holds 1 different texts"),
            ("a,b\n,1\n?,2\n", {}, "no column beside 'b' can be an input; 'a' is left out: no row has a value"),
            ("1,2\n3,4\n", {"names": ("a", "b", "c")}, "no row has as many cells as there are columns"),
        ],
        check,
    )


@pytest.mark.slow
def test_from_a_table_to_a_report_with_noise_for_each_patient(tmp_path):
    path = visits(tmp_path)
    made = write_package("task", "ward-visits", "csv", tmp_path / "made", guess(asked(path)))
    facts = made / "ward_visits-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: ward-visits\nVersion: 0.1.0\n")
    (facts / "entry_points.txt").write_text("[cloister.tasks]\nward-visits = ward_visits.task:WardVisits\n")
    own = f"task.data-path='{path}' task.group='Patient ID'"
    run = (
        f"task.name='ward-visits' {own} num-rounds=2 privacy.server='none' privacy.client='dp-sgd' client.batch-size=8"
    )
    commands = [
        ["check", "task", "ward-visits", "-c", own],
        ["run", "--clients", "3", "-c", f"{run} output-dir='{tmp_path / 'runs'}'"],
    ]
    given = json.dumps([(str(made), command) for command in commands])
    done = within(made, sys.executable, "-c", IN_TURN, given)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^warn .* 1 where column Out\"come is empty", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ok .* \d+ Patient IDs of (\d to )?3 examples", done.stdout, re.MULTILINE), done.stdout
    (directory,) = (tmp_path / "runs").glob("*-ward-visits-*")
    assert "for one Patient ID of a client with" in done.stdout and (directory / "report.html").is_file()
    assert json.loads((directory / "config.json").read_text())["config"]["task.group"] == "Patient ID"
