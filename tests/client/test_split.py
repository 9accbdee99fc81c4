"""A node's own split: each row by itself, by a secret of the node."""

import hashlib
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from asking import DP_SGD, answer, arrays_of, own_node, write_data
from scipy import stats
from support import failures

from cloister.client import data as subject
from cloister.client.data import KEY_BYTES, NAME, local_data, secret_key, split, uniform_hashes
from cloister.client.node import node_of
from cloister.config.run import TaskConfig
from cloister.tasks.base import Examples
from cloister.tasks.partition import holdout
from cloister.utils.errors import ConfigError

FALSE_ALARM = 1e-9
KEY = bytes(range(KEY_BYTES))
OTHER = bytes(KEY_BYTES)


def examples(count, seed=0, groups=None):
    rng = np.random.default_rng(seed)
    return Examples(rng.random((count, 5)).astype(np.float32), rng.integers(0, 10, count), groups)


def scored(data, fraction=0.3, key=KEY):
    """Return the rows for scoring, as a mask."""
    mask = np.zeros(len(data), bool)
    mask[split(data, fraction, key)[1]] = True
    return mask


class TestEachRowByItself:
    def test_every_row_is_on_one_side(self):
        train, test = split(examples(100), 0.3, KEY)
        assert sorted([*train, *test]) == list(range(100)) and len(train) and len(test)

    def test_one_row_less_moves_no_other(self):
        def check(left_out):
            data, rest = examples(60), np.delete(np.arange(60), left_out)
            np.testing.assert_array_equal(scored(data)[rest], scored(data.take(rest)))

        assert failures([(left_out,) for left_out in range(0, 60, 7)], check) == []

    def test_one_row_more_moves_no_other(self):
        data = examples(60)
        for seed in range(1, 9):
            one = examples(1, seed)
            more = Examples(np.concatenate([data.x, one.x]), np.concatenate([data.y, one.y]))
            np.testing.assert_array_equal(scored(more)[:60], scored(data))

    def test_the_order_of_rows_moves_none(self):
        data, order = examples(60), np.random.default_rng(1).permutation(60)
        np.testing.assert_array_equal(scored(data)[order], scored(data.take(order)))

    def test_a_larger_share_takes_rows_along(self):
        """A server that asks for two shares learns of no row that changed sides and back."""
        data = examples(300)
        small, large = scored(data, 0.2), scored(data, 0.5)
        assert (large | ~small).all() and large.sum() > small.sum()

    def test_memory_order_and_strides_do_not_matter(self):
        data = examples(60)
        turned = Examples(np.asfortranarray(data.x), np.repeat(data.y, 2)[::2])
        np.testing.assert_array_equal(scored(turned), scored(data))

    def test_nothing_is_kept_back_without_a_share(self):
        train, test = split(examples(20), 0.0, b"")
        assert list(train) == list(range(20)) and len(test) == 0


class TestGroups:
    GROUPS = np.array([f"patient {i // 5}" for i in range(300)])

    def test_rows_of_a_group_stay_together(self):
        mask = scored(examples(300, groups=self.GROUPS)).reshape(60, 5)
        assert (mask.all(axis=1) | ~mask.any(axis=1)).all() and 0 < mask.sum() < 300

    def test_what_the_rows_hold_does_not_matter(self):
        np.testing.assert_array_equal(scored(examples(300, 1, self.GROUPS)), scored(examples(300, 2, self.GROUPS)))

    def test_one_row_more_in_a_group_goes_with_it(self):
        data = examples(300, groups=self.GROUPS)
        again = data.take(np.append(np.arange(300), 17))
        assert scored(again)[300] == scored(data)[17]


