"""A site's policy: its file, its words, and what happens when it cannot be read."""

import tomllib
from itertools import product
from pathlib import Path

import pytest
from asking import GLOBAL, METRIC, OPEN, context_of, message_of, node_at, policy_file, request_of_kind
from rich.console import Console
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.client.app import app
from cloister.client.enforce import enforce_policy
from cloister.client.mods import contain_errors
from cloister.client.node import node_of
from cloister.client.policy import RANGES, Policy, policy_of, read_policy, render
from cloister.config.run import parse
from cloister.deploy.provision.scripts import policy_template
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.utils.errors import ConfigError, PolicyError

BUNDLE = "0" * 64
NUMBERS = [name for name, field in Policy.model_fields.items() if field.annotation in (int, float)]
TRIED = ["min_rows", "max_epsilon", "target_delta"]
"""A number of each type that there is."""
SUMS = {"demands_secure_aggregation": True}
DP = {"mechanisms": ["dp-sgd"], "min_server_noise_multiplier": None}


def of(**changes):
    """A policy of keys, without a file."""
    keys = {"mechanisms": [], "tasks": ["digits"]} | changes
    return Policy.model_validate({key.replace("_", "-"): value for key, value in keys.items()})


def type_of(name):
    """Return the type of a key, with its bounds."""
    field = Policy.model_fields[name]
    return field.annotation, field.metadata


class TestTheFile:
    def test_the_template_is_a_policy_with_every_key(self, tmp_path):
        path = tmp_path / "policy.toml"
        path.write_text(policy_template())
        fields = {name.replace("_", "-") for name in Policy.model_fields}
        assert set(tomllib.loads(policy_template())) == fields
        assert read_policy(path).mechanisms == ["dp-sgd", "gaussian"]

    def test_a_malformed_policy_is_one_clear_error(self, tmp_path):
        cases = [
            ({"mechanisms": None}, "mechanisms is missing"),
            ({"tasks": None}, "tasks is missing"),
            ({"tasks": []}, r"tasks = \[\] is not valid"),
            ({"mechanisms": ["local-dp"]}, r"mechanisms holds 'local-dp'; .*known: 'global-dp', .*, or 'server:NAME'"),
            (
                DP | {"mechanisms": ["server:mine"]},
                r"'server:mine', and no noise is too little for it: state min-server",
            ),
            ({"min_row": 5}, "unknown key 'min-row'; did you mean 'min-rows'\\?; valid keys: mechanisms, "),
            ({"min_rows": "5"}, "min-rows = '5' is not valid: it must be a valid integer"),
            ({"public_size": 40.0}, "public-size = 40.0 is not valid"),
            ({"group": "a" * 201}, "group = 'a+' is not valid"),
            ({"target_delta": 1.0}, "target-delta = 1.0"),
            ({"target_delta": 0.0}, "target-delta = 0.0"),
            ({"scores_may_leave": 1}, "scores-may-leave = 1 "),
            ({"allowed_fabs": ["abc"]}, "allowed-fabs.0 = 'abc'"),
            (DP | {"min_server_noise_multiplier": 1.0}, "no effect unless mechanisms holds 'glo"),
            ({"min_gaussian_noise_multiplier": 1.0}, "no effect unless mechanisms holds 'gaussian'"),
            (
                {"min_laplace_noise_multiplier": 1.0},
                "min-laplace-noise-multiplier = 1 has no effect unless .*'laplace'",
            ),
            ({"min_radius": 1.0}, "min-radius = 1 has no effect unless mechanisms holds 'laplace'"),
            (
                {"min_client_clipping_norm": 2.0, "max_client_clipping_norm": 1.0},
                "min-client-clipping-norm = 2 must be at most max-client-clipping-norm = 1",
            ),
            (
                {"min_colluding": 3, "max_colluding": 2},
                "min-colluding = 3 must be at most max-colluding = 2",
            ),
            ({"demands_secure_aggregation": 1}, "demands-secure-aggregation = 1 is not valid"),
            ({"peers": ["SHA256:"]}, "peers = "),
        ]

        def check(changes, says):
            with pytest.raises(ConfigError, match=says):
                read_policy(policy_file(tmp_path, **changes))

        assert failures(cases, check) == []

    def test_no_number_is_infinite_negative_or_another_type(self, tmp_path):
        """An infinite maximum would be no limit, an infinite minimum one that no run meets."""

        def check(name, value):
            key, path = name.replace("_", "-"), policy_file(tmp_path)
            path.write_text(path.read_text() + f"\n{key} = {value}\n")
            with pytest.raises(ConfigError, match=f"{key} = "):
                read_policy(path)

        cases = product(TRIED, ["inf", "-inf", "nan", "-1", "true", "'1'"])
        assert failures(cases, check) == []

    def test_every_number_is_of_a_type_that_was_tried(self):
        others = {"mechanisms", "tasks", "group", "scores_may_leave", "allowed_fabs"}
        assert set(NUMBERS) == set(Policy.model_fields) - others - {"demands_secure_aggregation", "peers"}
        types = [type_of(name) for name in TRIED]
        assert [name for name in NUMBERS if type_of(name) not in types] == []

    @pytest.mark.parametrize("text", ["mechanisms = [", "\xff", "max-epsilon = nan\ntasks = ['digits']\nmechanisms=[]"])
    def test_what_is_no_policy_refuses_everything_and_quotes_nothing(self, tmp_path, text, caplog):
        path = policy_file(tmp_path)
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(PolicyError, match="cannot be read, so it takes part in nothing") as refused:
            enforce_policy(request_of_kind(), node_at(OPEN, {"policy": str(path)}))
        assert str(tmp_path) not in str(refused.value) and str(tmp_path) in caplog.text

    def test_a_policy_that_is_not_there_refuses_everything(self, tmp_path):
        with pytest.raises(PolicyError, match="cannot be read"):
            enforce_policy(request_of_kind(), node_at(OPEN, {"policy": str(tmp_path / "none.toml")}))

    def test_an_edit_holds_from_the_next_message_on(self, tmp_path):
        def asked():
            node = {"policy": str(tmp_path / "policy.toml"), "partition-id": 0, "num-partitions": 4}
            enforce_policy(request_of_kind(settings=METRIC), node_at(METRIC, node))

        policy_file(tmp_path, min_server_noise_multiplier=None, max_epsilon=1.0)
        asked()
        policy_file(tmp_path, mechanisms=["global-dp"])
        with pytest.raises(PolicyError):
            asked()

    def test_without_a_policy_there_is_none(self):
        assert policy_of("") is None


