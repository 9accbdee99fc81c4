"""Runs whose rounds are steps of DP-SGD on a secure sum: what they compute, send, charge and claim."""

import json
from functools import partial

import numpy as np
import pytest
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode
from resumed import LINEAR, assert_same, go, lines, numbers, resume, stopped_after
from rich.console import Console

from cloister.client import app as client_app
from cloister.client import round_state
from cloister.client.app import app
from cloister.client.data import local_data
from cloister.client.dp_sgd import PrivateNumpyTrainer
from cloister.client.ledgers import identity_of
from cloister.client.node import node_of
from cloister.client.trainers import model_and_trainer_of
from cloister.config.run import parse
from cloister.estimate.quantities import traffic
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.events import Gaussian, Repeated
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.privacy.dpsgd.noise import clipped_sum
from cloister.secure_aggregation import epoch
from cloister.secure_aggregation.epoch import MaskedVector
from cloister.secure_aggregation.messages import MaskedInput
from cloister.server.build import build
from cloister.server.prepare import prepare
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.server.secure_steps import SecureSteps
from cloister.simulation.grid import LocalGrid
from cloister.utils.arrays import to_record
from cloister.utils.errors import ConfigError, DataError, LedgerError
from cloister.utils.wire import CONFIG, ROUND, SECURE

CLIENTS = 5
STEPS = LINEAR | {
    "privacy.client": "dp-sgd",
    "privacy.dp-sgd-noise-multiplier": 1.0,
    "privacy.dp-sgd-sampling-rate": 0.2,
    "client.learning-rate": 0.1,
    "strategy.min-nodes": CLIENTS,
    "secure-aggregation.enabled": True,
}
MEAN = LINEAR | {
    "privacy.server": "global-dp",
    "privacy.noise-multiplier": 2.0,
    "privacy.clipping": "adaptive",
    "strategy.min-nodes": CLIENTS,
    "secure-aggregation.enabled": True,
}
EVENT = Repeated(Gaussian(1.0, Sampling("bounded-poisson", 0.2)), 1)
"""Of a round, for one example."""


def nodes(folder=None, clients=CLIENTS):
    kept = [{} if folder is None else {"ledger-dir": str(folder / f"node-{number}")} for number in range(clients)]
    return [{"partition-id": number, "num-partitions": clients} | own for number, own in enumerate(kept)]


def federated(folder, of=app, configured=None, **changes):
    config = parse(STEPS | {"output-dir": str(folder)} | changes)
    grid = LocalGrid(of, config.flat(), configured or nodes())
    return run(grid, config, ConsoleReporter(config.num_rounds, Console(quiet=True)))


@pytest.mark.parametrize("lost", [0, 1])
def test_without_noise_a_round_is_a_step_of_central_sgd_on_the_data_of_the_whole_list(lost, tmp_path):
    """With q = 1 every example is drawn, so that the central step is known."""
    keys = {"privacy.dp-sgd-noise-multiplier": 0.0, "privacy.dp-sgd-sampling-rate": 1.0, "num-rounds": 2}
    outcome = federated(tmp_path, losing(lost), **keys)
    assert outcome.rounds[-1].measured.accepted == CLIENTS - lost
    config = parse(STEPS | keys).for_clients
    parts = [local_data(config.task, node_of(node), 1).train for node in nodes()[lost:]]
    trainer = model_and_trainer_of(config).trainer
    assert isinstance(trainer, PrivateNumpyTrainer)
    trainer.model.initialise(1)
    for _ in range(2):
        units = [part.take(np.array([row])) for part in parts for row in range(len(part))]
        like = tuple(weight.reshape(-1) for weight in trainer.model.weights.values())
        total = clipped_sum((partial(trainer._gradient, one) for one in units), like, 1.0)
        for weight, piece in zip(trainer.model.weights.values(), total, strict=True):
            weight -= (0.1 / len(units) * piece).reshape(weight.shape).astype(np.float32)
    for name, array in numbers(outcome).items():
        np.testing.assert_allclose(array, trainer.model.weights[name], atol=1e-6)


