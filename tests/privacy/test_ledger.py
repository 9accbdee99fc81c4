"""The ledger: whole, in order, on disk before anything is released."""

import json
import multiprocessing
import os

import pytest
from typer.testing import CliRunner

from cloister.cli import app
from cloister.core.errors import BudgetExhausted, LedgerError
from cloister.privacy.books import Books
from cloister.privacy.events import Gaussian, Sampling, Unaccounted
from cloister.privacy.ledger import Ledger, line_hash

EVENTS = [
    Gaussian(1.5),
    Gaussian(2.0, Sampling("poisson", probability=0.1)),
    Gaussian(3.0, Sampling("without-replacement", cohort=3, population=9)),
    Unaccounted("an exact distance"),
]


def filled(path):
    books = Books(Ledger(path), "run")
    for number, event in enumerate(EVENTS, start=1):
        with books.release(event, number):
            pass
    return path


@pytest.fixture
def path(tmp_path):
    return filled(tmp_path / "books" / "ledger.jsonl")


def test_what_was_written_is_read_again(path):
    entries = Ledger(path).entries
    assert [entry.event for entry in entries] == EVENTS
    assert [entry.round for entry in entries] == [1, 2, 3, 4]
    assert all(entry.done and entry.run == "run" and entry.unit == "client" for entry in entries)


def test_a_reader_and_the_writer_agree(tmp_path):
    writer = Ledger(tmp_path / "ledger.jsonl")
    books = Books(writer, "run")
    for event in EVENTS[:3]:
        with books.release(event, 1):
            pass
        assert writer.entries == Ledger(writer.path).entries and writer.head == Ledger(writer.path).head
        assert books.epsilon() == Books(Ledger(writer.path), "other").epsilon()


def test_an_open_release_counts(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.open(Gaussian(1.0), "client", "run", 1, allow=lambda: None)
    (entry,) = Ledger(ledger.path).entries
    assert not entry.done
    assert Books(Ledger(ledger.path), "next").epsilon() > 4


def test_a_failing_block_leaves_its_release_open(tmp_path):
    books = Books(Ledger(tmp_path / "ledger.jsonl"), "run")
    with pytest.raises(ZeroDivisionError), books.release(Gaussian(1.0), 1):
        raise ZeroDivisionError
    assert [entry.done for entry in Ledger(books.ledger.path).entries] == [False]


def changed_value(lines):
    lines[2] = lines[2].replace('"round": 2', '"round": 9')


def removed(lines):
    del lines[3]


def swapped(lines):
    lines[2], lines[4] = lines[4], lines[2]


def repeated(lines):
    lines.insert(2, lines[2])


def rehashed(lines):
    """A change whose own hash was made to fit again: the next line gives it away."""
    line = json.loads(lines[2])
    line["event"]["noise_multiplier"] = 50.0
    line["hash"] = line_hash(line)
    lines[2] = json.dumps(line)


def another_version(lines):
    lines[0] = lines[0].replace('"v": 1', '"v": 2')


def another_kind(lines):
    lines[0] = lines[0].replace('"kind": "open"', '"kind": "void"')


def no_json(lines):
    lines[1] = "{"


@pytest.mark.parametrize(
    ("tamper", "line"),
    [
        (changed_value, 3),
        (removed, 4),
        (swapped, 3),
        (repeated, 4),
        (rehashed, 4),
        (another_version, 1),
        (another_kind, 1),
        (no_json, 2),
    ],
)
def test_a_change_shows_and_its_line_is_named(path, tamper, line):
    lines = path.read_text().splitlines()
    tamper(lines)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(LedgerError, match=f"line {line}:"):
        Ledger(path)


def test_an_event_of_an_unknown_kind_is_refused(path):
    lines = path.read_text().splitlines()
    line = json.loads(lines[-2])
    line["event"] = {"kind": "magic", "epsilon": 0.0}
    line["hash"] = line_hash(line)
    path.write_text("\n".join([*lines[:-2], json.dumps(line)]) + "\n")
    with pytest.raises(Exception, match="unknown event kind 'magic'"):
        Ledger(path)


def test_a_torn_last_line_is_passed_over_and_cut_off(path):
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start, len(whole), 7):
        path.write_bytes(whole[:cut])
        ledger = Ledger(path)
        assert len(ledger.entries) == len(EVENTS) and not ledger.entries[-1].done
        ledger.done(ledger.entries[-1].release)
        assert Ledger(path).entries[-1].done


def test_lines_cut_off_at_the_end_show_in_the_last_hash_only(path):
    head = Ledger(path).head
    path.write_text("\n".join(path.read_text().splitlines()[:-2]) + "\n")
    assert len(Ledger(path).entries) == len(EVENTS) - 1 and Ledger(path).head != head


def test_the_disk_has_the_line_before_the_block_begins(tmp_path, monkeypatch):
    order = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("sync"), real(handle)))
    books = Books(Ledger(tmp_path / "ledger.jsonl"), "run")
    with books.release(Gaussian(1.0), 1):
        order.append("noise")
    assert order.index("sync") < order.index("noise") and order[-1] == "sync"


def test_without_a_ledger_line_nothing_is_released(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    books, released = Books(Ledger(tmp_path / "ledger.jsonl"), "run"), []
    with pytest.raises(LedgerError, match="cannot be written"), books.release(Gaussian(1.0), 1):
        released.append(1)
    assert not released


def spend(path, budget, start):
    books = Books(Ledger(path), str(os.getpid()), max_epsilon=budget)
    start.wait()
    for number in range(30):
        try:
            with books.release(Gaussian(4.0), number):
                pass
        except BudgetExhausted:
            return


def test_processes_that_write_at_once_share_one_chain_and_one_budget(tmp_path):
    path, context = tmp_path / "ledger.jsonl", multiprocessing.get_context("fork")
    start = context.Barrier(3)
    writers = [context.Process(target=spend, args=(path, 6.0, start)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    books = Books(Ledger(path), "reader", max_epsilon=6.0)
    assert len({entry.run for entry in books.ledger.entries}) > 1
    assert books.epsilon() <= 6.0
    with pytest.raises(BudgetExhausted):
        books.require([Gaussian(4.0)])


def test_show_and_verify(path):
    shown = CliRunner().invoke(app, ["ledger", "show", str(path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "poisson 0.1" in shown.output and "an exact distance" in shown.output
    verified = CliRunner().invoke(app, ["ledger", "verify", str(path)])
    assert verified.exit_code == 0 and "unbroken" in verified.output and Ledger(path).head in verified.output


def test_verify_finds_a_change(path):
    path.write_text(path.read_text().replace('"round": 2', '"round": 3'))
    verified = CliRunner().invoke(app, ["ledger", "verify", str(path)])
    assert verified.exit_code == 1 and "line 3" in verified.output and "Traceback" not in verified.output


def test_no_ledger(tmp_path):
    assert "no ledger at" in CliRunner().invoke(app, ["ledger", "verify", str(tmp_path / "none")]).output
