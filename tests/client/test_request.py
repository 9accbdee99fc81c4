"""The node's door: what a message may say, and that a refusal tells nothing of the node's data."""

import numpy as np
import pytest
from asking import (
    BASE,
    CLUSTERED,
    DP_SGD,
    GLOBAL,
    OPEN,
    SOFTMAX,
    answer,
    arrays_of,
    context_of,
    gaussians,
    message_of,
    own_node,
    policy_file,
    write_data,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from support import failures

from cloister.client.request import (
    EvaluateRequest,
    KeepRequest,
    Reply,
    TrainRequest,
    promised,
    refuse_misfit,
    request_of,
    run_config,
)
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian, Unaccounted
from cloister.tasks import TASKS
from cloister.tasks.datasets.characters import Digits
from cloister.utils.arrays import stacked, to_record
from cloister.utils.errors import ConfigError, FederationError, PrivacyError

TWO = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])
KINDS = {"train": TrainRequest, "evaluate": EvaluateRequest, "query": KeepRequest}


def parsed(message, settings=OPEN, kind=TrainRequest):
    return request_of(kind, message, context_of(settings))


class TestWhatIsUnderstood:
    def test_everything_that_a_training_message_says(self):
        fields = {"proximal_mu": 0.5, "privacy_events": gaussians(2.0, 3.0)}
        found = parsed(message_of(record={"server-round": 7, "seed": 5}, **fields), GLOBAL)
        assert (found.round, found.seed, found.proximal_mu) == (7, 5, 0.5)
        assert found.promise == (Gaussian(2.0), Gaussian(3.0))
        assert found.config == parse(GLOBAL) and found.run == "1"
        (model,) = found.models
        assert list(model) == list(SOFTMAX)

    def test_the_least_that_a_message_must_say(self):
        def check(kind):
            found = parsed(message_of(kind=kind), kind=KINDS[kind])
            assert type(found) is KINDS[kind] and (found.round, found.seed) == (1, 3)

        assert failures([(kind,) for kind in KINDS], check) == []

    def test_a_configuration_that_would_fill_the_memory(self):
        with pytest.raises(FederationError, match=r"has \d{6} characters, at most 65536 are read"):
            parsed(message_of(), OPEN | {"strategy.options": "x" * 100_000})

    def test_a_whole_number_for_a_penalty(self):
        assert parsed(message_of(proximal_mu=1)).proximal_mu == 1.0

    def test_as_many_models_as_the_run_has_clusters(self):
        def check(count):
            models = [SOFTMAX] * count
            settings = CLUSTERED | {"privacy.clusters": count}
            found = parsed(message_of(stacked(models), hypotheses=count), settings)
            assert len(found.models) == count and all(list(model) == list(SOFTMAX) for model in found.models)

        assert failures([1, 2, 3], check) == []


class TestRecordsAndFields:
    @pytest.mark.parametrize("kind", KINDS)
    def test_an_unknown_field(self, kind):
        with pytest.raises(FederationError, match=r"unknown field 'test-fraction' in the server's message; known: "):
            parsed(message_of(kind=kind, test_fraction=0.1), kind=KINDS[kind])

    def test_what_only_training_messages_carry(self):
        def check(field, kind):
            with pytest.raises(FederationError, match="unknown field"):
                parsed(message_of(kind=kind, **field), kind=KINDS[kind])

        cases = [
            (field, kind)
            for field in [{"proximal_mu": 0.1}, {"privacy_events": gaussians(1.0)}]
            for kind in ["evaluate", "query"]
        ]
        assert failures(cases, check) == []

    def test_an_unknown_record(self):
        def check(record):
            message = message_of()
            message.content["more"] = record
            with pytest.raises(FederationError, match="must hold the records 'arrays' and 'config' and no other"):
                parsed(message)

        assert failures([ArrayRecord(), ConfigRecord(), MetricRecord()], check) == []

    @pytest.mark.parametrize("name", ["arrays", "config"])
    def test_a_record_that_is_missing(self, name):
        message = message_of()
        del message.content[name]
        with pytest.raises(FederationError, match="must hold the records 'arrays' and 'config'"):
            parsed(message)

    def test_records_under_each_others_names(self):
        message = message_of()
        arrays, config = message.content["arrays"], message.content["config"]
        message.content["arrays"], message.content["config"] = config, arrays
        with pytest.raises(FederationError, match="must hold the records"):
            parsed(message)