def test_the_server_and_every_node_record_what_the_claim_counts(tmp_path):
    outcome = federated(tmp_path, configured=nodes(tmp_path))
    server = [entry for entry in outcome.plan.budget.ledger.entries if entry.unit == "example"]
    assert [entry.event for entry in server] == [EVENT] * 3
    assert [entry.round for entry in server] == [1, 2, 3]
    for number, node in enumerate(nodes(tmp_path)):
        name = identity_of(node_of(node), "linear")
        entries = Ledger(tmp_path / f"node-{number}" / f"{name}.jsonl").entries
        assert [entry.event for entry in entries if entry.unit == "example"] == [EVENT] * 3
        assert {entry.clip for entry in entries if entry.unit == "example"} == {1.0}
    claim = outcome.statement.clients
    assert claim.status == "sound" and claim.not_covered == ""
    (figure,) = {size.figures[0].epsilon for size in claim.sizes}
    assert figure == pytest.approx(min(Account([EVENT] * 3).epsilon(1e-5, by) for by in ("rdp", "pld")), rel=1e-6)
    assert outcome.statement.claim.mechanism == "none"


@pytest.mark.parametrize(("settings", "size"), [(STEPS, 2 * 8), (MEAN, 3 * 4)], ids=["a step", "a mean and a bit"])
def test_a_plan_counts_the_bytes_of_a_masked_vector(settings, size, tmp_path):
    replies = []

    def watched(message, context):
        reply = app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            replies.append(reply.content["arrays"]["secure-message"].numpy())
        return reply

    config = parse(settings | {"output-dir": str(tmp_path), "num-rounds": 1})
    run(LocalGrid(watched, config.flat(), nodes()), config, ConsoleReporter(1, Console(quiet=True)))
    kind = MaskedVector if settings is STEPS else MaskedInput
    payload = kind.decode(replies[0].tobytes()).payload
    up = traffic(prepare(config), CLIENTS).up
    assert up == len(payload) == size
    assert 0 < replies[0].nbytes - up < 300, "the name of the member, and its signature or the context"


def test_a_reply_holds_a_masked_vector_and_what_its_node_states(tmp_path):
    replies = []

    def watched(message, context):
        reply = app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            replies.append(reply)
        return reply

    federated(tmp_path, watched, **{"num-rounds": 1})
    assert len(replies) == CLIENTS
    for reply in replies:
        assert set(reply.content) == {"arrays", "metrics", "attestation"}
        assert list(reply.content["arrays"]) == ["secure-message"] and dict(reply.content["metrics"]) == {}
        assert set(json.loads(reply.content["attestation"]["attestation"])) == {
            *("mechanism", "unit", "events", "size", "group", "checked")
        }


def test_a_client_whose_training_fails_adds_its_noise_alone(tmp_path, monkeypatch):
    def failing(request, node):
        raise DataError("no file")

    monkeypatch.setattr(client_app, "_examples", failing)
    keys = {"num-rounds": 1, "privacy.dp-sgd-noise-multiplier": 0.0}
    outcome = federated(tmp_path, **keys)
    assert outcome.rounds[-1].measured.accepted == CLIENTS
    monkeypatch.undo()
    initial = model_and_trainer_of(parse(STEPS).for_clients).model
    initial.initialise(1)
    for name, array in numbers(outcome).items():
        np.testing.assert_array_equal(array, initial.arrays()[name])


def losing(number, rounds=range(1, 100)):
    """The app, whose first nodes are lost in some rounds: before they show a key, or when their sum is asked for."""

    def answer(message, context):
        asked = message.metadata.message_type in (MessageType.TRAIN, SECURE)
        if asked and context.node_config["partition-id"] < number and message.content[CONFIG][ROUND] in rounds:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=message)
        return app(message, context)

    return answer


@pytest.mark.parametrize("lost", [0, 1])
def test_the_release_has_the_noise_of_a_central_step_for_every_length_of_the_list(lost, tmp_path, monkeypatch):
    """Through the whole protocol, on empty gradients: the honest noise, and that of c more shares."""
    monkeypatch.setattr(client_app, "_examples", lambda request, node: client_app._nothing(request))
    keys = {"task.name": "digits", "task.model": "softmax", "num-rounds": 2, "client.learning-rate": 1.0}
    outcome = federated(tmp_path, losing(lost), **keys)
    config = parse(STEPS | keys).for_clients
    units = sum(len(local_data(config.task, node_of(node), 1).train) for node in nodes()[lost:])
    moved = np.concatenate([array.ravel() for array in numbers(outcome).values()])
    members = CLIENTS - lost
    expected = np.sqrt(2 * members / (members - 1)) / (0.2 * units)  # of two rounds
    assert abs(moved.std() / expected - 1) < 6 / np.sqrt(2 * moved.size)


