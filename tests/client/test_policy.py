"""A site's policy: what it refuses, what it says when it does, and what happens when it cannot be read."""

import tomllib

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from rich.console import Console
from support import content, zeros
from typer.testing import CliRunner

from cloister import cli
from cloister.client.app import app
from cloister.client.books import numbers_of
from cloister.client.mods import contain_errors
from cloister.client.obey import obey_policy, promised_multiplier
from cloister.client.policy import CHECKED_BUNDLE, TEMPLATE, Policy, read_policy
from cloister.core.arrays import to_record
from cloister.core.config import parse
from cloister.core.errors import ConfigError, PolicyError
from cloister.core.identity import assume_run
from cloister.core.wire import CONFIG, PROMISE
from cloister.local.grid import LocalGrid
from cloister.server.console import Narrator
from cloister.server.run import run

GLOBAL = {"task.model": "softmax", "privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
METRIC = {"task.model": "softmax"}
OPEN = {"task.model": "softmax", "privacy.server": "none"}
LAPLACE = OPEN | {"privacy.client": "laplace", "privacy.client-noise-multiplier": 1.0, "privacy.per-layer": False}
DP_SGD = OPEN | {"privacy.client": "dp-sgd", "privacy.client-noise-multiplier": 1.0}
BUNDLE = "0" * 64


def policy_file(folder, **changes):
    """A policy that allows digits under server-side noise, with changes; None removes a key."""
    keys = {"mechanisms": ["global-dp", "metric"], "tasks": ["digits"]} | changes
    path = folder / "policy.toml"
    lines = [f"{key.replace('_', '-')} = {_toml(value)}" for key, value in keys.items() if value is not None]
    path.write_text("\n".join(lines))
    return path


def _toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


def ask(folder, settings, kind="train", promise=None, **changes):
    """What the mod makes of a message: the reply, or the error."""
    assume_run()
    record = ConfigRecord({"server-round": 1, "seed": 3} | ({PROMISE: promise} if promise else {}))
    message = Message(RecordDict({"arrays": to_record(zeros()), CONFIG: record}), 1, kind)
    node = {"policy": str(policy_file(folder, **changes)), "partition-id": 0, "num-partitions": 4}
    context = Context(1, 1, node, RecordDict(), settings)
    return obey_policy(message, context, lambda *_: Message(content(zeros()), reply_to=message))


class TestTheFile:
    def test_the_template_is_a_policy_with_every_key(self, tmp_path):
        path = tmp_path / "policy.toml"
        path.write_text(TEMPLATE)
        assert read_policy(path) == Policy(mechanisms=["global-dp", "metric"], tasks=["digits"])
        fields = {name.replace("_", "-") for name in Policy.model_fields}
        assert set(tomllib.loads(TEMPLATE)) == fields

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"mechanisms": None}, "mechanisms is missing"),
            ({"tasks": None}, "tasks is missing"),
            ({"tasks": []}, r"tasks = \[\] is not valid"),
            ({"mechanisms": ["local-dp"]}, r"mechanisms.0 = 'local-dp' is not valid: it must be 'global-dp'"),
            ({"min_row": 5}, "unknown key 'min-row'; valid keys: mechanisms, .*min-rows"),
            ({"min_rows": "5"}, "min-rows = '5' is not valid: it must be a valid integer"),
            ({"min_rows": -1}, "min-rows = -1"),
            ({"max_epsilon": -1.0}, "max-epsilon = -1.0"),
            ({"target_delta": 1.0}, "target-delta = 1.0"),
            ({"scores_may_leave": 1}, "scores-may-leave = 1 "),
            ({"allowed_fabs": ["abc"]}, "allowed-fabs.0 = 'abc'"),
            ({"mechanisms": ["dp-sgd"], "min_server_noise_multiplier": 1.0}, "no effect unless mechanisms holds 'glo"),
            ({"min_client_noise_multiplier": 1.0}, "no effect unless mechanisms holds 'dp-sgd'"),
            ({"min_radius": 1.0}, "min-radius = 1 has no effect unless mechanisms holds 'laplace'"),
        ],
    )
    def test_a_malformed_policy_is_one_clear_error(self, tmp_path, changes, says):
        with pytest.raises(ConfigError, match=says):
            read_policy(policy_file(tmp_path, **changes))

    @pytest.mark.parametrize("text", ["mechanisms = [", "\xff", "max-epsilon = nan\ntasks = ['digits']\nmechanisms=[]"])
    def test_what_is_no_policy_refuses_everything_and_quotes_nothing(self, tmp_path, text, caplog):
        with pytest.raises(PolicyError, match="cannot be read, so it takes part in nothing") as refused:
            path = policy_file(tmp_path)
            path.write_bytes(text.encode("latin-1"))
            node = {"policy": str(path)}
            assume_run()
            message = Message(RecordDict(), 1, "train")
            obey_policy(message, Context(1, 1, node, RecordDict(), OPEN), lambda *_: message)
        assert str(tmp_path) not in str(refused.value) and str(tmp_path) in caplog.text

    def test_a_policy_that_is_not_there_refuses_everything(self, tmp_path):
        message = Message(RecordDict(), 1, "train")
        context = Context(1, 1, {"policy": str(tmp_path / "none.toml")}, RecordDict(), OPEN)
        with pytest.raises(PolicyError, match="cannot be read"):
            obey_policy(message, context, lambda *_: message)

    def test_an_edit_holds_from_the_next_message_on(self, tmp_path):
        assert not ask(tmp_path, METRIC).has_error()
        with pytest.raises(PolicyError):
            ask(tmp_path, METRIC, mechanisms=["global-dp"])


