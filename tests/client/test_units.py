"""Rate, steps and answers of a node follow from the size that its operator states, not from rows."""

from dataclasses import replace

import numpy as np
import pytest
from asking import (
    DP_SGD,
    answer,
    arrays_of,
    entries_of,
    node_at,
    own_node,
    policy_file,
    request_of_kind,
    write_data,
)
from support import failures

from cloister.client import dp_sgd as subject
from cloister.client.costs import plan_of, planned_steps
from cloister.client.data import local_data
from cloister.client.dp_sgd import Units, size_of
from cloister.client.node import MAXIMUM_SIZE, node_of
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian, Repeated
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.dpsgd import noise
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.tasks import TASKS
from cloister.tasks.base import Examples
from cloister.tasks.datasets.characters import Digits
from cloister.tasks.recipe import Augmentation
from cloister.training.plan import TrainingPlan
from cloister.utils.errors import ConfigError, DataError, PrivacyError

STATED = 40
POLICY = {"mechanisms": ["dp-sgd"], "min_server_noise_multiplier": None, "max_example_epsilon": 1e6}


def steps_of(node, settings=DP_SGD):
    return planned_steps(request_of_kind(settings=settings), node_at(settings, node))


class TestWhatIsStated:
    def test_by_the_configuration_or_the_policy_which_wins(self, tmp_path):
        policy = str(policy_file(tmp_path, **POLICY, public_size=70))
        silent = str(policy_file(tmp_path / "silent", **POLICY))
        assert node_at(node={}).config.public_size == 0
        assert node_at(node={"public-size": 50}).config.public_size == 50
        assert node_at(node={"public-size": 50, "policy": policy}).config.public_size == 70
        assert node_at(node={"public-size": 50, "policy": silent}).config.public_size == 50

    def test_what_is_no_size(self):
        def check(stated):
            with pytest.raises(ConfigError, match=r"^node configuration: public-size = .* is not valid: it must be "):
                node_of({"public-size": stated})

        assert failures([-1, True, 1.0, "40", MAXIMUM_SIZE + 1], check) == []

    def test_a_simulated_client_has_what_it_was_dealt(self):
        assert size_of(node_of({"partition-id": 0, "num-partitions": 4, "public-size": 9})) == 0
        steps = steps_of({"partition-id": 0, "num-partitions": 4})
        assert steps.examples in (359, 360) and steps.batch_size == 10

    def test_a_node_with_data_that_states_none_is_refused_before_its_data_is_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cloister.client.data._own_file", lambda *_: pytest.fail("it was read"))
        for data in (write_data(tmp_path), tmp_path / "none.npz"):
            node = own_node(tmp_path, data) | {"public-size": 0}
            reply = answer(DP_SGD, node)
            assert reply.error.reason.startswith(
                "PrivacyError: this node has data of its own and states no public-size"
            )
            assert not list((tmp_path / "ledgers").glob("*.jsonl"))

    def test_shuffled_batches_would_show_the_true_size(self, tmp_path):
        with pytest.raises(PrivacyError, match=r"privacy.batch-sampling = 'shuffle' would show how many examples"):
            steps_of(own_node(tmp_path), DP_SGD | {"privacy.batch-sampling": "shuffle"})
        assert steps_of(None, DP_SGD | {"privacy.batch-sampling": "shuffle"}).sampling == "shuffle"

    def test_other_runs_need_none(self, tmp_path):
        assert plan_of(request_of_kind(), node_at(node={"data-path": str(tmp_path)})).public_size == 0


class Counted:
    """Counts private steps and who is in each."""

    def __init__(self, monkeypatch):
        self.batches, real = [], noise.noisy_sum

        def noisy_sum(gradients, *arguments, **options):
            listed = list(gradients)
            self.batches.append(len(listed))
            return real(iter(listed), *arguments, **options)

        monkeypatch.setattr("cloister.client.dp_sgd.noisy_sum", noisy_sum)


