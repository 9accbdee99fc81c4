"""Partitions: exact counts, disjointness, determinism, and refusals that say what is wrong."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import failures

from cloister.config.run import TaskConfig
from cloister.tasks import partition
from cloister.tasks.base import Dataset, Examples
from cloister.utils.errors import ConfigError

ALZHEIMER = (724, 49, 2566, 1781)
"""Class totals of the 5120 training images."""
HOMOGENEOUS = "181,12,641,446; 181,12,642,445; 181,12,642,445; 181,13,641,445"
NON_IID = "280,16,881,615; 107,13,368,280; 257,17,1054,720; 80,3,263,166"
ATTACK = "120,9,1122,496; 180,11,894,506; 524,29,550,779"

many_labels = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(lambda labels: np.array(labels))
seeds = st.integers(0, 2**31 - 1)
few = settings(max_examples=30, deadline=None, derandomize=True)
"""Random cases of a rule: a break of any of them shows in most cases."""


def generator(seed=7):
    return np.random.default_rng(seed)


def labels_of(totals, seed=3):
    return generator(seed).permutation(np.repeat(np.arange(len(totals)), totals))


def dataset(labels, owners=None, groups=None):
    examples = Examples(np.zeros((len(labels), 1), np.float32), labels, groups)
    return Dataset(examples, examples, owners)


def deal(labels, clients, classes=4, seed=7, owners=None, groups=None, **config):
    return partition.deal(TaskConfig(**config), "iid", dataset(labels, owners, groups), clients, classes, seed)


def counts_of(labels, parts, classes):
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts])


def assert_disjoint(parts, total):
    for part in parts:
        assert part.dtype == np.intp
        assert (np.diff(part) > 0).all()
    joined = np.concatenate(parts)
    assert np.unique(joined).size == joined.size
    assert ((joined >= 0) & (joined < total)).all()


def assert_complete(parts, total):
    assert_disjoint(parts, total)
    assert sum(part.size for part in parts) == total


@few
@given(many_labels, st.integers(1, 12), seeds)
def test_iid_deals_everything_in_equal_parts(labels, clients, seed):
    parts = partition.iid(labels, clients, generator(seed))
    assert len(parts) == clients
    assert_complete(parts, len(labels))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@few
@given(many_labels, st.integers(1, 6), st.integers(1, 3), seeds)
def test_shards_deal_everything_in_nearly_equal_parts(labels, clients, each, seed):
    if clients * each > len(labels):
        with pytest.raises(ConfigError, match=r"task\.shards-per-client"):
            partition.shards(labels, clients, each, generator(seed))
        return
    parts = partition.shards(labels, clients, each, generator(seed))
    assert len(parts) == clients
    assert_complete(parts, len(labels))
    assert max(map(len, parts)) - min(map(len, parts)) <= each


@few
@given(many_labels, st.integers(1, 5), st.floats(0.05, 100), seeds)
def test_dirichlet_deals_everything_and_leaves_nobody_out_or_refuses(labels, clients, alpha, seed):
    try:
        parts = partition.dirichlet(labels, clients, alpha, generator(seed))
    except ConfigError as error:
        assert "task.alpha" in str(error)
        return
    assert len(parts) == clients
    assert_complete(parts, len(labels))
    assert all(part.size for part in parts)


@few
@given(many_labels, st.lists(st.lists(st.integers(0, 30), min_size=5, max_size=5), min_size=1, max_size=5), seeds)
def test_tables_are_dealt_exactly_or_refused(labels, rows, seed):
    counts = np.array(rows, dtype=np.intp)
    if (counts.sum(axis=0) > np.bincount(labels, minlength=5)).any():
        with pytest.raises(ConfigError, match=r"task\.table asks for \d+ training examples of class"):
            partition.table(labels, counts, generator(seed))
        return
    parts = partition.table(labels, counts, generator(seed))
    assert_disjoint(parts, len(labels))
    assert np.array_equal(counts_of(labels, parts, 5), counts)


@few
@given(many_labels, st.floats(0, 0.99), seeds)
def test_a_holdout_is_stratified_and_never_takes_a_whole_class(labels, fraction, seed):
    train, test = partition.holdout(labels, fraction, generator(seed))
    assert_complete([train, test], len(labels))
    for label, total in zip(*np.unique(labels, return_counts=True), strict=True):
        held = int((labels[test] == label).sum())
        assert held == min(round(fraction * total), total - 1)


def test_the_same_seed_deals_the_same_parts():
    def check(how):
        labels = labels_of((40, 40, 40, 40))
        groups = np.arange(160) % 3

        def parts(seed):
            table = {"table": "10,10,10,10;5,5,5,5"} if how == "table" else {}
            return deal(labels, 2, seed=seed, owners=groups, partition=how, **table)

        assert all(map(np.array_equal, parts(1), parts(1)))
        assert how == "natural" or not all(map(np.array_equal, parts(1), parts(2)))

    assert not failures(["iid", "shards", "dirichlet", "natural", "table"], check)


def test_the_published_alzheimer_tables_use_every_image():
    def check(text, clients):
        labels = labels_of(ALZHEIMER)
        parts = deal(labels, clients, partition="table", table=text)
        assert_complete(parts, 5120)
        expected = np.array([[int(cell) for cell in row.split(",")] for row in text.split(";")])
        assert np.array_equal(counts_of(labels, parts, 4), expected)

    assert not failures([(HOMOGENEOUS, 4), (NON_IID, 4)], check)


def test_the_published_attack_table_asks_for_more_than_the_training_images():
    """The three clients add up to 5220 images: 100 of class 0 beyond the 724 that the training set has."""
    with pytest.raises(ConfigError, match="824 training examples of class 0; the task has 724"):
        deal(labels_of(ALZHEIMER), 3, partition="table", table=ATTACK)


def test_the_published_attack_table_is_dealt_exactly_where_the_images_suffice():
    labels = labels_of((824, *ALZHEIMER[1:]))
    parts = deal(labels, 3, partition="table", table=ATTACK)
    assert [part.size for part in parts] == [1747, 1591, 1882]
    assert counts_of(labels, parts, 4)[2].tolist() == [524, 29, 550, 779]


def test_two_of_200_shards_of_300_hold_at_most_two_of_ten_equal_classes():
    labels = labels_of((6000,) * 10)
    parts = partition.shards(labels, 100, 2, generator())
    assert_complete(parts, 60_000)
    assert {part.size for part in parts} == {600}
    assert max((row > 0).sum() for row in counts_of(labels, parts, 10)) == 2


def test_two_shards_hold_at_most_four_of_mnist_s_classes():
    """A shard of 300 spans at most two classes, because every class has more than 300 images."""
    labels = labels_of((5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949))
    parts = partition.shards(labels, 100, 2, generator())
    assert {part.size for part in parts} == {600}
    assert max((row > 0).sum() for row in counts_of(labels, parts, 10)) <= 4


def test_a_small_alpha_gives_uneven_classes_and_a_large_one_even_classes():
    labels = labels_of((1000,) * 4)
    uneven, even = (counts_of(labels, partition.dirichlet(labels, 4, alpha, generator()), 4) for alpha in (0.1, 1000.0))
    assert uneven.max() > 600
    assert 200 < even.min() <= even.max() < 300


def test_dirichlet_gives_up_when_a_client_stays_without_examples():
    with pytest.raises(ConfigError, match=r"task\.alpha = 1e-06 leaves one of 10 clients"):
        deal(labels_of((50, 50)), 10, partition="dirichlet", alpha=1e-6)


def test_natural_clients_are_the_owners_in_order():
    groups = np.array([0, 0, 2, 1, 1, 2, 0])
    labels = np.zeros(7, int)
    assert [part.tolist() for part in partition.natural(groups, 3)] == [[0, 1, 6], [3, 4], [2, 5]]
    parts = deal(labels, 2, owners=groups, partition="natural")
    assert [part.tolist() for part in parts] == [[0, 1, 6], [3, 4]]


def test_auto_takes_the_task_s_default():
    labels, groups = labels_of((10, 10)), np.arange(20) % 2
    parts = partition.deal(TaskConfig(), "natural", dataset(labels, groups), 2, 2, 0)
    assert np.array_equal(parts[1], np.flatnonzero(groups))


def test_a_table_is_read_with_blanks_and_kept_as_a_matrix():
    counts = partition.parse_table(" 1, 2 ;3,4", 2, 2)
    assert counts.dtype == np.intp
    assert counts.tolist() == [[1, 2], [3, 4]]


def test_a_wrong_table_is_refused():
    def check(text, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            partition.parse_table(text, 2, 2)

    assert not failures(
        [
            ("", "task.table is empty"),
            ("1,2", "task.table has 1 rows; the federation has 2 clients"),
            ("1,2;3,4;", "task.table has 3 rows; the federation has 2 clients"),
            ("1,2;3", "task.table row 2 has 1 numbers; the task has 2 classes"),
            ("1,2;3,4,5", "task.table row 2 has 3 numbers; the task has 2 classes"),
            ("1,-2;3,4", "task.table row 1 holds '-2'; a count is a whole number"),
            ("1,2;3,4.5", "task.table row 2 holds '4.5'; a count is a whole number"),
            ("1,two;3,4", "task.table row 1 holds 'two'; a count is a whole number"),
            ("1,;3,4", "task.table row 1 holds ''; a count is a whole number"),
            ("1,1_0;3,4", "task.table row 1 holds '1_0'; a count is a whole number"),
            ("1,٣;3,4", "task.table row 1 holds '٣'; a count is a whole number"),
            ("1,2;3,9999999999", "task.table row 2 holds '9999999999'; a count is a whole number"),
            ("1,2;0,0", "task.table row 2 is all zeros"),
        ],
        check,
    )


def test_a_deal_that_cannot_be_made_is_refused():
    def check(clients, config, message):
        labels = labels_of((10, 10))
        with pytest.raises(ConfigError, match=re.escape(message)):
            deal(labels, clients, classes=2, **({"owners": np.arange(20) % 2} | config))

    assert not failures(
        [
            (21, {"partition": "iid"}, "21 clients cannot share 20 training examples; use at most 20 clients"),
            (0, {}, "clients must be > 0, got 0"),
            (2, {"seed": -1}, "seed must be >= 0, got -1"),
            (3, {"partition": "natural"}, "'natural' has 2 owners for 3 clients; use at most 2 clients"),
            (
                2,
                {"partition": "natural", "owners": None, "name": "digits"},
                "task.partition = 'natural' needs examples with owners, and task.name = 'digits' has none",
            ),
            (
                5,
                {"partition": "shards", "shards_per_client": 5},
                "task.shards-per-client = 5 for 5 clients makes 25 shards, but there are only 20 training examples; "
                "use at most 4",
            ),
            (2, {"partition": "table", "table": "6,5;5,5"}, "11 training examples of class 0; the task has 10"),
            (2, {"partition": "table"}, "task.table is empty"),
        ],
        check,
    )


class TestWholeGroups:
    """Patients of one to six examples each; one of them goes to one client."""

    PATIENTS = np.repeat(np.arange(40), generator(1).integers(1, 7, 40))
    LABELS = np.random.default_rng(2).integers(0, 4, len(PATIENTS))

    def of(self, clients=3, **config):
        return deal(self.LABELS, clients, groups=self.PATIENTS, group="patient", **config)

    def test_a_group_goes_to_one_client(self):
        def check(how):
            parts = self.of(partition=how)
            assert_complete(parts, len(self.PATIENTS))
            held = [set(self.PATIENTS[part].tolist()) for part in parts]
            assert sum(map(len, held)) == 40 == len(set.union(*held))

        assert not failures(["iid", "shards", "dirichlet"], check)

    def test_shards_are_of_the_class_that_most_examples_of_a_group_have(self):
        labels = np.where(np.arange(len(self.PATIENTS)) % 9, self.PATIENTS % 2, 1 - self.PATIENTS % 2)
        parts = deal(labels, 2, 2, groups=self.PATIENTS, group="patient", partition="shards", shards_per_client=1)
        assert all(np.bincount(labels[part]).max() > 0.75 * len(part) for part in parts)

    def test_numbers_without_classes_are_dealt_in_groups_too(self):
        targets = generator().normal(size=len(self.PATIENTS))
        parts = deal(targets, 3, 0, groups=self.PATIENTS, group="patient")
        assert sum(len(np.unique(self.PATIENTS[part])) for part in parts) == 40

    def test_sites_keep_what_they_have_of_a_person(self):
        """A patient of two hospitals stays in both: the task is about such people."""
        owners = np.arange(len(self.PATIENTS)) % 2
        parts = self.of(2, partition="natural", owners=owners)
        assert all((owners[part] == site).all() for site, part in enumerate(parts))
        assert set(self.PATIENTS[parts[0]]) & set(self.PATIENTS[parts[1]])

    def test_a_deal_of_groups_that_cannot_be_made_is_refused(self):
        def check(clients, config, message):
            with pytest.raises(ConfigError, match=re.escape(message)):
                self.of(clients, **config)

        assert not failures(
            [
                (2, {"partition": "table", "table": "1,1,1,1;1,1,1,1"}, "task.partition = 'table' deals exact numbers"),
                (
                    2,
                    {"examples_per_client": 5},
                    "task.examples-per-client = 5 deals exact numbers of examples, and task",
                ),
                (41, {}, "41 clients cannot share 40 groups of training examples; use at most 40 clients"),
                (3, {"partition": "shards", "shards_per_client": 14}, "there are only 40 groups of training examples"),
                (40, {"partition": "dirichlet", "alpha": 0.01}, "without any of the 40 groups of training examples"),
            ],
            check,
        )


def test_an_unknown_default_is_refused():
    with pytest.raises(ConfigError, match=r"task\.partition must be one of iid, shards, .*; got 'odd'"):
        partition.deal(TaskConfig(), "odd", dataset(labels_of((3, 3))), 2, 2, 0)


def test_a_class_of_one_example_stays_in_train():
    train, test = partition.holdout(np.array([0, 1, 1, 1, 1, 1]), 0.9, generator())
    assert 0 in train
    assert test.size == 4


def test_a_holdout_takes_whole_groups():
    groups = generator().integers(30, size=200)
    train, test = partition.holdout(groups % 2, 0.3, generator(), groups)
    assert len(test) and not set(groups[train]) & set(groups[test])
    np.testing.assert_array_equal(np.sort([*train, *test]), np.arange(200))


def test_a_holdout_of_little_is_empty():
    def check(labels):
        train, test = partition.holdout(labels, 0.5, generator())
        assert train.size == len(labels)
        assert test.size == 0
        assert test.dtype == np.intp

    assert not failures([np.array([], int), np.zeros(1, int), np.arange(5)], check)


class TestClientsOfOneSize:
    """100, 1000 and 10,000 clients of 600 examples, a hundred times smaller."""

    LABELS = labels_of((60, 60, 60, 60, 60, 60, 60, 60, 60, 60))

    def of(self, clients, size=6, **config):
        return deal(self.LABELS, clients, classes=10, examples_per_client=size, **config)

    def test_as_many_as_there_are_examples_for_share_them_all(self):
        def check(how):
            assert_complete(self.of(100, partition=how), 600)

        assert not failures(["iid", "shards"], check)

    def test_each_has_so_many_different_examples(self):
        def check(clients, how):
            parts = self.of(clients, partition=how)
            assert len(parts) == clients
            assert all(len(part) == 6 and (np.diff(part) > 0).all() for part in parts)

        assert not failures([(clients, how) for clients in [1, 40, 101, 1000] for how in ["iid", "shards"]], check)

    def test_examples_repeat_evenly_and_in_other_company(self):
        parts = self.of(1000, partition="iid")
        assert (np.bincount(np.concatenate(parts)) == 10).all()
        assert len({tuple(part) for part in parts}) == 1000

    def test_shards_are_of_one_label_where_they_come_out_even(self):
        counts = counts_of(self.LABELS, self.of(1000, partition="shards"), 10)
        assert ((counts > 0).sum(axis=1) <= 2).all() and set(np.unique(counts)) == {0, 3, 6}

    def test_what_does_not_come_out_even_sits_out(self):
        parts = self.of(200, size=7, partition="iid")
        first, second = np.concatenate(parts[:85]), np.concatenate(parts[85:170])
        assert len(np.unique(first)) == len(first) == 595 == len(np.unique(second))
        assert set(first) != set(second)

    def test_the_seed_decides(self):
        mine, same = (np.array(self.of(150, partition="iid")) for _ in range(2))
        np.testing.assert_array_equal(mine, same)
        other = np.array(deal(self.LABELS, 150, classes=10, seed=8, examples_per_client=6))
        assert (mine != other).any()

    def test_impossible(self):
        def check(config, said):
            with pytest.raises(ConfigError, match=said):
                self.of(3, **config)

        assert not failures(
            [
                ({"size": 601}, "examples-per-client = 601 must be at most the 600 training examples"),
                ({"size": 7, "partition": "shards"}, "must be a multiple of task.shards-per-client = 2"),
            ],
            check,
        )

    def test_where_it_has_no_effect_it_is_refused(self):
        def check(how):
            from cloister.config.run import parse

            with pytest.raises(
                ConfigError, match=f"examples-per-client = 6 has no effect with task.partition = '{how}'"
            ):
                parse(
                    {"task.partition": how, "task.examples-per-client": 6, "task.table": "6" if how == "table" else ""}
                )
            with pytest.raises(ConfigError, match="goes with iid and shards, not with 'natural'"):
                partition.deal(TaskConfig(examples_per_client=2), "natural", dataset(self.LABELS), 2, 10, 0)

        assert not failures(["dirichlet", "natural", "table"], check)
