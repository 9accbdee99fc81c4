"""The node's door in a secure aggregation: what each message says there, and what may come with it in which run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from asking import SOFTMAX, context_of, message_of
from flwr.app import ConfigRecord, Message, RecordDict
from secure_runs import settings

from cloister.client.enforce import planned_train_request
from cloister.client.request import (
    MAXIMUM_LENGTH,
    EvaluateRequest,
    ProtocolRequest,
    TrainRequest,
    refuse_other_frozen,
    request_of,
    run_config,
)
from cloister.client.trainers import model_and_trainer_of
from cloister.config.run import parse
from cloister.flower.messages import assume_run
from cloister.privacy.accounting.events import to_json
from cloister.privacy.mechanisms.clipping import MAX_BOUND, MIN_BOUND
from cloister.secure_aggregation.messages import Delivery
from cloister.utils.arrays import Layout
from cloister.utils.errors import FederationError, PrivacyError

FIXED = settings("out") | {"privacy.clipping-norm": 0.75}
ADAPTIVE = FIXED | {"privacy.clipping": "adaptive", "privacy.clipping-count-noise-multiplier": 1.0}
METRIC = FIXED | {
    "privacy.server": "metric",
    "privacy.distance": "rms",
    "privacy.distance-release": "private",
    "privacy.distance-noise-multiplier": 0.005,
}
APART = {name: value for name, value in FIXED.items() if not name.startswith("secure-aggregation")}
"""The same run with a server that sees each update."""
DELIVERY = Delivery((), {})
STEPS = ("advertise", "share", "sign", "unmask")
DIGEST = "0123456789abcdef" * 4
WRONG_CLIP = (
    "'clipping-norm' must be in the server's message, as a number from 1e-12 to 1e+30, in a run with secure "
    "aggregation and privacy.clipping = 'adaptive', and in no other"
)
WRONG_DISTANCE = (
    "'distance' must be in the server's message, as a finite number above 0, in a run with secure aggregation and "
    "privacy.server = 'metric', and in no other"
)
WRONG_MODEL = (
    "'secure-message' must be in the server's message, as bytes, in a run with secure aggregation and in no other"
)
WRONG_STEP = "the server's message must carry 'secure-step' as a step of the protocol and 'secure-message' as bytes"


def step(keys=FIXED, name="share", content=b"told", **fields):
    """Return the request of a message without training; a field of None is left out."""
    assume_run()
    said = {"server-round": 4, "seed": 3, "secure-step": name, "secure-message": content}
    said |= {key.replace("_", "-"): value for key, value in fields.items()}
    record = ConfigRecord({key: value for key, value in said.items() if value is not None})
    return request_of(ProtocolRequest, Message(RecordDict({"config": record}), 1, "query.secure"), context_of(keys))


def training(keys=FIXED, content=DELIVERY, **fields):
    """Return the parsed request to train."""
    more = {} if content is None else {"secure_message": content.encode() if isinstance(content, Delivery) else content}
    return request_of(TrainRequest, message_of(**more, **fields), context_of(keys))


def refusal_of(ask, *given, error=FederationError, **fields):
    with pytest.raises(error) as refused:
        ask(*given, **fields)
    return str(refused.value)


class TestAStep:
    def test_is_what_the_message_says(self):
        for name in STEPS:
            expected = ProtocolRequest(parse(FIXED).for_clients, "1", 4, 3, (), step=name, content=b"told", bound=0.75)
            assert step(name=name) == expected
            assert (expected.distance, expected.frozen) == (1.0, "")

    def test_that_the_protocol_does_not_have_or_that_tells_no_bytes_is_refused(self):
        wrong = [
            *({"name": name} for name in ("mask", "", 1, None)),
            *({"content": one} for one in ("told", 1.0, None)),
        ]
        for fields in wrong:
            assert refusal_of(step, **fields) == WRONG_STEP, fields

    def test_is_refused_in_a_run_whose_server_sees_each_update(self):
        assert refusal_of(step, APART) == "the server's message is of a secure aggregation, and this run has none"

    def test_carries_no_model(self):
        says = refusal_of(request_of, ProtocolRequest, message_of(secure_step="share"), context_of(FIXED))
        assert says == "the server's message must hold the records 'config' and no other"


class TestWhatFollowsFromEarlierRounds:
    def test_is_nothing_where_the_configuration_says_it_all(self):
        assert (training().bound, training().distance) == (0.75, 1.0)
        assert (training(APART, None).bound, training(APART, None).distance) == (0.0, 1.0)

    @pytest.mark.parametrize("bound", [MIN_BOUND, 0.5, MAX_BOUND])
    def test_is_a_clip_that_adapts(self, bound):
        for request in (step(ADAPTIVE, clipping_norm=bound), training(ADAPTIVE, clipping_norm=bound)):
            assert (request.bound, request.distance) == (bound, 1.0)

    @pytest.mark.parametrize("distance", [5e-324, 0.25, 1e308])
    def test_is_a_distance_that_scales_the_noise(self, distance):
        for request in (step(METRIC, distance=distance), training(METRIC, distance=distance)):
            assert (request.bound, request.distance) == (0.75, distance)

    NO_NUMBERS = (None, 0.0, -1.0, math.inf, math.nan, 1, True, "1", [1.0])

    def test_a_clip_out_of_range_is_refused(self):
        for wrong in (*self.NO_NUMBERS, math.nextafter(MIN_BOUND, 0), math.nextafter(MAX_BOUND, math.inf)):
            fields = {} if wrong is None else {"clipping_norm": wrong}
            assert {refusal_of(ask, ADAPTIVE, **fields) for ask in (step, training)} == {WRONG_CLIP}, wrong

    def test_what_is_no_distance_is_refused(self):
        for wrong in self.NO_NUMBERS:
            fields = {} if wrong is None else {"distance": wrong}
            assert {refusal_of(ask, METRIC, **fields) for ask in (step, training)} == {WRONG_DISTANCE}, wrong

    def test_is_told_in_no_run_that_does_not_need_it(self):
        for keys, content in ((FIXED, DELIVERY), (APART, None)):
            assert refusal_of(training, keys, content, clipping_norm=0.75) == WRONG_CLIP
            assert refusal_of(training, keys, content, distance=1.0) == WRONG_DISTANCE
        assert refusal_of(training, METRIC, clipping_norm=0.75, distance=1.0) == WRONG_CLIP
        assert refusal_of(training, ADAPTIVE, clipping_norm=0.75, distance=1.0) == WRONG_DISTANCE


class TestTraining:
    @pytest.mark.parametrize(("keys", "content"), [(FIXED, None), (FIXED, "text"), (APART, DELIVERY), (APART, "text")])
    def test_is_asked_for_masked_in_a_run_with_sums_and_in_no_other(self, keys, content):
        assert refusal_of(training, keys, content) == WRONG_MODEL

    def test_has_what_it_masks_its_update_with(self):
        delivery = Delivery(("site-1", "site-2"), {})
        assert training(content=delivery).delivery == delivery and training(APART, None).delivery is None

    def test_is_charged_by_the_nodes_own_reckoning(self):
        own, more = (
            parse(FIXED | {"privacy.noise-multiplier": z}).shared_release.events(Layout.of(SOFTMAX)) for z in (1.0, 2.0)
        )
        told, too_much = ([json.dumps(to_json(event)) for event in events] for events in (own, more))
        assert training().promise == training(privacy_events=told).promise == own
        says = "'privacy-events' in the server's message is not what this node's share of the noise amounts to"
        assert refusal_of(training, error=PrivacyError, privacy_events=too_much) == says
        assert refusal_of(training, APART, None, error=PrivacyError, privacy_events=told) == (
            "'privacy-events' in the server's message counts on shares of noise, and this run has no secure aggregation"
        )

    @pytest.mark.parametrize("keys", [FIXED, METRIC])
    def test_is_foreseen_with_all_that_it_will_be_charged_for(self, keys):
        more = {"distance": 0.25} if keys is METRIC else {}
        found = planned_train_request(step(keys, "advertise", **more))
        (model,) = found.models
        assert replace(found, models=()) == TrainRequest(
            parse(keys).for_clients,
            "1",
            4,
            3,
            (),
            promise=training(keys, **more).promise,
            bound=0.75,
            distance=more.get("distance", 1.0),
        )
        own = model_and_trainer_of(parse(keys)).model.arrays()
        assert list(model) == list(own) and all(np.array_equal(model[name], own[name]) for name in own)


class TestFrozenWeights:
    def test_are_told_by_their_digest(self):
        assert training(APART, None, frozen_sha256=DIGEST).frozen == DIGEST and training(APART, None).frozen == ""
        assert training(APART, None, ledger_head=DIGEST).ledger_head == DIGEST

    @pytest.mark.parametrize("name", ["frozen-sha256", "ledger-head"])
    def test_are_told_by_nothing_else(self, name):
        for wrong in ("", DIGEST[:-1], DIGEST + "0", DIGEST.upper(), DIGEST + "\n", 1, [DIGEST]):
            says = refusal_of(training, APART, None, **{name.replace("-", "_"): wrong})
            assert says == f"the server's message must carry {name!r} as a SHA-256 digest, or not at all", wrong

    @pytest.mark.parametrize(
        ("theirs", "own", "told", "logged"),
        [
            (DIGEST, "f" * 64, "SHA-256 0123456789ab…", "SHA-256 ffffffffffff…"),
            (DIGEST, "", "SHA-256 0123456789ab…", "none"),
            ("", DIGEST, "none", "SHA-256 0123456789ab…"),
        ],
    )
    def test_that_differ_are_named_to_the_server_by_its_own_digest_alone(self, theirs, own, told, logged, caplog):
        request = EvaluateRequest(parse(APART), "1", 1, 3, (), frozen=theirs)
        assert refusal_of(refuse_other_frozen, request, own) == (
            f"the frozen weights of the model are not those of the server, which has {told}; install the same version "
            "of the task and of its files"
        )
        words = f"the frozen weights of the model differ: the server has {told}, this node has {logged}"
        assert caplog.record_tuples == [("cloister.client", 30, words)]

    def test_that_are_the_same_are_no_matter(self, caplog):
        for digest in ("", DIGEST):
            refuse_other_frozen(EvaluateRequest(parse(APART), "1", 1, 3, (), frozen=digest), digest)
        assert not caplog.records


def test_a_configuration_is_read_up_to_its_largest_length():
    bare = sum(len(key) + len(str(value)) for key, value in APART.items()) - len(APART["output-dir"])
    longest = APART | {"output-dir": "x" * (MAXIMUM_LENGTH - bare)}
    assert run_config(context_of(longest)) == parse(longest).for_clients
    says = refusal_of(run_config, context_of(longest | {"output-dir": longest["output-dir"] + "x"}))
    assert says == "the run configuration has 65537 characters, at most 65536 are read"