class TestTheTrueNumberShowsNowhere:
    @pytest.mark.parametrize("count", [0, 1, 39, 40, 41, 90])
    def test_rate_steps_and_charge(self, tmp_path, monkeypatch, count):
        counted, node = Counted(monkeypatch), own_node(tmp_path, write_data(tmp_path, count))
        settings = DP_SGD | {"client.local-epochs": 2}
        arrays_of(answer(settings, node))
        (entry,) = entries_of(node, "example")
        assert entry.event == Repeated(Gaussian(1.0, Sampling("bounded-poisson", 10 / STATED)), 8)
        assert len(counted.batches) == 8, "as many steps as were charged"

    def test_the_rate_is_that_of_the_stated_size(self, tmp_path, monkeypatch):
        """20 steps at q = 1/4 over 40 of 400 rows: 200 in all, give or take 6 standard deviations of 12.

        Over all that are there it would be 2,000.
        """
        counted, node = Counted(monkeypatch), own_node(tmp_path, write_data(tmp_path, 400))
        arrays_of(answer(DP_SGD | {"client.local-epochs": 5}, node))
        assert len(counted.batches) == 20
        assert abs(sum(counted.batches) - 200) < 6 * np.sqrt(800 * 0.25 * 0.75)

    def test_the_noise_of_a_reply(self, tmp_path):
        """With a clip next to none a reply is noise: its size is that of the planned steps, whatever the rows.

        8 steps of deviation σ·S/B each, over 650 parameters: within 20 % is more than 7 standard errors.
        """
        settings = DP_SGD | {
            "client.local-epochs": 2,
            "client.learning-rate": 1.0,
            "privacy.dp-sgd-noise-multiplier": 1000.0,
            "privacy.dp-sgd-clipping-norm": 1e-3,
        }
        for count in (0, 40, 90):
            node = own_node(tmp_path / str(count), write_data(tmp_path, count, name=f"{count}.npz"))
            moved = np.concatenate([array.ravel() for array in arrays_of(answer(settings, node)).values()])
            assert np.std(moved) == pytest.approx(np.sqrt(8) * 1000 * 1e-3 / 10, rel=0.2)

    def test_the_count_that_weighs_is_the_stated_one(self, tmp_path):
        settings = DP_SGD | {
            "privacy.server": "global-dp",
            "strategy.weighting": "examples",
            "privacy.examples-cap": 100.0,
        }
        for count in (3, 40, 77):
            node = own_node(tmp_path / str(count), write_data(tmp_path, count, name=f"{count}.npz"))
            assert dict(answer(settings, node).content["metrics"]) == {"num-examples": STATED}