KNOWN = (
    "known: 'global-dp', 'metric', 'dp-sgd', 'gaussian', 'laplace', or 'server:NAME' for a mechanism of another "
    "package on the server"
)
NO_MINIMUM = "and no noise is too little for it: state"
FINGERPRINT = f"SHA256:{'A' * 43}"
SAID = [
    ({"mechanisms": ["dpsgd"]}, f"mechanisms holds 'dpsgd'; did you mean 'dp-sgd'?; {KNOWN}"),
    *[
        ({"mechanisms": [name]}, f"mechanisms holds {name!r}; {KNOWN}")
        for name in ("server:", "server:none", "server:laplace-clustering")
    ],
    (
        {"mechanisms": ["server:theirs"]},
        f"mechanisms holds 'server:theirs', {NO_MINIMUM} min-server-noise-multiplier or max-epsilon",
    ),
    ({"mechanisms": ["metric"]}, f"mechanisms holds 'metric', {NO_MINIMUM} min-server-noise-multiplier or max-epsilon"),
    ({"mechanisms": ["dp-sgd"]}, f"mechanisms holds 'dp-sgd', {NO_MINIMUM} min-dp-sgd-noise-multiplier or a budget"),
    (
        {"mechanisms": ["laplace"]},
        f"mechanisms holds 'laplace', {NO_MINIMUM} min-laplace-noise-multiplier, max-leakage or a budget",
    ),
    (
        {"min_server_noise_multiplier": 1e-6},
        "min-server-noise-multiplier = 1e-06 has no effect unless mechanisms holds 'global-dp' or 'metric' or "
        "'server:NAME'",
    ),
    (
        {"min_dp_sgd_noise_multiplier": 1.0},
        "min-dp-sgd-noise-multiplier = 1 has no effect unless mechanisms holds 'dp-sgd'",
    ),
    ({"min_radius": 2.0}, "min-radius = 2 has no effect unless mechanisms holds 'laplace'"),
    (
        {"mechanisms": ["laplace"], "max_leakage": 1.0, "min_radius": 2.0, "max_radius": 1.0},
        "min-radius = 2 must be at most max-radius = 1",
    ),
    ({"min_batch_size": 9, "max_batch_size": 8}, "min-batch-size = 9 must be at most max-batch-size = 8"),
    (
        {"peers": {"north": f"{FINGERPRINT}A"}},
        f"peers holds '{FINGERPRINT}A', which is no fingerprint as ssh-keygen -l prints it",
    ),
]
BINDING = [
    {"mechanisms": ["server:theirs"], "min_server_noise_multiplier": 1.0},
    {"mechanisms": ["server:theirs"], "max_epsilon": 1.0},
    {"min_batch_size": 8, "max_batch_size": 8, "min_colluding": 2},
    {"mechanisms": ["laplace"], "max_leakage": 1.0, "min_radius": 2.0, "max_radius": 2.0},
    {"peers": {"north": FINGERPRINT}},
]