class TestNumbers:
    def test_a_whole_number_that_is_none_or_out_of_range(self):
        def check(name, value):
            record = {"server-round": 1, "seed": 3} | {name: value}
            record = {key: value for key, value in record.items() if value is not None}
            with pytest.raises(FederationError, match=f"must carry '{name}' as a whole number from 0 to"):
                parsed(message_of(record=record))

        cases = [(name, value) for name in ["server-round", "seed"] for value in [None, True, 1.0, "1", -1, 2**31, [1]]]
        assert failures(cases, check) == []

    @pytest.mark.parametrize("value", [0, 2**31 - 1])
    def test_the_ends_of_the_range(self, value):
        assert parsed(message_of(record={"server-round": value, "seed": value})).seed == value

    def test_a_penalty_that_is_none(self):
        def check(value):
            with pytest.raises(FederationError, match="must carry 'proximal-mu' as a number from 0 to"):
                parsed(message_of(proximal_mu=value))

        assert failures([True, -0.1, np.nan, np.inf, 1.1e6, "1", [0.1]], check) == []

    def test_a_promise_that_is_none(self):
        def check(value):
            with pytest.raises(PrivacyError, match="privacy-events"):
                parsed(message_of(privacy_events=value), GLOBAL)

        assert failures([1.0, [], [0.0], ["2"], "2", True, gaussians(0.0), gaussians(2.0, -1.0)], check) == []

    def test_a_promise_that_no_accountant_has_a_price_for(self):
        def check(value):
            with pytest.raises(PrivacyError, match="noise multiplier"):
                parsed(message_of(privacy_events=gaussians(value)), GLOBAL)

        assert failures([1e-7, 1e7, np.inf], check) == []

    def test_no_promise_is_a_release_of_which_nothing_can_be_claimed(self):
        (event,) = promised({})
        assert isinstance(event, Unaccounted)


class TestHowManyModels:
    """The attack: a message that says one model and stacks several has the client choose among them."""

    def test_several_where_the_run_has_one(self):
        def check(claimed):
            fields = {} if claimed is None else {"hypotheses": claimed}
            message = message_of(TWO, **fields)
            if claimed is None:
                # One model of four arrays, which is none of this task's.
                reply = answer(OPEN, None, message)
                assert "is in only one of the model sent and the model here" in reply.error.reason
                return
            with pytest.raises(FederationError, match="contradicts the run configuration, which has no such field"):
                parsed(message)

        assert failures([None, 0, 1, True, 2, 1.0, 2.0, "2", [2], -1], check) == []

    def test_another_number_than_the_run_has(self):
        def check(claimed):
            fields = {} if claimed is None else {"hypotheses": claimed}
            with pytest.raises(FederationError, match="contradicts the run configuration, which has hypotheses = 2"):
                parsed(message_of(TWO, **fields), CLUSTERED)

        assert failures([None, 0, 1, True, 3, 2.0, "2", [2]], check) == []

    @pytest.mark.parametrize("count", [1, 3])
    def test_another_number_than_it_says(self, count):
        with pytest.raises(FederationError, match=f"{count} models were found in the server's message, expected 2"):
            parsed(message_of(stacked([SOFTMAX] * count), hypotheses=2), CLUSTERED)

    def test_true_is_not_one(self):
        message = message_of(stacked([SOFTMAX]), hypotheses=True)
        with pytest.raises(FederationError, match="contradicts"):
            parsed(message, CLUSTERED | {"privacy.clusters": 1})

    def test_what_are_no_hypotheses(self):
        def check(names):
            arrays = {name: np.zeros(3, np.float32) for name in names}
            with pytest.raises(FederationError, match="hypotheses 0 to k - 1"):
                parsed(message_of(arrays, hypotheses=2), CLUSTERED)

        cases = [(names,) for names in [("0/a", "2/a"), ("0/a", "1/b"), ("0/a", "1/a", "1/b"), ("a", "b")]]
        assert failures(cases, check) == []

    def test_nothing_is_charged_and_nothing_of_the_choice_leaves(self, tmp_path_factory):
        """A server once read a patient's class from two stacked models, by the one that came back trained."""

        def check(claimed):
            tmp_path = tmp_path_factory.mktemp("case")
            refusals = set()
            for number, label in enumerate((0, 1)):
                data = write_data(tmp_path, 50, name=f"{number}.npz", y=np.full(50, label))
                node = own_node(tmp_path / str(number), data)
                reply = answer(DP_SGD, node, message_of(TWO, hypotheses=claimed))
                refusals.add(reply.error.reason)
                assert not (tmp_path / str(number) / "ledgers").exists()
            assert len(refusals) == 1

        assert failures([1, True, 2], check) == []


