"""A roster as a node tells it: it is bounded before it is read."""

import pytest

from cloister.core.errors import ProtocolError
from cloister.secure_aggregation import introduction
from cloister.secure_aggregation.canonical import text
from cloister.secure_aggregation.introduction import LABEL, MAX_TOLD, read_told, told
from cloister.secure_aggregation.roster import Roster


def test_what_is_told_is_read_again():
    roster = Roster({"north": b"n" * 32, "south": b"s" * 32})
    assert read_told(told(roster)).keys == roster.keys


def test_ten_thousand_members_fit():
    roster = Roster({f"{number:0200d}": number.to_bytes(32) for number in range(10**4)})
    assert len(told(roster)) < MAX_TOLD


def test_more_is_not_read(monkeypatch):
    monkeypatch.setattr(introduction, "read", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ProtocolError, match="no roster"):
        read_told(bytes(MAX_TOLD + 1))


@pytest.mark.parametrize("entries", [((1, b"k" * 32),), (("north", "k"),), (("north",),), b"north"])
def test_what_is_no_roster_is_refused(entries):
    with pytest.raises(ProtocolError):
        read_told(text(LABEL, entries))