def spent_by(folder, number):
    """The events for one example in a node's ledger."""
    name = identity_of(node_of(nodes(folder)[number]), "linear")
    entries = Ledger(folder / f"node-{number}" / f"{name}.jsonl").entries
    return [entry.event for entry in entries if entry.unit == "example"]


def test_a_round_with_a_silent_member_changes_no_model_and_stays_charged(tmp_path):
    outcome = federated(tmp_path, losing(1, {2}), nodes(tmp_path))
    first, second, third = outcome.rounds[1:]
    assert [done.measured.abandoned for done in (first, second, third)] == [False, True, False]
    assert second.central == first.central and third.central != second.central
    assert third.measured.accepted == CLIENTS - 1, "the silent member is not in the next epoch"
    charged = [entry.round for entry in outcome.plan.budget.ledger.entries if entry.unit == "example"]
    assert charged == [1, 2, 3]
    assert sorted(len(spent_by(tmp_path, number)) for number in range(CLIENTS)) == [1, 3, 3, 3, 3]
    assert outcome.statement.clients.sizes[0].figures[0].steps == 3


def test_a_member_that_never_sends_a_vector_costs_one_round(tmp_path):
    def silent(message, context):
        reply = app(message, context)
        if message.metadata.message_type == MessageType.TRAIN and context.node_config["partition-id"] == 2:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "none"), reply_to=message)
        return reply

    outcome = federated(tmp_path, silent, **{"num-rounds": 5})
    assert [done.measured.abandoned for done in outcome.rounds[1:]] == [True] + [False] * 4


def test_a_list_below_the_threshold_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(epoch, "ROUNDS", 1)
    outcome = federated(tmp_path, losing(2, {2}), nodes(tmp_path))
    assert [done.measured.abandoned for done in outcome.rounds[1:]] == [False, True, False]
    charged = [entry.round for entry in outcome.plan.budget.ledger.entries if entry.unit == "example"]
    assert charged == [1, 3]
    assert [len(spent_by(tmp_path, number)) for number in range(CLIENTS)] == [2] * CLIENTS


class Watching:
    """The app, with the type and the round of each message."""

    def __init__(self, of=app):
        self.of, self.seen = of, []

    def __call__(self, message, context):
        if message.metadata.message_type in (MessageType.TRAIN, SECURE):
            self.seen.append((message.metadata.message_type, message.content[CONFIG][ROUND]))
        return self.of(message, context)

    def rounds_of(self, kind):
        return [number for found, number in self.seen if found == kind]


def test_a_round_is_one_exchange_once_keys_are_agreed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(epoch, "ROUNDS", 2)
    watching = Watching()
    federated(tmp_path, watching, **{"num-rounds": 5})
    assert watching.rounds_of(SECURE) == [number for number in (1, 3, 5) for _ in range(CLIENTS)]
    assert watching.rounds_of(MessageType.TRAIN) == [number for number in range(1, 6) for _ in range(CLIENTS)]


def test_a_node_that_comes_late_takes_part_from_the_next_epoch_on(tmp_path, monkeypatch):
    monkeypatch.setattr(epoch, "ROUNDS", 2)
    outcome = federated(tmp_path, losing(1, {1}))
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [CLIENTS - 1, CLIENTS - 1, CLIENTS]


def test_a_node_that_lost_its_state_ends_the_epoch_alone(tmp_path):
    """A process that dies between two rounds, and starts anew."""

    def restarted(message, context):
        if message.metadata.message_type == MessageType.TRAIN and message.content[CONFIG][ROUND] == 2:
            round_state._memories.pop(id(context.state), None)
        return app(message, context)

    outcome = federated(tmp_path, restarted)
    assert [done.measured.abandoned for done in outcome.rounds[1:]] == [False, True, False]