class TestMechanisms:
    @pytest.mark.parametrize("settings", [GLOBAL, METRIC])
    def test_one_of_the_list_is_enough(self, tmp_path, settings):
        assert not ask(tmp_path, settings).has_error()

    def test_a_run_without_any_is_refused(self, tmp_path):
        with pytest.raises(
            PolicyError, match=r"privacy.server = 'none', not 'global-dp'; privacy.server = 'none', not"
        ):
            ask(tmp_path, OPEN)

    def test_unless_none_is_insisted_on(self, tmp_path):
        assert not ask(tmp_path, OPEN, mechanisms=[]).has_error()

    def test_a_mechanism_without_noise_is_off(self, tmp_path):
        with pytest.raises(PolicyError, match="is no noise"):
            ask(tmp_path, GLOBAL | {"privacy.noise-multiplier": 0.0})

    @pytest.mark.parametrize(
        ("promise", "enough"), [([1.0], True), ([0.99], False), ([1.2, 1.2], False), (None, False)]
    )
    def test_the_least_noise_is_that_of_all_promised_releases_together(self, tmp_path, promise, enough):
        if enough:
            assert not ask(tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0).has_error()
        else:
            with pytest.raises(PolicyError, match="demanded: at least 1"):
                ask(tmp_path, GLOBAL, promise=promise, min_server_noise_multiplier=1.0)

    def test_releases_add_up_as_gaussians_do(self):
        assert promised_multiplier(ConfigRecord({PROMISE: [3.0, 4.0]})) == pytest.approx(12 / 5)
        assert promised_multiplier(ConfigRecord({})) == 0.0

    def test_noise_of_the_client_that_the_run_does_not_have(self, tmp_path):
        with pytest.raises(PolicyError, match=r"privacy.client = 'none', not 'dp-sgd'"):
            ask(tmp_path, METRIC, mechanisms=["dp-sgd"], min_client_noise_multiplier=0.5)

    @pytest.mark.parametrize("kind", ["dp-sgd", "laplace", "global-dp", "metric"])
    def test_noise_that_a_seed_takes_away_again(self, tmp_path, kind):
        run = {"dp-sgd": DP_SGD, "laplace": LAPLACE, "global-dp": GLOBAL, "metric": METRIC}[kind]
        assert not ask(tmp_path, run, mechanisms=[kind]).has_error()
        with pytest.raises(PolicyError, match=r"privacy.noise-seed = 7 is noise that whoever .* demanded: -1"):
            ask(tmp_path, run | {"privacy.noise-seed": 7}, mechanisms=[kind])

    @pytest.mark.parametrize("per_layer", [False, True])
    @pytest.mark.parametrize(
        ("radius", "floor", "enough"),
        [
            (0.0, 0.0, True),
            (1e-9, 0.0, False),
            (9.0, 0.0, False),
            (0.0, 0.5, True),
            (0.5, 0.5, True),
            (0.4, 0.5, False),
        ],
    )
    def test_a_radius_next_to_none_is_noise_next_to_none(self, tmp_path, radius, floor, enough, per_layer):
        asked = LAPLACE | {"privacy.radius": radius, "privacy.per-layer": per_layer}
        policy = {"mechanisms": ["laplace"], "min_radius": floor}
        if enough:
            assert not ask(tmp_path, asked, **policy).has_error()
        else:
            demanded = "0 or at least 0.5" if floor else "0, as this node has no min-radius"
            with pytest.raises(PolicyError, match=rf"privacy.radius = .*, demanded: {demanded}"):
                ask(tmp_path, asked, **policy)


