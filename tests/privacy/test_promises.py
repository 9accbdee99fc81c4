"""A server's promise for a round, on the wire: true for every kind of release, and read strictly."""

import json
import math

import pytest

from cloister.privacy.accounting.budget import MAX_EVENTS, MAX_LENGTH, from_wire, multiplier_of, to_wire
from cloister.privacy.accounting.events import (
    DistributedGaussian,
    Gaussian,
    Laplace,
    Pure,
    Repeated,
    Unaccounted,
    to_json,
)
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import PrivacyError

DRAWN = Gaussian(2.0, Sampling("poisson", 0.5))


def wired(event):
    return json.dumps(to_json(event))


def test_draws_are_left_out_and_the_rest_comes_back_in_its_order():
    shared = DistributedGaussian(12, 2.0**20, 300_000.0, 650, 7, 256.0)
    made = [Pure(0.5), DRAWN, Repeated(DRAWN, 3), Gaussian(7.0), shared]
    found = (Pure(0.5), Gaussian(2.0), Repeated(Gaussian(2.0), 3), Gaussian(7.0), shared)
    assert to_wire(made) == [wired(event) for event in found]
    assert from_wire(to_wire(made)) == found


NOISELESS = "an event that the server promises must have noise, and count no draw of clients"
NO_LIST = f"what the server promises must be a list of 1 to {MAX_EVENTS} events"
NO_STRING = f"an event that the server promises must be a string of at most {MAX_LENGTH} characters"
NO_JSON = "an event that the server promises is no JSON"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (5, NO_LIST),
        ("[]", NO_LIST),
        ([], NO_LIST),
        ([wired(Pure(0.5))] * (MAX_EVENTS + 1), NO_LIST),
        ([2.0], NO_STRING),
        (["x" * (MAX_LENGTH + 1)], NO_STRING),
        (["x" * MAX_LENGTH], NO_JSON),
        ([wired(Gaussian(2.0)), "{"], NO_JSON),
        (["5"], "an event must be a JSON object"),
        *[
            ([wired(event)], NOISELESS)
            for event in (
                Gaussian(0.0),
                Unaccounted("x"),
                Laplace(1.0, 1.0),
                DRAWN,
                Repeated(DRAWN, 2),
                Repeated(Gaussian(0.0), 2),
            )
        ],
    ],
)
def test_what_is_no_promise_is_refused(content, says):
    with pytest.raises(PrivacyError) as refused:
        from_wire(content)
    assert str(refused.value) == says


def test_a_promise_has_as_many_events_and_as_long_ones_as_a_node_reads():
    long = json.dumps(to_json(Pure(0.5))).ljust(MAX_LENGTH)
    assert (MAX_EVENTS, MAX_LENGTH) == (16, 1000)
    assert from_wire([long] * MAX_EVENTS) == (Pure(0.5),) * MAX_EVENTS


def test_the_multiplier_of_all_releases_together():
    assert multiplier_of([]) == 0 == multiplier_of([Unaccounted("x")])
    assert multiplier_of([Gaussian(3.0)]) == pytest.approx(3.0)
    assert multiplier_of([Gaussian(3.0), Gaussian(4.0)]) == pytest.approx(2.4)
    assert multiplier_of([Repeated(Gaussian(3.0), 4)]) == pytest.approx(1.5)
    assert 0 < multiplier_of([Pure(0.5)]) < math.inf