def test_groups_are_counted_in_groups(tmp_path):
    data = write_data(tmp_path, 40, patient=np.arange(40) // 4)
    node = own_node(tmp_path, data) | {"public-size": 10}
    steps = steps_of(node, DP_SGD | {"task.group": "patient", "client.batch-size": 5})
    assert (steps.examples, steps.rate, steps.count) == (10, 0.5, 2)


def test_a_batch_of_groups_has_all_their_examples_and_tells_them_apart():
    examples = Examples(np.arange(6.0)[:, None], np.arange(6), np.array(["b", "a", "c", "a", "b", "a"]))
    units = Units.of(examples, cap=2)
    assert [len(units.examples_of(number)) for number in range(len(units))] == [2, 2, 1], "of a, b and c"
    batch = units.of_batch(np.array([2, 1]))
    assert batch.y.tolist() == [2, 0, 4] and batch.groups.tolist() == [0, 1, 1]
    assert batch.x.ravel().tolist() == batch.y.tolist()


def test_a_size_in_the_policy_decides(tmp_path):
    policy = str(policy_file(tmp_path, **POLICY, public_size=80))
    node = own_node(tmp_path) | {"policy": policy}
    arrays_of(answer(DP_SGD, node))
    (entry,) = entries_of(node, "example")
    assert entry.event == Repeated(Gaussian(1.0, Sampling("bounded-poisson", 10 / 80)), 8)


class TestGroups:
    """With `task.group` a patient with a hundred rows moves the model by no more than one with a single row."""

    SETTINGS = DP_SGD | {
        "task.group": "patient",
        "client.learning-rate": 1.0,
        "client.batch-size": 10,
        "privacy.noise-seed": 1,
        "privacy.dp-sgd-noise-multiplier": 0.0,
        "privacy.dp-sgd-clipping-norm": 0.01,
        "privacy.group-cap": 7,
    }

    def model(self, folder, patients, size=10):
        """Trained by all groups in one step (B = N), without noise."""
        x, y = np.random.default_rng(0).random((len(patients), 64)), np.arange(len(patients)) % 10
        node = own_node(folder, write_data(folder, x=x, y=y, patient=np.asarray(patients))) | {"public-size": size}
        sent = arrays_of(answer(self.SETTINGS, node))
        return np.concatenate([array.ravel() for array in sent.values()]).astype(np.float64)

    def test_one_more_moves_the_model_by_the_clip_over_the_batch_size(self, tmp_path_factory):
        def check(rows):
            tmp_path = tmp_path_factory.mktemp("case")
            others = [number for number in range(9) for _ in range(4)]
            without = self.model(tmp_path / "without", others)
            moved = np.linalg.norm(self.model(tmp_path / "with", [*others, *[99] * rows]) - without)
            assert moved == pytest.approx(0.01 / 10, rel=1e-3), "every gradient here is longer than the clip"

        assert failures([1, 7, 8, 20], check) == []

    def test_rows_of_several_patients_move_it_further(self, tmp_path):
        """The control: rows of twenty patients do what those of one cannot."""
        others = [number for number in range(9) for _ in range(4)]
        without = self.model(tmp_path / "without", others)
        moved = np.linalg.norm(self.model(tmp_path / "with", [*others, *range(100, 120)]) - without)
        assert moved > 1.5 * 0.01 / 10

    def test_one_whose_name_is_written_in_several_ways_is_one(self, tmp_path):
        others = [f"p{number}" for number in range(9) for _ in range(4)]
        spellings = ["Jos\u00e9 M", " Jos\u00e9 M", "Jos\u00e9 M\t", "Jos\u00e9  M", "Jos\u00e9\u00a0M", "Jose\u0301 M"]
        without = self.model(tmp_path / "without", others)
        moved = np.linalg.norm(self.model(tmp_path / "with", [*others, *spellings]) - without)
        assert moved == pytest.approx(0.01 / 10, rel=1e-3)

    def test_rows_that_name_nobody_are_left_out_each_by_itself(self, tmp_path):
        """Together they would be one patient, whose gradient each of them could turn around."""
        others = [f"p{number}" for number in range(9) for _ in range(4)]
        without = self.model(tmp_path / "without", others)
        np.testing.assert_array_equal(self.model(tmp_path / "with", [*others, "", " ", "\u00a0"]), without)

    @pytest.mark.parametrize("letters", [1, 2])
    def test_a_name_that_is_no_text_is_left_out_by_itself(self, tmp_path, letters):
        """A file may hold any four bytes as a letter; Python refused all names for one of one such letter."""
        others = [f"p{number}" for number in range(9) for _ in range(4)]
        broken = np.array([0x110041] * letters + [0] * (2 - letters), np.uint32).view("U2")
        without = self.model(tmp_path / "without", others)
        np.testing.assert_array_equal(self.model(tmp_path / "with", np.r_[others, broken]), without)

    def test_no_more_of_its_rows_count_than_the_cap(self, tmp_path_factory):
        """Of ten rows, one of each class, only those that count make their class likelier."""

        def check(cap):
            tmp_path = tmp_path_factory.mktemp("case")
            data = write_data(tmp_path, x=np.full((10, 64), 0.5), y=np.arange(10), patient=np.zeros(10, int))
            settings = self.SETTINGS | {"privacy.group-cap": cap, "privacy.dp-sgd-clipping-norm": 1000.0}
            sent = arrays_of(answer(settings, own_node(tmp_path, data) | {"public-size": 10}))
            assert (sent["softmax/bias"] > 0).sum() == cap

        assert failures([1, 3, 7], check) == []

    def test_it_is_charged_to_groups_and_their_true_number_shows_nowhere(self, tmp_path):
        events = set()
        for count in (1, 5, 20):
            folder = tmp_path / str(count)
            node = own_node(folder, write_data(folder, 40, patient=np.arange(40) % count)) | {"public-size": 20}
            arrays_of(answer(DP_SGD | {"task.group": "patient"}, node))
            assert not entries_of(node, "example")
            (entry,) = entries_of(node, "group")
            events.add(entry.event)
        assert events == {Repeated(Gaussian(1.0, Sampling("bounded-poisson", 0.5)), 2)}

    def test_a_failure_is_answered_like_a_success(self, tmp_path):
        node = own_node(tmp_path, tmp_path / "none.npz")
        sent = arrays_of(answer(DP_SGD | {"task.group": "patient"}, node))
        assert all(len(np.unique(array)) > array.size // 2 for array in sent.values())
        assert len(entries_of(node, "group")) == 1


class TestUnits:
    SIX = Examples(np.arange(6.0)[:, None], np.arange(6), np.array(["b", "a", "c", "a", "b", "a"]))
    LONE = Examples(np.arange(6.0)[:, None], np.arange(6))
    NOBODY = Examples(np.zeros((0, 1)), np.zeros(0))

    def plan(self, public_size, batch_size=2, epochs=3):
        return TrainingPlan(epochs, batch_size, 0.1, 0.0, (0,), 1, public_size)

    def test_the_ends_of_a_size(self):
        assert node_at(node={"public-size": MAXIMUM_SIZE}).config.public_size == MAXIMUM_SIZE == 10**9
        assert node_at(node={"public-size": 0}).config.public_size == 0
        with pytest.raises(ConfigError) as refused:
            node_of({"public-size": -1})
        assert str(refused.value) == (
            "node configuration: public-size = -1 is not valid: it must be greater than or equal to 0"
        )

    def test_a_size_that_is_needed_and_not_stated(self):
        with pytest.raises(PrivacyError) as refused:
            size_of(node_of({"data-path": "anywhere"}))
        assert str(refused.value) == (
            "this node has data of its own and states no public-size, in its policy or its configuration: the noise of "
            "dp-sgd would show how many examples it has"
        )
        assert size_of(node_of({"data-path": "anywhere", "public-size": 7})) == 7
        assert size_of(node_of({})) == 0

    def test_which_of_a_group_count_is_drawn_by_the_seed_or_anew(self, monkeypatch):
        asked = []
        monkeypatch.setattr(subject, "units_of", lambda *given: asked.append(given) or [])
        Units.of(self.SIX, 2, 7)
        Units.of(self.SIX, 3)
        assert [given[1:] for given in asked] == [(2, 7), (3, None)]
        assert all(given[0] is self.SIX.groups for given in asked)

    def test_examples_without_groups_are_units_each(self):
        units = Units.of(self.LONE, 1)
        assert units.members is None and len(units) == 6 and units.examples is self.LONE
        assert units.examples_of(4).y.tolist() == [4] and units.examples_of(4).groups is None
        batch = units.of_batch(np.array([5, 0]))
        assert batch.y.tolist() == [5, 0] and batch.x.ravel().tolist() == [5.0, 0.0] and batch.groups is None

    def test_groups_are_units_together(self):
        units = Units.of(self.SIX, 9, 1)
        assert len(units) == 3 and units.examples is self.SIX
        assert sorted(units.examples_of(0).y.tolist()) == [1, 3, 5]
        batch = units.of_batch(np.array([2, 0]))
        assert sorted(batch.y.tolist()) == [1, 2, 3, 5] == sorted(batch.x.ravel().tolist())
        assert {group: set(batch.y[batch.groups == group].tolist()) for group in (0, 1)} == {0: {2}, 1: {1, 3, 5}}

    @pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
    @pytest.mark.parametrize(
        ("examples", "public", "size"), [(SIX, 0, 3), (SIX, 40, 40), (LONE, 0, 6), (NOBODY, 0, 1), (NOBODY, 5, 5)]
    )
    def test_steps_are_those_of_the_public_size(self, examples, public, size, sampling):
        privacy = parse(DP_SGD | {"privacy.batch-sampling": sampling}).privacy
        assert Units.of(examples, 9).steps(self.plan(public), privacy) == LocalSteps(size, 2, 3, sampling)


class Ungrouped(Digits):
    """Digits by somebody who did not think of groups, as in a table of their own."""

    def rows(self, path):
        return replace(super().rows(path), groups=None)

    def read(self, path):
        return self.checked(self.rows(path), path)


def test_a_task_that_reads_no_groups_trains_on_nothing_where_groups_are_promised(tmp_path, monkeypatch):
    """Each row was a unit, and a patient with all of them moved the sum by as many times S as there are."""
    monkeypatch.setitem(TASKS._table, "ungrouped", f"{__name__}:Ungrouped")
    settings = DP_SGD | {"task.name": "ungrouped", "task.group": "patient"}
    node = own_node(tmp_path, write_data(tmp_path, 30, patient=np.zeros(30, int)))
    taken = []
    monkeypatch.setattr(Units, "examples_of", lambda units, number: taken.append(number))
    arrays_of(answer(settings, node))
    assert not taken
    with pytest.raises(DataError, match="reads no groups from"):
        local_data(parse(settings).task, node_of(node), seed=1)


def test_examples_are_changed_at_random_by_the_key_of_their_step():
    def jittered(image, rng):
        return image + rng.normal(size=image.shape).astype(np.float32)

    examples = Examples(np.zeros((6, 3), np.float32), np.arange(6))
    taken = [
        Units.of(examples, cap=0).changed_by(Augmentation((jittered,)), key).of_batch(np.array([4, 1]))
        for key in (b"one", b"one", b"another")
    ]
    assert [list(each.y) for each in taken] == [[4, 1]] * 3 and np.isfinite(taken[0].x).all()
    assert (taken[0].x == taken[1].x).all() and (taken[0].x != taken[2].x).all()