class TestTheLaw:
    """False alarms: one in 10⁹ by each test."""

    def test_a_share_is_a_probability(self):
        count = int(scored(examples(4000), 0.3).sum())
        assert stats.binomtest(count, 4000, 0.3).pvalue > FALSE_ALARM

    @pytest.mark.parametrize("wrong", [0.2, 0.45])
    def test_another_share_is_told_from_it(self, wrong):
        count = int(scored(examples(4000), wrong).sum())
        assert stats.binomtest(count, 4000, 0.3).pvalue < FALSE_ALARM

    def test_hashes_are_uniform(self):
        numbers = uniform_hashes([str(i).encode() for i in range(5000)], KEY)
        assert stats.kstest(numbers, "uniform").pvalue > FALSE_ALARM and len(set(numbers)) == 5000

    def test_classes_do_not_matter(self):
        """Each class has its own share of the test rows, as a binomial draw has it: one class may have none."""
        data = examples(4000)
        mask = scored(data)
        table = [[(mask & (data.y == label)).sum(), (~mask & (data.y == label)).sum()] for label in range(10)]
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM
        few = Examples(data.x[:10], np.arange(10))
        assert len({scored(few, 0.3, bytes([k]) * KEY_BYTES).sum() for k in range(40)}) > 2

    def test_a_stratified_split_is_told_from_it(self):
        """The twin that showed how many classes there are: one row of each class, always."""
        y, sizes = np.arange(10), set()
        for seed in range(40):
            sizes.add(len(holdout(y, 0.3, np.random.default_rng(seed))[1]))
        assert len(sizes) == 1

    def test_another_key_is_another_split(self):
        data = examples(2000)
        one, other = scored(data, 0.5, KEY), scored(data, 0.5, OTHER)
        assert stats.binomtest(int((one == other).sum()), 2000, 0.5).pvalue > FALSE_ALARM

    def test_the_same_key_is_the_same_split(self):
        np.testing.assert_array_equal(scored(examples(200)), scored(examples(200)))


class TestTheKey:
    def test_it_is_made_once_and_only_the_user_may_read_it(self, tmp_path):
        folder = tmp_path / "new" / "ledgers"
        key = secret_key(folder)
        assert len(key) == KEY_BYTES and secret_key(folder) == key == (folder / NAME).read_bytes()
        assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
        assert [path.name for path in folder.iterdir()] == [NAME]

    def test_whatever_the_umask(self, tmp_path):
        before = os.umask(0)
        try:
            secret_key(tmp_path)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600

    def test_of_two_that_make_one_at_a_time_the_first_stays(self, tmp_path, monkeypatch):
        """Both nodes of a folder have looked, and found none."""
        first = secret_key(tmp_path)
        monkeypatch.setattr(Path, "exists", lambda _: False)
        assert secret_key(tmp_path) == first
        assert [path.name for path in tmp_path.iterdir()] == [NAME]

    def test_each_node_has_its_own(self, tmp_path):
        assert secret_key(tmp_path / "one") != secret_key(tmp_path / "other")

    def test_a_file_that_is_none(self, tmp_path_factory):
        def check(content):
            tmp_path = tmp_path_factory.mktemp("case")
            (tmp_path / NAME).write_bytes(content)
            with pytest.raises(ConfigError, match=rf"must hold 32 bytes, found {len(content)}") as refused:
                secret_key(tmp_path)
            assert str(tmp_path) not in str(refused.value)

        assert failures([b"", b"short", bytes(KEY_BYTES + 1)], check) == []