class TestWhatIsSaidOfTheFile:
    def test_a_rule_that_is_none_or_binds_nobody(self, tmp_path):
        def check(changes, says):
            path = policy_file(tmp_path, **{"mechanisms": [], "min_server_noise_multiplier": None} | changes)
            with pytest.raises(ConfigError) as refused:
                read_policy(path)
            assert str(refused.value) == f"policy {path}: {says}"

        assert failures(SAID, check) == []

    @pytest.mark.parametrize("changes", BINDING)
    def test_nothing_of_rules_that_bind(self, tmp_path, changes):
        found = read_policy(policy_file(tmp_path, **{"mechanisms": [], "min_server_noise_multiplier": None} | changes))
        assert {name: getattr(found, name) for name in changes} == changes

    def test_that_it_cannot_be_read_and_why_in_the_log(self, tmp_path, caplog):
        with caplog.at_level("ERROR", "cloister.client"), pytest.raises(PolicyError) as refused:
            policy_of(str(tmp_path / "none.toml"))
        assert str(refused.value) == (
            "the policy of this node cannot be read, so it takes part in nothing; details are in its log"
        )
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("cloister.client", "ERROR")
        assert record.message == f"policy {tmp_path / 'none.toml'}: No such file or directory"

    def test_that_it_is_no_toml(self, tmp_path):
        path = tmp_path / "policy.toml"
        for content in (b"mechanisms = [", b"\xff"):
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=rf"^policy {path} is no TOML: "):
                read_policy(path)

    def test_every_key_that_is_wrong_on_a_line_of_its_own(self, tmp_path):
        path = policy_file(tmp_path, mechanisms=None, tasks=None)
        with pytest.raises(ConfigError) as refused:
            read_policy(path)
        assert str(refused.value) == f"policy {path}: mechanisms is missing\npolicy {path}: tasks is missing"

    def test_a_path_in_the_home_folder(self, tmp_path, monkeypatch):
        policy_file(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert policy_of("~/policy.toml").tasks == ["digits"]

    def test_the_stricter_budgets_are_in_force(self, tmp_path):
        def check(given, ceilings, expected):
            rules = {"mechanisms": [], "min_server_noise_multiplier": None}
            policy = None if ceilings is None else read_policy(policy_file(tmp_path, **rules, **ceilings))
            node = node_of(dict(zip(("max-epsilon", "max-example-epsilon", "target-delta"), given, strict=True))).under(
                policy
            )
            assert (node.max_epsilon, node.max_example_epsilon, node.target_delta) == expected

        cases = [
            ((3.0, 4.0, 1e-6), None, (3.0, 4.0, 1e-6)),
            ((3.0, 4.0, 1e-4), {}, (3.0, 4.0, 1e-4)),
            ((0.0, 0.0, 1e-4), {"max_epsilon": 2.0}, (2.0, 0.0, 1e-5)),
            ((0.0, 0.0, 1e-6), {"max_example_epsilon": 2.0}, (0.0, 2.0, 1e-6)),
            ((3.0, 0.5, 1e-4), {"max_epsilon": 2.0, "max_example_epsilon": 1.0}, (2.0, 0.5, 1e-5)),
            ((0.5, 3.0, 1e-4), {"max_epsilon": 2.0, "max_example_epsilon": 1.0}, (0.5, 1.0, 1e-5)),
        ]
        assert failures(cases, check) == []


class TestWhatBindsNobody:
    """A list of mechanisms that any noise satisfies, with no budget either, insists on nothing."""

    def test_each_mechanism_needs_a_minimum_or_a_budget(self):
        def check(mechanism, keys):
            with pytest.raises(ValueError, match=f"mechanisms holds '{mechanism}', and no noise is too little for it"):
                of(mechanisms=[mechanism])
            for key in keys:
                assert of(mechanisms=[mechanism], **{key: 1.0})

        cases = [
            ("global-dp", ["min_server_noise_multiplier", "max_epsilon"]),
            ("metric", ["min_server_noise_multiplier", "max_epsilon"]),
            ("dp-sgd", ["min_dp_sgd_noise_multiplier", "max_epsilon", "max_example_epsilon"]),
            ("gaussian", ["min_gaussian_noise_multiplier", "max_epsilon", "max_example_epsilon"]),
            ("laplace", ["min_laplace_noise_multiplier", "max_epsilon", "max_example_epsilon", "max_leakage"]),
        ]
        assert failures(cases, check) == []

    def test_a_budget_of_examples_says_nothing_of_noise_on_the_server(self):
        with pytest.raises(ValueError, match="mechanisms holds 'global-dp'"):
            of(mechanisms=["global-dp"], max_example_epsilon=1.0)

    def test_each_of_several_needs_its_own(self):
        with pytest.raises(ValueError, match="mechanisms holds 'laplace'"):
            of(mechanisms=["dp-sgd", "laplace"], min_dp_sgd_noise_multiplier=1.0)

    def test_who_insists_on_nothing_may_say_so(self):
        assert of().mechanisms == []


def test_the_stricter_budget_wins(tmp_path):
    def check(node, changes, budget):
        found = node_at(OPEN, node | {"policy": str(policy_file(tmp_path, **changes))}).config
        assert (found.max_epsilon, found.max_example_epsilon, found.target_delta) == budget

    cases = [
        ({}, {}, (0.0, 0.0, 1e-5)),
        ({"max-epsilon": 3.0}, {}, (3.0, 0.0, 1e-5)),
        ({}, {"max_epsilon": 2.0}, (2.0, 0.0, 1e-5)),
        ({"max-epsilon": 3.0}, {"max_epsilon": 2.0, "target_delta": 1e-4}, (2.0, 0.0, 1e-5)),
        ({"max-epsilon": 1.0}, {"max_epsilon": 2.0, "target_delta": 1e-6}, (1.0, 0.0, 1e-6)),
        ({"max-example-epsilon": 1.0}, {"max_example_epsilon": 2.0}, (0.0, 1.0, 1e-5)),
        ({"max-epsilon": 1.0}, {"max_example_epsilon": 2.0}, (1.0, 2.0, 1e-5)),
    ]
    assert failures(cases, check) == []


class TestInWords:
    def test_what_a_policy_demands_and_what_it_does_not_prevent(self, tmp_path):
        changes = {"min_server_noise_multiplier": 1.5, "max_epsilon": 8.0, "min_rows": 30, "allowed_fabs": [BUNDLE]}
        result = CliRunner().invoke(cli.app, ["policy", str(policy_file(tmp_path, **changes))])
        assert result.exit_code == 0
        assert result.output.splitlines() == [
            "tasks: digits",
            "noise: global-dp with at least 1.5, or metric with at least 1.5",
            "! this site cannot check the noise that the server adds",
            "for the site at most ε = 8 at δ = 1e-05 over all runs on this data",
            "at least 30 examples to train on",
            "no scores leave",
            f"app bundle {BUNDLE}",
            "! a malicious server learns that this node is connected, when it replies, and by which rule it refuses",
            "! the server sees the site's trained model as it is, in every round of a run whose noise the server adds",
            "! a malicious server learns roughly how many examples there are, from how long training takes",
        ]

    def test_both_budgets_are_named_with_their_units(self):
        said = render(of(max_epsilon=8.0, max_example_epsilon=2.5, group="patient"))
        assert [line.partition(" at δ")[0] for line in said if "ε = " in line] == [
            "for the site at most ε = 8",
            "for each patient at most ε = 2.5",
        ]

    def test_every_key_has_a_word(self):
        """A policy that states a key reads differently from one that does not."""
        every = of(mechanisms=["dp-sgd", "gaussian", "laplace"], max_example_epsilon=1.0)
        same = {"mechanisms", "tasks", "target_delta", "scores_may_leave", "allowed_fabs", "max_example_epsilon"}
        low = {name for name in Policy.model_fields if name.startswith("min_server")}
        for name in set(Policy.model_fields) - same - low:
            odd = {"group": "patient", "demands_secure_aggregation": True, "peers": {"north": "SHA256:"}}
            value = odd.get(name, 3 if Policy.model_fields[name].annotation is int else 3.0)
            assert render(every.model_copy(update={name: value})) != render(every), name

    def test_ranges_name_fields_that_there_are(self):
        fields = {name for pair in RANGES.values() for name in pair if name}
        assert fields <= set(Policy.model_fields)

    def test_a_line_for_a_limit(self):
        def check(changes, line):
            assert line in render(of(**changes))

        cases = [
            ({"max_learning_rate": 0.5}, "client.learning-rate: at most 0.5"),
            ({"min_batch_size": 8, "max_batch_size": 64}, "client.batch-size: at least 8 and at most 64"),
            ({"public_size": 1000}, "this site says that it has 1000 examples"),
            ({"public_size": 1000, "group": "patient"}, "this site says that it has 1000 patients"),
            ({"group": "patient"}, "each patient is protected as a whole"),
            ({"min_reply_seconds": 30.0}, "no reply sooner than 30 s after the message"),
            ({"max_messages_per_day": 5}, "training messages a day: at most 5"),
            ({"max_test_fraction": 0.3}, "task.test-fraction: at most 0.3"),
            (
                {"max_steps": 5},
                "! steps are counted from public-size: a node with data of its own has to state it, or trains nothing",
            ),
            ({"max_hypotheses": 1}, "privacy.clusters: at most 1"),
            (SUMS | {"min_threshold": 7}, "secure-aggregation.threshold: at least 7"),
            (
                SUMS | {"min_colluding": 1, "max_colluding": 2},
                "secure-aggregation.colluding: at least 1 and at most 2",
            ),
            (SUMS, "secure aggregation: the server must see a sum of several clients' updates only"),
            (SUMS, "! a sum may be of as few clients as the run says: set min-threshold"),
            (SUMS, "! a run need not hold against a server that has a client on its side: set min-colluding"),
            (SUMS, "! the signer of the roster can invent clients, and so see what this site sends: pin peers"),
            ({"peers": {"a": f"SHA256:{'A' * 43}"}}, "in secure aggregations 1 fingerprints of members are pinned"),
        ]
        assert failures(cases, check) == []

    def test_everything_is_learnt_by_a_server_that_ships_its_own_code(self):
        assert "! a server that ships its own code learns everything: no rule of this policy binds that code" in render(
            of()
        )

    def test_under_secure_aggregation_the_server_sees_no_model(self):
        everything = SUMS | {"min_threshold": 7, "min_colluding": 1, "peers": {"a": f"SHA256:{'A' * 43}"}}
        lines = render(of(mechanisms=["global-dp"], max_epsilon=1.0, allowed_fabs=[BUNDLE], **everything))
        assert [line for line in lines if line.startswith("!")] == [
            "! this site cannot check the noise that the other clients add",
            "! a malicious server learns that this node is connected, when it replies, and by which rule it refuses",
            "! a malicious server learns roughly how many examples there are, from how long training takes",
        ]

    def test_what_is_prevented_is_not_listed_as_learnt(self):
        strict = of(
            mechanisms=["dp-sgd"],
            max_example_epsilon=1.0,
            group="patient",
            allowed_fabs=[BUNDLE],
            min_reply_seconds=9.0,
        )
        assert [line for line in render(strict) if line.startswith("!")] == [
            "! a malicious server learns that this node is connected, when it replies, and by which rule it refuses"
        ]

    def test_warns_of_a_policy_that_allows_everything(self, tmp_path):
        path = policy_file(tmp_path, mechanisms=[], min_server_noise_multiplier=None, scores_may_leave=True)
        lines = CliRunner().invoke(cli.app, ["policy", str(path)]).output.splitlines()
        assert {
            "! this site takes part in runs without noise: the server sees its models",
            "! no budget: this site takes part in every run within these rules, however many there are",
            "! scores may leave, without noise",
            "! any app bundle may run, also one that ignores this policy",
        } < set(lines)

    def test_a_malformed_policy_is_one_error_and_exit_code_1(self, tmp_path):
        result = CliRunner().invoke(cli.app, ["policy", str(policy_file(tmp_path, tasks=None))])
        assert result.exit_code == 1 and "tasks is missing" in result.output and "Traceback" not in result.output


def test_the_reason_is_told_and_nothing_else(tmp_path):
    node = {"policy": str(policy_file(tmp_path))}

    def refuse(*_):
        enforce_policy(request_of_kind(), node_at(OPEN, node))

    reply = contain_errors(message_of(), context_of(OPEN, node), refuse)
    assert reply.error.reason.startswith(
        "PolicyError: refused by the policy of this node: none of global-dp, metric is on as demanded: privacy.server"
    )
    assert str(tmp_path) not in reply.error.reason


def federated(tmp_path, settings, policies):
    """A run on one node for each policy; a node without one has None."""
    nodes = []
    for number, changes in enumerate(policies):
        node = {"partition-id": number, "num-partitions": len(policies), "ledger-dir": str(tmp_path / f"own-{number}")}
        if changes is not None:
            node["policy"] = str(policy_file(tmp_path / str(number), **changes))
        nodes.append(node)
    config = parse(settings | {"output-dir": str(tmp_path / "runs"), "num-rounds": 2, "tensorboard": False})
    return run(LocalGrid(app, config.flat(), nodes), config, ConsoleReporter(2, Console(quiet=True)))


def test_one_site_refuses_and_the_others_go_on(tmp_path):
    outcome = federated(tmp_path, GLOBAL, [None, {}, {"min_server_noise_multiplier": 3.0}])
    for done in outcome.rounds[1:]:
        (rejected,) = done.measured.rejected
        assert (rejected.node_id, done.measured.accepted) == (3, 2)
        assert "the server promises a noise multiplier of 2, demanded: at least 3" in rejected.detail
    assert not (tmp_path / "own-2").exists(), "a refused message is no release"


def test_a_policys_budget_holds_and_is_kept_in_the_nodes_ledger(tmp_path):
    outcome = federated(tmp_path, GLOBAL, [None, None, {"max_epsilon": 2.5}])
    first, second = (done.measured for done in outcome.rounds[1:])
    assert (first.accepted, second.accepted) == (3, 2)
    assert "BudgetExhausted" in second.rejected[0].detail
    (ledger,) = Path(tmp_path / "own-2").glob("*.jsonl")
    assert "gaussian" in ledger.read_text().lower()