class TestLimits:
    def test_a_task_that_is_not_allowed(self, tmp_path):
        with pytest.raises(PolicyError, match=r"task.name = 'digits', allowed: breast-cancer, mnist"):
            ask(tmp_path, METRIC, tasks=["breast-cancer", "mnist"])

    def test_scores_leave_only_if_they_may(self, tmp_path):
        with pytest.raises(PolicyError, match="scores"):
            ask(tmp_path, METRIC, kind="evaluate")
        assert not ask(tmp_path, METRIC, kind="evaluate", scores_may_leave=True).has_error()

    def test_what_cannot_be_classified_is_refused(self, tmp_path):
        with pytest.raises(PolicyError, match=r"'train\.other' message is none that a policy knows"):
            ask(tmp_path, METRIC, kind="train.other")

    def test_too_many_local_epochs(self, tmp_path):
        # The recipe of digits has five.
        assert not ask(tmp_path, METRIC, max_local_epochs=5).has_error()
        with pytest.raises(PolicyError, match=r"client.local-epochs = 5, demanded: at most 4"):
            ask(tmp_path, METRIC, max_local_epochs=4)
        assert not ask(tmp_path, METRIC | {"client.local-epochs": 4}, max_local_epochs=4).has_error()

    def test_too_few_examples_without_saying_how_many(self, tmp_path):
        assert not ask(tmp_path, METRIC, min_rows=200).has_error()
        with pytest.raises(PolicyError, match=r"fewer examples than it demands of itself$") as refused:
            ask(tmp_path, METRIC, min_rows=1000)
        assert not any(character.isdigit() for character in str(refused.value))

    def test_a_bundle_nobody_has_looked_at(self, tmp_path, monkeypatch):
        with pytest.raises(PolicyError, match="allowed-fabs"):
            ask(tmp_path, METRIC, allowed_fabs=[BUNDLE])
        monkeypatch.setenv(CHECKED_BUNDLE, "1" * 64)
        with pytest.raises(PolicyError, match="allowed-fabs"):
            ask(tmp_path, METRIC, allowed_fabs=[BUNDLE])
        monkeypatch.setenv(CHECKED_BUNDLE, BUNDLE)
        assert not ask(tmp_path, METRIC, allowed_fabs=[BUNDLE]).has_error()

    @pytest.mark.parametrize(
        ("node", "changes", "budget"),
        [
            ({}, {}, (0.0, 0.0, 1e-5)),
            ({"max-epsilon": 3.0}, {}, (3.0, 0.0, 1e-5)),
            ({}, {"max_epsilon": 2.0}, (2.0, 0.0, 1e-5)),
            ({"max-epsilon": 3.0}, {"max_epsilon": 2.0, "target_delta": 1e-4}, (2.0, 0.0, 1e-5)),
            ({"max-epsilon": 1.0}, {"max_epsilon": 2.0, "target_delta": 1e-6}, (1.0, 0.0, 1e-6)),
            ({"max-example-epsilon": 1.0}, {"max_example_epsilon": 2.0}, (0.0, 1.0, 1e-5)),
            ({"max-epsilon": 1.0}, {"max_example_epsilon": 2.0}, (1.0, 2.0, 1e-5)),
        ],
    )
    def test_the_stricter_budget_wins(self, tmp_path, node, changes, budget):
        found = numbers_of(node | {"policy": str(policy_file(tmp_path, **changes))})
        assert tuple(found.values()) == budget