class TestExactly:
    """A split that changes with a release of this code would move rows between the sides of a running federation."""

    def test_the_hash_is_blake2b_read_as_a_fraction(self):
        identities = [b"one", b"two", b"three"]
        digests = [hashlib.blake2b(each, key=KEY, digest_size=8).digest() for each in identities]
        expected = [int.from_bytes(digest) / 2**64 for digest in digests]
        assert uniform_hashes(identities, KEY).tolist() == pytest.approx(expected, rel=1e-15)
        assert uniform_hashes([], KEY).tolist() == []

    @pytest.mark.parametrize(
        ("draws", "train", "test"),
        [([0.3, 0.2, 0.9], [0, 2], [1]), ([0.0, 0.29999, 1.0], [2], [0, 1])],
    )
    def test_a_draw_below_the_share_is_scored_with(self, monkeypatch, draws, train, test):
        asked = []
        monkeypatch.setattr(subject, "uniform_hashes", lambda *given: asked.append(given) or np.array(draws))
        data = examples(3)
        found = split(data, 0.3, KEY)
        assert [side.tolist() for side in found] == [train, test]
        ((identities, key),) = asked
        assert key == KEY and identities == [data.x[i].tobytes() + data.y[i].tobytes() for i in range(3)]

    def test_a_group_is_known_by_its_name(self, monkeypatch):
        asked = []
        monkeypatch.setattr(subject, "uniform_hashes", lambda *given: asked.append(given) or np.zeros(3))
        split(examples(3, groups=np.array([7, 7, 12])), 0.3, KEY)
        assert asked[0][0] == [b"7", b"7", b"12"]

    def test_without_a_share_no_key_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(subject, "uniform_hashes", pytest.fail)
        train, test = split(examples(4), 0.0, b"")
        assert (train.tolist(), test.tolist()) == ([0, 1, 2, 3], [])

    def test_the_folders_above_are_made(self, tmp_path):
        assert len(secret_key(tmp_path / "a" / "b" / "c")) == 32

    def test_the_key_is_on_disk_before_it_has_its_name(self, tmp_path, monkeypatch):
        """A power cut must not leave a name without its bytes: another key would then split the data anew."""
        seen, link = [], os.link
        monkeypatch.setattr(os, "fsync", lambda handle: seen.append(os.fstat(handle).st_size))
        monkeypatch.setattr(os, "link", lambda *given: seen.append("name") or link(*given))
        secret_key(tmp_path)
        assert seen == [KEY_BYTES, "name"]

    def test_whatever_goes_wrong_nothing_is_left_beside_it(self, tmp_path, monkeypatch):
        def fail(*_):
            raise PermissionError

        monkeypatch.setattr(os, "link", fail)
        with pytest.raises(PermissionError):
            secret_key(tmp_path)
        assert not list(tmp_path.iterdir())

    def test_until_it_has_its_name_only_the_user_may_read_it(self, tmp_path, monkeypatch):
        modes, link = [], os.link
        names = []

        def look(partial, path):
            modes.append(stat.S_IMODE(os.stat(partial).st_mode))
            names.append(Path(partial).name)
            link(partial, path)

        monkeypatch.setattr(os, "link", look)
        secret_key(tmp_path)
        assert modes == [0o600]
        assert re.fullmatch(r"\.split\.key\.[0-9a-f]{16}", names[0])

    def test_a_file_that_is_none_is_named_and_counted(self, tmp_path):
        (tmp_path / NAME).write_bytes(b"short")
        with pytest.raises(ConfigError) as refused:
            secret_key(tmp_path)
        assert str(refused.value) == "split.key in the folder of the node's ledgers must hold 32 bytes, found 5"


class TestOfAFile:
    def test_the_node_splits_its_own_data_with_its_key(self, tmp_path):
        path = write_data(tmp_path, 200)

        def test_rows(folder, seed=1):
            node = {"data-path": str(path), "ledger-dir": str(tmp_path / folder)}
            return local_data(TaskConfig(test_fraction=0.4), node_of(node), seed).test.x.tobytes()

        assert test_rows("a") == test_rows("a", seed=2), "the server's seed has no say"
        assert test_rows("a") != test_rows("b")

    def test_a_new_row_moves_no_other(self, tmp_path):
        whole = write_data(tmp_path, 60)
        with np.load(whole) as arrays:
            less = write_data(tmp_path, name="less.npz", x=arrays["x"][1:], y=arrays["y"][1:])
        found = []
        for path in (whole, less):
            node = {"data-path": str(path), "ledger-dir": str(tmp_path / "ledgers")}
            data = local_data(TaskConfig(test_fraction=0.4), node_of(node), 1)
            found.append(({row.tobytes() for row in data.train.x}, {row.tobytes() for row in data.test.x}))
        (train, test), (train_less, test_less) = found
        assert train_less <= train and test_less <= test
        assert len(train - train_less) + len(test - test_less) == 1

    def test_a_group_of_any_name_moves_no_other(self, tmp_path):
        names = np.array([f"p{number}" for number in range(30)] + ["\udcff"])
        found = []
        for count in (30, 31):
            path = write_data(tmp_path, count, name=f"{count}.npz", patient=names[:count])
            node = {"data-path": str(path), "ledger-dir": str(tmp_path / "ledgers")}
            data = local_data(TaskConfig(test_fraction=0.4, group="patient"), node_of(node), 1)
            found.append((set(data.train.groups.tolist()), set(data.test.groups.tolist())))
        (train, test), (train_more, test_more) = found
        assert train_more - {"\udcff"} == train and test_more - {"\udcff"} == test

    def test_without_a_share_no_key_is_made(self, tmp_path):
        node = own_node(tmp_path)
        arrays_of(answer(DP_SGD, node))
        assert not (tmp_path / "ledgers" / NAME).exists()
        arrays_of(answer(DP_SGD | {"task.test-fraction": 0.2}, node))
        assert (tmp_path / "ledgers" / NAME).exists()
