"""A roster as a node tells it: it is bounded before it is read."""

import pytest

from cloister.secure_aggregation import roster, serialization
from cloister.secure_aggregation.roster import MAX_ENCODED_ROSTER, SENT_LABEL, Roster, decode_roster, encode_roster
from cloister.secure_aggregation.serialization import text
from cloister.utils.errors import ProtocolError


def test_what_is_told_is_read_again():
    roster = Roster({"north": b"n" * 32, "south": b"s" * 32})
    assert decode_roster(encode_roster(roster)).keys == roster.keys


def test_ten_thousand_members_fit():
    roster = Roster({f"{number:0200d}": number.to_bytes(32) for number in range(10**4)})
    assert len(encode_roster(roster)) < MAX_ENCODED_ROSTER


def test_more_is_not_read(monkeypatch):
    monkeypatch.setattr(roster, "read", lambda *_: pytest.fail("it is read"))
    with pytest.raises(ProtocolError, match="no roster"):
        decode_roster(bytes(MAX_ENCODED_ROSTER + 1))


@pytest.mark.parametrize("entries", [((1, b"k" * 32),), (("north", "k"),), (("north",),), b"north"])
def test_what_is_no_roster_is_refused(entries):
    with pytest.raises(ProtocolError):
        decode_roster(text(SENT_LABEL, entries))


def count(item):
    return 1 + sum(map(count, item)) if isinstance(item, tuple) else 1


@pytest.mark.parametrize("items", [(b"",) * 9, ((b"", b""),) * 3, (((b"",) * 5,), (b"",))])
def test_only_so_many_items_are_read(monkeypatch, items):
    """Those of tuples in tuples too; each takes two microseconds, and fifty megabytes hold six million."""
    counted = count(("version", "label", *items))
    monkeypatch.setattr(serialization, "MAX_ITEMS", counted)
    assert serialization.read("label", text("label", *items)) == items
    monkeypatch.setattr(serialization, "MAX_ITEMS", counted - 1)
    with pytest.raises(ValueError, match="too many"):
        serialization.read("label", text("label", *items))