class TestArrays:
    def test_one_number_that_is_not_finite(self):
        def check(bad, kind):
            arrays = {name: array.copy() for name, array in SOFTMAX.items()}
            arrays["softmax/bias"][9] = bad
            with pytest.raises(
                FederationError, match="array 'softmax/bias' in the server's message must hold finite floats"
            ):
                parsed(message_of(arrays, kind), kind=KINDS[kind])

        assert failures([(bad, kind) for bad in [np.nan, np.inf, -np.inf] for kind in KINDS], check) == []

    def test_the_last_hypothesis_is_looked_at_too(self):
        arrays = TWO | {"1/softmax/bias": np.full(10, np.nan, np.float32)}
        with pytest.raises(FederationError, match=r"'1/softmax/bias' .* must hold finite floats"):
            parsed(message_of(arrays, hypotheses=2), CLUSTERED)

    def test_what_are_no_floats(self):
        def check(dtype):
            with pytest.raises(FederationError, match="must hold finite floats"):
                parsed(message_of({"softmax/kernel": np.zeros((64, 10), dtype)}))

        assert failures([np.int32, np.bool_, np.uint8], check) == []

    def test_bytes_that_are_no_array(self):
        def check(data):
            message = message_of()
            record = ArrayRecord()
            record["softmax/bias"] = Array("float32", (10,), "numpy.ndarray", data)
            message.content["arrays"] = record
            with pytest.raises(FederationError, match="an array that cannot be read"):
                parsed(message)

        assert failures([b"", b"\x93NUMPY", b"pickle"], check) == []

    def test_a_model_that_is_not_the_tasks(self):
        def check(changes, says, settings):
            arrays = {name: array for name, array in (SOFTMAX | changes).items() if array is not None}
            reply = answer(settings, None, message_of(arrays))
            with pytest.raises(AssertionError, match=says):
                arrays_of(reply)

        cases = [
            (changes, says, settings)
            for changes, says in [
                (
                    {"softmax/bias": np.zeros(11, np.float32)},
                    r"must have shape \(10,\) and dtype float32, found \(11,\)",
                ),
                ({"softmax/bias": np.zeros((10, 1), np.float32)}, r"found \(10, 1\) and float32"),
                ({"softmax/bias": np.zeros(10)}, r"found \(10,\) and float64"),
                ({"softmax/bias": np.zeros(10, np.float16)}, r"found \(10,\) and float16"),
                ({"more": np.zeros(1, np.float32)}, "array 'more' is in only one"),
                ({"softmax/bias": None}, "array 'softmax/bias' is in only one"),
            ]
            for settings in [OPEN, DP_SGD]
        ]
        assert failures(cases, check) == []


