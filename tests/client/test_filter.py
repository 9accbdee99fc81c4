"""Content that leaves a node in a reply, for any request and any result."""

import pytest
from asking import (
    BASE,
    CLUSTERED,
    DP_SGD,
    GAUSSIAN,
    GLOBAL,
    LAPLACE,
    METRIC,
    OPEN,
    SOFTMAX,
    answer,
    message_of,
    request_of_kind,
)
from flwr.app import ConfigRecord
from support import failures

from cloister.client.app import only_what_is_agreed, refuse_scores
from cloister.client.request import EvaluateRequest, KeepRequest, Reply, TrainRequest
from cloister.config.run import parse
from cloister.utils.arrays import stacked
from cloister.utils.errors import PrivacyError

TOLD = {"num-examples": 17, "train-loss": 0.5}
PRIVATE = {"global-dp": GLOBAL, "metric": METRIC, "dp-sgd": DP_SGD, "gaussian": GAUSSIAN, "laplace": LAPLACE}
SCORED = {"task.test-fraction": 0.2}


def left(kind, settings, reply):
    request = request_of_kind(kind, settings)
    refuse_scores(request)
    return only_what_is_agreed(reply, request)


def test_a_private_training_reply_is_arrays_alone():
    def check(run):
        reply = left(TrainRequest, PRIVATE[run], Reply(SOFTMAX, TOLD, chosen=1))
        assert reply.arrays is SOFTMAX and reply.metrics == {} and reply.chosen == 0
        assert set(reply.content()) == {"arrays", "metrics"} and not dict(reply.content()["metrics"])

    assert failures([(run,) for run in PRIVATE], check) == []


def test_counts_leave_where_they_weigh_and_nothing_else_does():
    settings = GLOBAL | {"strategy.weighting": "examples", "privacy.examples-cap": 50.0}
    assert left(TrainRequest, settings, Reply(SOFTMAX, TOLD)).metrics == {"num-examples": 17}


def test_an_open_training_reply_keeps_its_metrics():
    assert left(TrainRequest, OPEN, Reply(SOFTMAX, TOLD)).metrics == TOLD


def test_scores_are_refused_where_the_run_has_none():
    def check(run, fraction):
        settings = PRIVATE[run] | {"task.test-fraction": fraction}
        with pytest.raises(PrivacyError, match="scores may not leave this node in this run"):
            left(EvaluateRequest, settings, pytest.fail)

    assert failures([(run, fraction) for run in PRIVATE for fraction in [0.0, 0.2]], check) == []


def test_and_in_an_open_run_that_evaluates_on_no_client():
    def check(settings):
        with pytest.raises(PrivacyError, match="evaluates on no client"):
            left(EvaluateRequest, settings, pytest.fail)

    cases = [
        (settings,)
        for settings in [
            OPEN,
            OPEN | SCORED | {"evaluation.federated": "off"},
            OPEN | SCORED | {"strategy.fraction-evaluate": 0.0},
        ]
    ]
    assert failures(cases, check) == []


def test_scores_leave_where_they_were_asked_for_and_no_model_with_them():
    def check(settings):
        reply = left(EvaluateRequest, settings, Reply(SOFTMAX, {"loss": 0.1, "num-examples": 3}))
        assert reply == Reply(None, {"loss": 0.1, "num-examples": 3})
        assert set(reply.content()) == {"metrics"}

    cases = [
        OPEN | SCORED,
        METRIC | SCORED | {"evaluation.federated": "on"},
        DP_SGD | {"evaluation.held-out-clients": 0.5},
    ]
    assert failures(cases, check) == []


def test_nothing_leaves_in_answer_to_a_query():
    def check(settings):
        reply = left(KeepRequest, settings, Reply(SOFTMAX, TOLD))
        assert reply == Reply() and not list(reply.content())

    assert failures([(settings,) for settings in [OPEN, DP_SGD, CLUSTERED]], check) == []


def test_the_whole_app_sends_nothing_else():
    def check(run):
        reply = answer(PRIVATE[run], None)
        stated = {"attestation"} if parse(PRIVATE[run]).privacy.client.is_on else set()
        assert set(reply.content) == {"arrays", "metrics"} | stated and not dict(reply.content["metrics"])
        assert list(reply.content["arrays"]) == list(SOFTMAX)

    assert failures([(run,) for run in PRIVATE], check) == []


def test_a_choice_does_not_leave():
    settings = CLUSTERED | {"privacy.client": "none"}
    models = stacked([SOFTMAX, {name: array + 1 for name, array in SOFTMAX.items()}])
    reply = answer(settings, None, message_of(models, hypotheses=2))
    assert set(reply.content) == {"arrays", "metrics"} and not dict(reply.content["metrics"])


def test_what_cannot_be_classified_is_answered_by_nobody():
    def check(kind):
        with pytest.raises(ValueError, match=r"No .* function registered"):
            answer(BASE, None, message_of(kind=kind))

    assert failures(["train.other", "evaluate.other", "query.other"], check) == []


def test_nothing_of_a_message_comes_back():
    message = message_of(record={"server-round": 1, "seed": 3})
    reply = answer(OPEN, None, message)
    assert not [name for name, record in reply.content.items() if isinstance(record, ConfigRecord)]


def test_a_refusal_of_scores_says_why():
    with pytest.raises(PrivacyError) as refused:
        left(EvaluateRequest, DP_SGD, pytest.fail)
    assert str(refused.value) == (
        "scores may not leave this node in this run: its configuration evaluates on no client"
    )


def test_a_count_that_nobody_made_does_not_leave():
    settings = GLOBAL | {"strategy.weighting": "examples", "privacy.examples-cap": 50.0}
    assert left(TrainRequest, settings, Reply(SOFTMAX, {"train-loss": 0.5})).metrics == {}


def test_counts_do_not_leave_where_all_weigh_the_same():
    assert left(TrainRequest, GLOBAL, Reply(SOFTMAX, TOLD)).metrics == {}