def test_a_node_keeps_a_secret_until_the_last_round_of_the_run(tmp_path):
    kept = []

    def watched(message, context):
        reply = app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            kept.append(bool(round_state._memories[id(context.state)].attempt))
        return reply

    federated(tmp_path, watched)
    assert kept == [True] * 2 * CLIENTS + [False] * CLIENTS


def test_a_message_that_comes_twice_is_answered_once(tmp_path):
    """The second one is refused, and so is the round: its masks are used."""
    refusals = []

    def twice(message, context):
        if message.metadata.message_type == MessageType.TRAIN and message.content[CONFIG][ROUND] == 2:
            app(message, context)
            reply = app(message, context)
            refusals.append(reply.error.reason if reply.has_error() else "")
            return reply
        return app(message, context)

    outcome = federated(tmp_path, twice)
    assert [done.measured.abandoned for done in outcome.rounds[1:]] == [False, True, False]
    assert len(refusals) == CLIENTS and all("in which round 3 is next" in each for each in refusals)


def test_a_node_signs_one_key_for_an_epoch_that_begins_at_a_round(tmp_path, monkeypatch):
    """A key of a state that was read counts in no second epoch; the next round begins one with another key."""
    monkeypatch.setattr(epoch, "ROUNDS", 1)
    refusals = []

    def twice(message, context):
        reply = app(message, context)
        if message.metadata.message_type == SECURE and message.content[CONFIG][ROUND] == 2:
            reply = app(message, context)
            refusals.append(reply.has_error())
        return reply

    outcome = federated(tmp_path, twice)
    assert [done.measured.abandoned for done in outcome.rounds[1:]] == [False, True, False]
    assert refusals == [True] * CLIENTS


@pytest.mark.parametrize("said", [b"", b"\xff", b'{"size": 0, "checked": true}', b'{"size": NaN, "checked": true}'])
def test_a_member_without_a_readable_size_leaves_the_model_unchanged(said, tmp_path, caplog):
    def unreadable(message, context):
        reply = app(message, context)
        if message.metadata.message_type == MessageType.TRAIN and context.node_config["partition-id"] == 0:
            reply.content["attestation"]["attestation"] = said
        return reply

    outcome = federated(tmp_path, unreadable, nodes(tmp_path), **{"num-rounds": 1})
    assert "no public size can be read of " in caplog.text
    before, after = outcome.rounds
    assert after.central == before.central and after.measured.abandoned and after.measured.accepted == CLIENTS
    assert [len(spent_by(tmp_path, number)) for number in range(CLIENTS)] == [1] * CLIENTS


def test_nodes_with_unlike_models_have_no_sum(tmp_path):
    """A server that shows one node another model: the masks of that node cancel against none."""

    def split(message, context):
        if message.metadata.message_type == MessageType.TRAIN and context.node_config["partition-id"] == 0:
            message.content["arrays"] = to_record({"linear/kernel": np.ones_like(theta_of(message))})
        return app(message, context)

    outcome = federated(tmp_path, split, **{"num-rounds": 1})
    (rejected,) = outcome.rounds[1].measured.rejected
    assert outcome.rounds[1].measured.abandoned and "for another context" in rejected.detail
    assert outcome.rounds[1].measured.accepted == CLIENTS - 1


def theta_of(message):
    return message.content["arrays"]["linear/kernel"].numpy()


def test_a_budget_of_the_run_ends_it_with_the_model_of_the_last_round_that_it_covers(tmp_path):
    """All nodes abstain in the same round, as all count the same."""
    budget = 5.0
    changes = {"num-rounds": 20, "privacy.client-max-epsilon": budget, "keep-checkpoints": 0}
    outcome = federated(tmp_path, configured=nodes(tmp_path), **changes)
    assert outcome.ended == "site-budgets"
    assert "BudgetExhausted: no budget of this node covers this round" in outcome.stopped
    accepted = [line["measured"]["accepted"] for line in lines(tmp_path)[1:]]
    last = accepted.count(CLIENTS)
    assert last >= 2 and accepted == [CLIENTS] * last + [0] * (len(accepted) - last)
    assert [spent_by(tmp_path, number) for number in range(CLIENTS)] == [[EVENT] * last] * CLIENTS
    assert Account([EVENT] * last).epsilon(1e-5, "rdp") <= budget < Account([EVENT] * 20).epsilon(1e-5, "rdp")
    with (
        np.load(tmp_path / "r" / "model.npz") as model,
        np.load(tmp_path / "r" / "checkpoints" / f"round-{last:05d}.npz") as covered,
    ):
        assert_same(model, covered)