def test_the_reason_is_told_and_nothing_else(tmp_path):
    assume_run()
    message = Message(RecordDict({CONFIG: ConfigRecord({"server-round": 1, "seed": 3})}), 1, "train")
    context = Context(1, 1, {"policy": str(policy_file(tmp_path))}, RecordDict(), OPEN)
    reply = contain_errors(message, context, lambda *call: obey_policy(*call, lambda *_: message))
    assert reply.error.reason.startswith("PolicyError: refused by the policy of this node: privacy.server = 'none'")
    assert str(tmp_path) not in reply.error.reason


def federated(tmp_path, settings, policies):
    """A run on one node for each policy; a node without one has None."""
    nodes = []
    for number, changes in enumerate(policies):
        node = {
            "partition-id": number,
            "num-partitions": len(policies),
            "ledger-dir": str(tmp_path / f"books-{number}"),
        }
        if changes is not None:
            (tmp_path / str(number)).mkdir()
            node["policy"] = str(policy_file(tmp_path / str(number), **changes))
        nodes.append(node)
    config = parse(settings | {"output-dir": str(tmp_path / "runs"), "num-rounds": 2, "tensorboard": False})
    return run(LocalGrid(app, config.flat(), nodes), config, Narrator(2, Console(quiet=True)))


def test_one_site_refuses_and_the_others_go_on(tmp_path):
    outcome = federated(tmp_path, GLOBAL, [None, {}, {"min_server_noise_multiplier": 3.0}])
    for done in outcome.rounds[1:]:
        (rejected,) = done.measured.rejected
        assert (rejected.node_id, done.measured.accepted) == (3, 2)
        assert "the server promises a noise multiplier of 2, demanded: at least 3" in rejected.detail
    assert not (tmp_path / "books-2").exists(), "a refused message is no release"
    assert np.isfinite(outcome.rounds[-1].central["accuracy"])


def test_a_policys_budget_holds_and_is_kept_in_the_nodes_books(tmp_path):
    outcome = federated(tmp_path, GLOBAL, [None, None, {"max_epsilon": 2.5}])
    first, second = (done.measured for done in outcome.rounds[1:])
    assert (first.accepted, second.accepted) == (3, 2)
    assert "BudgetExhausted" in second.rejected[0].detail
    (ledger,) = (tmp_path / "books-2").glob("*.jsonl")
    assert "gaussian" in ledger.read_text().lower()


class TestTheCommand:
    def test_says_what_a_policy_demands_and_what_it_does_not_prevent(self, tmp_path):
        changes = {"min_server_noise_multiplier": 1.5, "max_epsilon": 8.0, "min_rows": 30, "allowed_fabs": [BUNDLE]}
        result = CliRunner().invoke(cli.app, ["policy", str(policy_file(tmp_path, **changes))])
        assert result.exit_code == 0
        assert result.output.splitlines() == [
            "tasks: digits",
            "noise: global-dp with at least 1.5, or metric with at least 1.5",
            "! noise of the server is believed, not seen",
            "at most ε = 8 at δ = 1e-05 over all runs on this data",
            "at least 30 examples to train on",
            "no scores leave",
            f"app bundle {BUNDLE}",
        ]

    def test_warns_of_a_policy_that_allows_everything(self, tmp_path):
        path = policy_file(tmp_path, mechanisms=[], scores_may_leave=True)
        lines = CliRunner().invoke(cli.app, ["policy", str(path)]).output.splitlines()
        assert len([line for line in lines if line.startswith("!")]) == 3

    def test_a_malformed_policy_is_one_error_and_exit_code_1(self, tmp_path):
        result = CliRunner().invoke(cli.app, ["policy", str(policy_file(tmp_path, tasks=None))])
        assert result.exit_code == 1 and "tasks is missing" in result.output and "Traceback" not in result.output
