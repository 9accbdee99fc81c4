"""Notes of an exception: a line, a place, a traceback; never a value."""

import errno
import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from cloister.utils.crash import (
    LINES,
    WIDTH,
    Crash,
    described,
    kind,
    one_line,
    place,
    shortened,
    trace_without_values,
    write_traces_to,
)
from cloister.utils.errors import ConfigError, DataError

SECRET = "9731.25"


def fail_about_an_example():
    row = np.full(3, float(SECRET))
    raise KeyError(f"no column for {row}")


def fail_inside_a_library():
    row = np.full(3, float(SECRET))
    np.stack([row, row[:2]])


def fail_twice():
    try:
        fail_about_an_example()
    except KeyError as error:
        raise ValueError(f"the row {error}") from error


def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def line_of(text):
    source = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(source, start=1) if text in line)


@pytest.fixture(autouse=True)
def folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


class TestOneLine:
    def test_the_type_the_place_and_the_file_are_told_and_no_value(self, tmp_path):
        with pytest.raises(Crash) as crash, one_line():
            fail_about_an_example()
        said = str(crash.value)
        where = line_of('raise KeyError(f"no column')
        found = re.fullmatch(rf"KeyError at {re.escape(__file__)}:{where}; the traceback, .*, is in (\S+)", said)
        assert found and SECRET not in said
        written = Path(found[1])
        assert written.parent == tmp_path and written.stat().st_mode & 0o077 == 0
        assert SECRET not in written.read_text() and "in fail_about_an_example" in written.read_text()

    def test_the_place_is_the_users_even_if_a_library_raised(self):
        error = caught(fail_inside_a_library)
        assert place(error) == f"{__file__}:{line_of('np.stack([row')}"

    def test_without_a_frame_of_the_users_the_last_of_all_is_named(self):
        assert place(KeyError()) == "an unknown place"
        error = caught(lambda: json.loads("{"))
        error.__traceback__ = error.__traceback__.tb_next.tb_next
        assert re.match(rf"{re.escape(json.__path__[0])}/\w+\.py:\d+$", place(error))

    def test_an_error_of_ours_is_told_as_it_is_and_leaves_no_file(self, tmp_path):
        with pytest.raises(Crash, match=r"^ConfigError: seed = 'x' is not valid$"), one_line():
            raise ConfigError("seed = 'x' is not valid")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_a_full_disk_is_told_as_such(self, tmp_path, number):
        said = described(OSError(number, "quota", "models/run"))
        assert "models/run; make room" in said and "\n" not in said and not list(tmp_path.iterdir())

    def test_another_error_of_the_system_is_not_taken_for_a_full_disk(self):
        assert described(caught(lambda: (_ for _ in ()).throw(PermissionError(13, "no", "x")))) == "x: no"
        assert "PermissionError at" in described(caught(lambda: (_ for _ in ()).throw(PermissionError(13, "no"))))

    def test_traces_go_to_the_run_directory_once_there_is_one(self, tmp_path):
        run = tmp_path / "run"
        run.mkdir()
        with pytest.raises(Crash, match=re.escape(str(run))), one_line():
            write_traces_to(run)
            fail_about_an_example()
        assert len(list(run.iterdir())) == 1
        with pytest.raises(Crash) as later, one_line():
            fail_about_an_example()
        assert str(run) not in str(later.value), "the directory of an earlier run is no place for it"

    def test_where_times_tell_of_a_draw_a_trace_has_the_day_alone(self, tmp_path):
        """The name of a run's folder tells when it began: the moment of its end told how long its rounds were."""
        with pytest.raises(Crash), one_line():
            write_traces_to(tmp_path)
            fail_about_an_example()
        (written,) = tmp_path.iterdir()
        assert re.fullmatch(r"traceback-\d{8}-[a-z0-9_]+\.txt", written.name)

    def test_a_run_directory_that_takes_no_file_is_passed_over(self, tmp_path):
        with pytest.raises(Crash, match=re.escape(str(tmp_path / "cloister-traceback"))), one_line():
            write_traces_to(tmp_path / "gone")
            fail_about_an_example()

    def test_nowhere_to_write_is_told_too(self, monkeypatch, tmp_path):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        assert "could be written nowhere" in described(caught(fail_about_an_example))

    @pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
    def test_what_ends_a_process_passes_through(self, end):
        with pytest.raises(end), one_line():
            raise end

    def test_what_is_excepted_passes_through(self):
        with pytest.raises(BrokenPipeError), one_line(unchanged=(BrokenPipeError,)):
            raise BrokenPipeError

    def test_a_logger_finds_no_traceback_in_it(self, caplog):
        """As Flower does with what a ServerApp raises."""
        crash = caught(lambda: one_line()(fail_twice)())
        logging.getLogger("a host").error("it raised an exception", exc_info=crash)
        formatted = caplog.handler.format(caplog.records[-1])
        assert len(formatted.splitlines()) == 2 and SECRET not in formatted
        assert "Traceback" not in formatted and "ValueError at" in formatted


class TestTrace:
    def test_it_has_every_exception_of_a_chain_and_no_value(self):
        trace = trace_without_values(caught(fail_twice))
        assert SECRET not in trace and "the row" not in trace.replace('f"the row', "")
        first, second = trace.split("which led to:")
        assert first.rstrip().endswith("KeyError") and second.rstrip().endswith("ValueError")
        assert "in fail_about_an_example" in first and "in fail_twice" in second

    def test_it_has_the_text_of_our_own_errors(self):
        def fail():
            raise DataError("data.csv holds 3 rows")

        assert trace_without_values(caught(fail)).rstrip().endswith("DataError: data.csv holds 3 rows")

    def test_a_suppressed_cause_stays_suppressed(self):
        def fail():
            try:
                fail_about_an_example()
            except KeyError:
                raise DataError("no column") from None

        assert "KeyError\n" not in trace_without_values(caught(fail))

    def test_a_chain_that_bites_its_tail_has_an_end(self):
        error, cause = caught(fail_about_an_example), caught(fail_inside_a_library)
        error.__cause__, cause.__cause__ = cause, error
        assert trace_without_values(error).count("which led to") == 1


class TestShortened:
    def test_what_is_short_stays_as_it_is(self):
        text = "\n".join(["x" * WIDTH] * LINES)
        assert shortened(text) == text

    def test_of_many_lines_the_first_are_told_and_the_others_counted(self):
        lines = shortened("\n".join(f"line {number}" for number in range(40))).splitlines()
        assert lines == ["line 0", "line 1", "line 2", "line 3", "... and 36 more like these"]

    def test_of_a_long_line_the_key_and_the_remedy_stay(self):
        line = shortened(f"key = '{'x' * 5000}' is not valid: it must be 'text'")
        assert len(line) == WIDTH and line.startswith("key = 'xxx") and line.endswith("it must be 'text'")


def spells_a_name_wrong():
    numpi.zeros(3)  # noqa: F821


def raises_a_name_of_its_own():
    raise NameError("no value", name=SECRET)


def test_a_name_that_is_not_defined_is_told_if_it_stands_in_the_code():
    assert kind(caught(spells_a_name_wrong)) == "NameError of 'numpi'"
    assert kind(caught(raises_a_name_of_its_own)) == "NameError"
    assert kind(caught(lambda: __import__("json").gone)) == "AttributeError"