@pytest.mark.parametrize("strategy", ["fedavgm", "fedadam", "fedyogi", "fedopt"])
def test_a_strategy_with_an_optimizer_takes_the_step(strategy, tmp_path):
    outcome = federated(tmp_path, **{"strategy.name": strategy, "num-rounds": 2})
    assert [done.measured.accepted for done in outcome.rounds[1:]] == [CLIENTS, CLIENTS]


def test_a_strategy_on_single_updates_is_refused():
    with pytest.raises(ConfigError, match="contradicts strategy FedMedian, which needs every reply"):
        build(parse(STEPS | {"strategy.name": "fedmedian"}))


def test_a_resumed_run_goes_on_with_the_schedule_and_the_charge(tmp_path):
    stopped_after(tmp_path, STEPS | {"strategy.name": "fedavgm", "strategy.min-nodes": 4}, 1)
    outcome = resume(tmp_path)
    events = [entry.event for entry in outcome.plan.budget.ledger.entries if entry.unit == "example"]
    assert len(events) >= 3 and [done.number for done in outcome.rounds][-1] == 3
    assert outcome.statement.clients.status == "conditional", "the run may have been broken off for what it released"
    assert outcome.statement.clients.sizes[0].figures[0].steps >= 3


def test_a_run_is_not_resumed_on_a_ledger_that_lacks_its_steps(tmp_path):
    stopped_after(tmp_path, STEPS | {"strategy.min-nodes": 4}, 1)
    ledger = tmp_path / "r" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().splitlines(keepends=True)[0])
    with pytest.raises(LedgerError, match=r"holds 0 of the \d releases"):
        resume(tmp_path)


def test_a_simulation_finds_the_noise_of_its_budget(tmp_path):
    noise = {"privacy.dp-sgd-noise-multiplier": "auto", "privacy.client-max-epsilon": 3.0, "num-rounds": 1}
    (figure, _) = go(tmp_path, STEPS | noise, CLIENTS).statement.clients.sizes[0].figures
    assert 1.0 < figure.epsilon <= 3.0


def test_the_learning_rate_follows_the_schedule():
    strategy = build(parse(STEPS | {"client.schedule": "linear", "num-rounds": 4})).strategy
    assert isinstance(strategy, SecureSteps)
    assert [strategy.mechanism.rate(number) for number in (1, 2, 3)] == pytest.approx([0.1, 0.075, 0.05])


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"privacy.server": "global-dp"}, "privacy.server = 'global-dp' with privacy.client = 'dp-sgd'"),
        ({"privacy.dp-sgd-sampling-rate": 0.0}, "privacy.dp-sgd-sampling-rate = 0 with privacy.client = 'dp-sgd'"),
        ({"privacy.batch-sampling": "shuffle"}, "privacy.batch-sampling = 'shuffle'"),
        ({"client.batch-size": 10}, "client.batch-size = 10 with"),
        ({"client.local-epochs": 2}, "client.local-epochs = 2 with"),
        ({"client.optimizer": "adam"}, "client.optimizer = 'adam' with"),
        ({"privacy.noise-seed": 3}, "privacy.noise-seed = 3"),
        ({"strategy.sampling": "poisson"}, "strategy.sampling = 'poisson'"),
        ({"secure-aggregation.enabled": False}, "privacy.dp-sgd-sampling-rate = 0.2 has no effect with"),
        ({"strategy.weighting": "examples"}, "strategy.weighting = 'examples' contradicts"),
    ],
)
def test_what_contradicts_a_shared_step_is_named(changes, says):
    with pytest.raises(ConfigError) as refusal:
        parse(STEPS | changes)
    assert says in str(refusal.value)


def test_a_run_on_digits_learns(tmp_path):
    keys = {"task.name": "digits", "task.model": "softmax", "num-rounds": 12, "client.learning-rate": 2.0}
    outcome = federated(tmp_path, **keys, **{"evaluation.every": 12})
    assert outcome.rounds[-1].central["accuracy"] > 0.7