class TestConfiguration:
    def test_one_that_contradicts_itself(self):
        def check(settings, says):
            with pytest.raises(ConfigError, match=says):
                parsed(message_of(), BASE | settings)

        cases = [
            ({"task.modell": "softmax"}, "unknown key 'task.modell'"),
            ({"client.local-epochs": True}, "client.local-epochs = True is not valid"),
            ({"task.test-fraction": np.nan}, "task.test-fraction = nan"),
            ({"privacy.client": "dp-sgd", "privacy.radius": 1.0}, "privacy.radius = 1.0 has no effect"),
        ]
        assert failures(cases, check) == []

    def test_true_and_one_are_not_taken_for_each_other(self):
        assert parsed(message_of(), OPEN | {"client.local-epochs": 1}).config.client.local_epochs == 1
        with pytest.raises(ConfigError):
            parsed(message_of(), OPEN | {"client.local-epochs": True})


BAD = {
    "field": ({}, {"more": 1}),
    "round": ({}, {"server_round": -1}),
    "models": ({}, {"hypotheses": 1}),
    "array": ({"softmax/bias": np.full(10, np.nan, np.float32)}, {}),
    "shape": ({"softmax/bias": np.zeros(11, np.float32)}, {}),
    "promise": ({}, {"privacy_events": gaussians(0.0)}),
}


def test_a_refusal_is_the_same_whatever_the_data(tmp_path_factory):
    def check(settings, bad):
        tmp_path = tmp_path_factory.mktemp("case")
        arrays, fields = BAD[bad]
        reasons = set()
        files = [write_data(tmp_path, 50), write_data(tmp_path, 7, name="few.npz"), tmp_path / "none.npz"]
        for number, data in enumerate(files):
            node = own_node(tmp_path / str(number), data)
            reasons.add(answer(settings, node, message_of(SOFTMAX | arrays, **fields)).error.reason)
        (reason,) = reasons
        assert str(tmp_path) not in reason

    assert failures([(settings, bad) for settings in [OPEN, DP_SGD] for bad in BAD], check) == []


def test_a_message_under_a_policy_is_refused_at_the_door_first(tmp_path):
    """A text of the policy would tell of it, and no budget is touched for what is no request."""
    node = own_node(tmp_path, policy=str(policy_file(tmp_path)))
    reply = answer(OPEN, node, message_of(more=1))
    assert reply.error.reason.startswith("FederationError: unknown field 'more'")
    assert not (tmp_path / "ledgers").exists()


def test_arrays_are_read_without_a_copy():
    message = message_of()
    message.content["arrays"] = to_record(SOFTMAX)
    (model,) = parsed(message).models
    assert model["softmax/kernel"] is not SOFTMAX["softmax/kernel"]
    assert np.shares_memory(model["softmax/kernel"], SOFTMAX["softmax/kernel"])


def test_what_a_reply_is_without_more():
    assert (Reply().arrays, dict(Reply().metrics), Reply().chosen) == (None, {}, 0)
    assert not list(Reply().content())
    assert list(Reply(metrics={"loss": 0.5}).content()) == ["metrics"]
    sent = Reply(SOFTMAX, chosen=1).content()
    assert list(sent) == ["metrics", "arrays"] and list(sent["arrays"]) == list(SOFTMAX)
    assert dict(Reply(SOFTMAX, {"loss": 0.5}).content()["metrics"]) == {"loss": 0.5}


def test_what_a_training_message_need_not_say():
    found = parsed(message_of())
    assert (found.proximal_mu, found.promise) == (0.0, (Unaccounted("the server claims nothing for this round"),))
    bare = TrainRequest(found.config, "1", 1, 3, found.models)
    assert (bare.proximal_mu, bare.promise, bare.ledger_head) == (0.0, (), "")


