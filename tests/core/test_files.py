"""Files that tell no more than they should."""

import os

from cloister.core.files import coarse_mtime


def test_a_coarse_time_is_that_of_the_day_and_of_the_same_day(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("x")
    os.utime(path, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))  # 2023-11-14, 22:13:20 UTC
    coarse_mtime(path)
    assert path.stat().st_mtime_ns == path.stat().st_atime_ns == 1_699_920_000 * 10**9
    assert path.read_text() == "x"
