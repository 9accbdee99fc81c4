"""Names of data that change while its place stays: noted in the ledgers of both, and no budget begins anew unseen."""

import json

import pytest
from forged_ledgers import chained, lines_of, write

from cloister.privacy.accounting.ledger import Ledger, other_names
from cloister.utils.errors import LedgerError

PLACE = "data-0123456789ab"


@pytest.fixture
def named(tmp_path):
    return lambda name: tmp_path / f"{name}.jsonl"


def at(path, place=PLACE):
    """The ledger of a name, once data at a place has it, with four releases."""
    other_names(Ledger(path), place)
    return write(path)


def test_a_new_name_is_noted_in_the_ledgers_of_both(named):
    at(named("old"))
    assert other_names(Ledger(named("new")), PLACE) == ("old",)
    assert Ledger(named("new")).others == ("old",) and Ledger(named("old")).others == ("new",)


def test_what_was_spent_stays_spent(named):
    before = at(named("old"))
    before.limit("run", "client", 1e-5, 2.0)
    other_names(Ledger(named("new")), PLACE)
    after = Ledger(named("old"))
    assert (after.entries, after.budgets) == (before.entries, before.budgets) and len(after.entries) == 4


def test_it_is_noted_once(named):
    at(named("old"))
    for name in ("new", "old", "new"):
        other_names(Ledger(named(name)), PLACE)
    assert [line["kind"] for line in lines_of(named("new"))] == ["place"]
    assert [line["kind"] for line in lines_of(named("old"))].count("place") == 2


def test_of_three_names_each_ledger_has_the_others(named):
    for name in ("a", "b", "c"):
        at(named(name))
    assert {name: set(Ledger(named(name)).others) for name in "abc"} == {"a": {*"bc"}, "b": {*"ac"}, "c": {*"ab"}}


def test_data_without_a_given_name_is_called_after_its_place(named):
    """Its ledger may be older than these notes."""
    write(named(PLACE))
    assert other_names(Ledger(named("new")), PLACE) == (PLACE,)
    assert Ledger(named(PLACE)).others == ("new",)


def test_data_without_a_given_name_finds_the_given_ones(named):
    at(named("old"))
    assert other_names(Ledger(named(PLACE)), PLACE) == ("old",)


def test_without_a_given_name_no_line_is_written(named):
    assert other_names(Ledger(named(PLACE)), PLACE) == () and not named(PLACE).exists()


def test_data_at_another_place_is_other_data(named):
    at(named("old"), "data-ba9876543210")
    assert other_names(Ledger(named("new")), PLACE) == () and Ledger(named("old")).others == ()


def test_a_ledger_that_cannot_be_read_is_named_and_left_as_it_is(named, caplog):
    at(named("old"))
    torn = named("old").read_text().replace("mechanism", "mechanics", 1)
    named("old").write_text(torn)
    assert other_names(Ledger(named("new")), PLACE) == ("old",)
    assert named("old").read_text() == torn and "old.jsonl does not note that data at its place" in caplog.text


def test_a_line_whose_names_are_no_list_is_refused(named):
    at(named("old"))
    lines = lines_of(named("old"))
    lines[0]["others"] = 5
    named("old").write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in chained(lines)))
    with pytest.raises(LedgerError, match="line 1: others must be names, found int"):
        Ledger(named("old"))