FIELDS = "known: server-round, seed, hypotheses, frozen-sha256"
EXACTLY = [
    (
        "train",
        {"much": 1, "more": 1},
        {},
        f"unknown field 'more' in the server's message; {FIELDS}, proximal-mu, privacy-events, ledger-head, "
        "secure-message, clipping-norm, distance",
    ),
    ("evaluate", {"proximal_mu": 0.1}, {}, f"unknown field 'proximal-mu' in the server's message; {FIELDS}"),
    ("query", {"proximal_mu": 0.1}, {}, f"unknown field 'proximal-mu' in the server's message; {FIELDS}"),
    ("train", {"seed": -1}, {}, "the server's message must carry 'seed' as a whole number from 0 to 2.14748e+09"),
    ("train", {"proximal_mu": -1}, {}, "the server's message must carry 'proximal-mu' as a number from 0 to 1e+06"),
    (
        "train",
        {"hypotheses": [123456789, 123456789]},
        {},
        "hypotheses = '[123456789, 12345678' in the server's message contradicts the run configuration, which has no "
        "such field",
    ),
    (
        "train",
        {"hypotheses": 3},
        CLUSTERED,
        "hypotheses = '3' in the server's message contradicts the run configuration, which has hypotheses = 2",
    ),
    (
        "train",
        {"privacy_events": []},
        {},
        "'privacy-events' in the server's message: what the server promises must be a list of 1 to 16 events",
    ),
]


def test_a_refusal_names_the_field_and_what_is_valid():
    def check(kind, fields, settings, says):
        message = message_of(kind=kind, **{"seed": 3} | fields)
        with pytest.raises((FederationError, PrivacyError)) as refused:
            parsed(message, OPEN | settings if settings else OPEN, KINDS[kind])
        assert str(refused.value) == says

    assert failures(EXACTLY, check) == []


def test_a_refusal_of_records_and_arrays():
    message = message_of()
    message.content["more"] = MetricRecord()
    with pytest.raises(FederationError) as refused:
        parsed(message)
    assert str(refused.value) == "the server's message must hold the records 'arrays' and 'config' and no other"
    with pytest.raises(FederationError) as refused:
        parsed(message_of({"softmax/bias": np.zeros(3, np.int64)}))
    assert str(refused.value) == "array 'softmax/bias' in the server's message must hold finite floats"


OWN = {"b": np.zeros((2, 3), np.float32), "a": np.zeros(4)}


def test_a_misfit_is_named():
    def check(sent, says):
        refuse_misfit([OWN, OWN], OWN)
        with pytest.raises(FederationError) as refused:
            refuse_misfit([OWN, sent], OWN)
        assert str(refused.value) == says

    cases = [
        ({}, "array 'a' is in only one of the model sent and the model here; are the tasks the same?"),
        (
            OWN | {"c": OWN["a"]},
            "array 'c' is in only one of the model sent and the model here; are the tasks the same?",
        ),
        (
            OWN | {"a": np.zeros((4, 1), np.float32)},
            "array 'a' must have shape (4,) and dtype float64, found (4, 1) and float32",
        ),
        (OWN | {"a": np.zeros(5)}, "array 'a' must have shape (4,) and dtype float64, found (5,) and float64"),
    ]
    assert failures(cases, check) == []


def test_a_configuration_is_parsed_once_and_by_type():
    one = run_config(context_of(OPEN | {"client.learning-rate": 1.0}))
    assert run_config(context_of(dict(reversed(list((OPEN | {"client.learning-rate": 1.0}).items()))))) is one
    assert one == parse(OPEN | {"client.learning-rate": 1.0})


class Curious(Digits):
    """Digits whose model is made of what lies at the path in its configuration."""

    bundled = False
    seen: list[str] = []  # noqa: RUF012

    def build(self):
        self.seen.append(self.config.data_path)
        return super().build()


def test_no_code_of_a_task_sees_the_path_that_a_server_names_beside_data_of_the_nodes_own(tmp_path, monkeypatch):
    """A task that made its model of the file there would tell in refusals, or in frozen weights, what it holds."""
    monkeypatch.setattr(Curious, "seen", [])
    monkeypatch.setitem(TASKS._table, "curious", f"{__name__}:Curious")
    node = own_node(tmp_path)
    settings = OPEN | {"task.name": "curious", "task.data-path": node["data-path"]}
    arrays_of(answer(settings, node))
    assert set(Curious.seen) == {""}
    assert run_config(context_of(settings, node)).task == parse(OPEN | {"task.name": "curious"}).task
    assert run_config(context_of(settings)).task.data_path == node["data-path"], "a simulated part is dealt from there"
