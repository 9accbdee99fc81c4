"""The claim about clients covers the replies that state what the run asks for."""

import json

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from quick_runs import quick_runs  # noqa: F401
from rich.console import Console
from statements import heard, replied, requested
from support import failures

from cloister.client.app import app
from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian, Laplace
from cloister.privacy.claims.premises import BUNDLE, Attestation
from cloister.privacy.claims.render import render_clients
from cloister.privacy.claims.to_json import record, statement_of
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.server.build import build
from cloister.server.client_claims import Attested, client_claim
from cloister.server.polling_grid import Transport
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import Layout

DP_SGD = {
    "task.model": "softmax",
    "client.local-epochs": 1,
    "client.batch-size": 32,
    "privacy.server": "none",
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 1.5,
    "tensorboard": False,
    "report": False,
}
LAYOUT = Layout.of({"w": np.zeros(4, np.float32)})


def stated(size=0, mechanism="dp-sgd", unit="example", events=None, **more):
    events = events or (LocalSteps(size, 32, 1).event(1.5),)
    return Attestation(mechanism, unit, events, size, **more)


def claim_of(tmp_path, attested, settings=DP_SGD):
    plan = build(parse(settings | {"output-dir": str(tmp_path)}))
    return client_claim(plan, LAYOUT, 2, attested=attested)


def test_figures_are_for_the_sizes_that_nodes_state(tmp_path):
    """Two sites of 1,200 and 300 spent 0.78 and 1.35; an invented client of 33 examples was claimed instead."""
    claim = claim_of(tmp_path, heard(stated(1200), stated(300), stated(300)))
    assert [size.size for size in claim.sizes] == [300, 1200] and claim.known and not claim.not_covered
    assert claim.is_guaranteed


def test_a_reply_that_states_other_releases_is_not_covered(tmp_path):
    def check(other):
        claim = claim_of(tmp_path, heard(stated(300), other, stated(300)))
        assert [size.size for size in claim.sizes] == [300]
        unstated = "no reply that was read in time states that they applied dp-sgd as this run asks for it"
        missing = f"the clients of 1 of 3 requests: {unstated}"
        assert claim.not_covered == missing and f"  no claim about {missing}" in render_clients(claim)
        alone = claim_of(tmp_path, heard(other))
        assert alone.status == "heuristic" and not any(size.figures for size in alone.sizes)

    cases = [
        None,
        stated(64, mechanism="gaussian"),
        stated(64, unit="client"),
        stated(64, group="patient"),
        stated(64, events=(LocalSteps(64, 32, 1).event(0.1),)),
        stated(64, events=(LocalSteps(65, 32, 1).event(1.5),)),
        stated(0, events=(Gaussian(1.5),)),
        b'{"checked": false, "size": 1000000000}',
        b'{"events": [{"kind": "unaccounted", "reason": []}], "checked": false, "size": 64}',
        b"9" * 70_000,
    ]
    assert failures(cases, check) == []


def test_noise_on_an_update_is_claimed_where_it_is_stated(tmp_path):
    settings = {
        "task.model": "softmax",
        "privacy.server": "none",
        "privacy.client": "laplace",
        "privacy.laplace-noise-multiplier": 2.0,
        "privacy.radius": 1.0,
    }
    own = stated(mechanism="laplace", unit="client", events=(Laplace(2.0, 1.0),))
    mechanism = parse(settings).privacy.client.noise_on_update
    right = stated(mechanism="laplace", unit="client", events=tuple(mechanism.events(LAYOUT.size)))
    assert claim_of(tmp_path, heard(right), settings).is_guaranteed
    assert claim_of(tmp_path, heard(own), settings).status == "heuristic"


def test_the_bundle_is_stated_where_every_node_that_counts_says_so(tmp_path):
    def check(statements, known):
        claim = claim_of(tmp_path, heard(*statements))
        assert claim.premises[0] == BUNDLE.known_as(known)
        assert claim.status == "conditional", "the server ships the code that says so"

    cases = [
        ([stated(300, checked=True)], "stated"),
        ([stated(300, checked=True), stated(300)], "assumed"),
        ([stated(300)], "assumed"),
    ]
    assert failures(cases, check) == []


def left(*replies):
    """Counts of two requests, the first of which has a reply that states something."""
    attested, asked = Attested(), [requested(1), requested(2)]
    list(attested.counted(asked, [replied(asked[0], stated(300)), *(reply(asked[1]) for reply in replies)]))
    return attested


def test_a_request_that_the_node_declined_does_not_count():
    declined = left(lambda asked: Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "no"), reply_to=asked))
    assert declined.by_statement() == {stated(300).to_bytes(): 1}


UNREAD = {
    "none, or one that came too late": (),
    "one that cannot be read": (lambda asked: Message(Error(ErrorCode.UNKNOWN, "a reply"), reply_to=asked),),
    "an answer of the SuperLink": (lambda asked: Message(Error(ErrorCode.NODE_UNAVAILABLE, "no"), reply_to=asked),),
}


@pytest.mark.parametrize("replies", UNREAD.values(), ids=UNREAD)
def test_a_reply_that_was_not_read_in_time_is_not_covered(tmp_path, replies):
    """Its client may have trained, and the reply may have left the node."""
    attested = left(*replies)
    assert attested.by_statement() == {stated(300).to_bytes(): 1, b"": 1}
    assert claim_of(tmp_path, attested).not_covered.startswith("the clients of 1 of 2 requests: no reply that was read")


def test_a_round_that_is_broken_off_is_not_covered():
    attested, asked = Attested(), [requested(1), requested(2)]
    replies = attested.counted(asked, [replied(asked[0], stated(300))])
    next(replies)
    replies.close()
    assert attested.by_statement() == {stated(300).to_bytes(): 1, b"": 1}


def test_a_late_reply_is_not_covered_by_the_claim_of_a_run(tmp_path):
    """The grid drops it: it came after the time that a late node has."""

    class Slow(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return (
                reply
                for reply in super().send_and_receive(messages, timeout=timeout)
                if reply.metadata.src_node_id != 2
            )

    config = parse(DP_SGD | {"output-dir": str(tmp_path), "num-rounds": 1})
    run(Slow.simulated(app, config.flat(), 4), config, ConsoleReporter(1, Console(quiet=True)))
    (path,) = tmp_path.glob("*/privacy.json")
    assert json.loads(path.read_text())["clients"]["not-covered"].startswith("the clients of 1 of 4 requests")


def test_a_secret_draw_shows_no_number_of_replies(tmp_path):
    attested = heard(stated(300), stated(300), None, None, secret=True)
    assert attested.by_statement() == {stated(300).to_bytes(): 1, b"": 1}
    assert claim_of(tmp_path, attested).not_covered.startswith("the clients of some requests")


def test_counts_go_on_in_a_run_that_is_resumed():
    before, after = heard(stated(300), None), Attested()
    after.load_state_dict(before.state_dict())
    assert after.by_statement() == before.by_statement()
    after.load_state_dict({})
    assert after.by_statement() == {b"": 1}, "a run from before this state existed attested nothing"


@pytest.mark.parametrize(("signed", "known"), [(True, "attested"), (False, "assumed")])
def test_the_claims_of_a_run_say_whether_its_replies_were_signed(tmp_path, signed, known):
    class Carried(LocalGrid):
        is_simulated = keeps_memory = False
        transport = Transport(packed=True, gated=False, signed=signed)

    config = parse(DP_SGD | {"output-dir": str(tmp_path), "num-rounds": 1})
    said = run(Carried.simulated(app, config.flat(), 2), config, ConsoleReporter(1, Console(quiet=True))).statement
    assert {premise.name: premise.known for premise in said.clients.premises}["authentic"] == known


def test_one_client_of_four_that_states_nothing_is_named_in_the_record(tmp_path):
    def silent(message, context):
        reply = app(message, context)
        if context.node_id == 2:
            reply.content.pop("attestation", None)
        return reply

    config = parse(DP_SGD | {"output-dir": str(tmp_path), "num-rounds": 1})
    run(LocalGrid.simulated(silent, config.flat(), 4), config, ConsoleReporter(1, Console(quiet=True)))
    (path,) = tmp_path.glob("*/privacy.json")
    facts = json.loads(path.read_text())
    assert facts["clients"]["not-covered"].startswith("the clients of 1 of 4 requests")
    assert record(statement_of(facts)).items() <= facts.items()
