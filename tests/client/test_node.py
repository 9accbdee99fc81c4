"""A node's configuration: every key is checked before anything is answered, and the server hears nothing of it."""

import math

import pytest
from asking import DP_SGD, GAUSSIAN, OPEN, answer, arrays_of, ledger_of_node, message_of, node_at, own_node, policy_file
from support import failures
from typer.testing import CliRunner

from cloister import cli
from cloister.client.ledgers import keeps_ledger
from cloister.client.node import NodeConfig, node_of
from cloister.config.io import kebab
from cloister.deploy.provision.federation import Site
from cloister.utils.errors import ConfigError, NodeConfigError

NO_PATHS, NO_NUMBERS = ["", 5, True], [-1.0, "1", True, math.nan, math.inf]
BAD = {
    "data-path": NO_PATHS,
    "partition-id": [-1, 1.0, "1", True],
    "num-partitions": [0, 4.0, "4", True],
    "ledger-dir": NO_PATHS,
    "data-identity": ["", "../other", "two words", "line\n", 7],
    "max-epsilon": NO_NUMBERS,
    "max-example-epsilon": NO_NUMBERS,
    "target-delta": [0.0, 1.0, *NO_NUMBERS],
    "max-leakage": NO_NUMBERS,
    "min-radius": NO_NUMBERS,
    "public-size": [-1, 10**9 + 1, 40.0, "40", True],
    "group": ["line\n", "x" * 300, 7, True],
    "policy": NO_PATHS,
    "model-dir": NO_PATHS,
    "signing-key": NO_PATHS,
    "roster": NO_PATHS,
    "roster-key": NO_PATHS,
    "node-key": NO_PATHS,
    "secure-state": NO_PATHS,
    "device": ["", "gpu", "cuda:0", 0, True],
}
KEPT_FOR = {
    "data-path": "own.npz",
    "ledger-dir": "ledgers",
    "data-identity": "ward",
    "max-epsilon": 0,
    "max-example-epsilon": 0.0,
    "target-delta": 1e-5,
    "max-leakage": 0,
    "policy": "policy.toml",
}
OTHERS = {"partition-id": 0, "num-partitions": 1, "public-size": 0, "group": "ward", "min-radius": 0}
OTHERS |= {"model-dir": "model", "device": "auto"}
SIGNS = {"signing-key": "signing.key", "roster": "roster.signed", "roster-key": "roster.pub"}
SIGNS |= {"node-key": "node.key", "secure-state": "shelf"}
KEYS = [kebab(name) for name in NodeConfig.model_fields]
TOLD = "NodeConfigError: details are in the log of the node"


class TestEachKey:
    def test_that_is_bad_is_named_with_its_value(self):
        def check(key, value):
            with pytest.raises(NodeConfigError) as refused:
                node_of({key: value})
            assert str(refused.value).startswith(f"node configuration: {key} = {value!r} is not valid: ")
            assert "\n" not in str(refused.value)

        assert failures([(key, value) for key, values in BAD.items() for value in values], check) == []

    def test_was_tried(self):
        assert [*BAD] == KEYS and {**KEPT_FOR, **SIGNS, **OTHERS}.keys() == set(KEYS)

    def test_that_is_bad_has_a_line_of_its_own(self):
        with pytest.raises(ConfigError) as refused:
            node_of({"max-epsilon": -1, "public-size": "40", "x": 1})
        said = [line.partition(" = ")[0].partition("; ")[0] for line in str(refused.value).splitlines()]
        assert said == [f"node configuration: {what}" for what in ("max-epsilon", "public-size", "unknown key 'x'")]

    def test_that_is_unknown_is_refused_with_the_nearest(self):
        def check(key, meant):
            with pytest.raises(NodeConfigError) as refused:
                node_of({"partition-id": 0, "num-partitions": 1, key: 1})
            hint = f"did you mean {meant!r}?" if meant else "the nearest valid key is "
            assert str(refused.value).startswith(f"node configuration: unknown key {key!r}; {hint}")
            assert str(refused.value).endswith(f"; valid keys: {', '.join(KEYS)}")

        cases = [("max-epsilom", "max-epsilon"), ("max_epsilon", "max-epsilon"), ("datapath", "data-path"), ("x", None)]
        assert failures(cases, check) == []

    def test_of_a_number_takes_a_whole_one(self):
        def check(key):
            value = getattr(node_of({key: 3}), key.replace("-", "_"))
            assert (value, type(value)) == (3.0, float)

        assert failures([(key,) for key in [key for key in KEYS if BAD[key] is NO_NUMBERS]], check) == []

    def test_of_parts_must_agree(self):
        assert node_of({"partition-id": 3, "num-partitions": 4}).partition_id == 3
        with pytest.raises(NodeConfigError, match=r"^node configuration: partition-id = 4 must be below num-part"):
            node_of({"partition-id": 4, "num-partitions": 4})

    def test_about_a_ledger_has_one_kept_also_at_its_default(self):
        def check(key, value):
            assert keeps_ledger(node_of(OTHERS | {key: value}))

        assert failures(KEPT_FOR.items(), check) == []

    def test_of_a_site_that_signs_has_one_kept(self):
        assert keeps_ledger(node_of(OTHERS | SIGNS))

    def test_of_any_other_node_does_not(self, tmp_path):
        assert not keeps_ledger(node_of({})) and not keeps_ledger(node_of(OTHERS))
        node = node_at(OPEN, {"policy": str(policy_file(tmp_path, max_epsilon=2.0, public_size=70))}).config
        assert keeps_ledger(node) and (node.max_epsilon, node.public_size) == (2.0, 70)

    def test_a_delta_that_the_policy_states_holds_for_the_budget_of_the_node_too(self, tmp_path_factory):
        def check(stated, own, expected):
            tmp_path = tmp_path_factory.mktemp("case")
            said = {"policy": str(policy_file(tmp_path, **stated)), "max-example-epsilon": 8.0, "target-delta": own}
            assert node_at(OPEN, said).config.target_delta == expected

        cases = [
            ({}, 1e-3, 1e-3),
            ({"target_delta": 1e-12}, 1e-3, 1e-12),
            ({"target_delta": 1e-12}, 1e-13, 1e-13),
            ({"max_epsilon": 2.0}, 1e-3, 1e-5),
            ({"max_epsilon": 2.0, "target_delta": 1e-4}, 1e-5, 1e-5),
        ]
        assert failures(cases, check) == []


class TestTheReply:
    """One text, whatever is wrong: what a site writes into its configuration is its own business."""

    @pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
    @pytest.mark.parametrize("wrong", [{"max-epsilom": 4.25}, {"max-epsilon": "4.25"}, {"policy": 4.25}])
    def test_says_nothing_of_the_site_and_its_log_says_all(self, tmp_path, caplog, kind, wrong):
        reply = answer(OPEN | {"task.test-fraction": 0.5}, own_node(tmp_path) | wrong, message_of(kind=kind))
        assert reply.error.reason == TOLD
        assert next(iter(wrong)) in caplog.text and "node configuration: " in caplog.text

    def test_about_parts_neither(self, caplog):
        assert answer(OPEN, {"partition-id": 7, "num-partitions": 4}).error.reason == TOLD
        assert "partition-id = 7 must be below num-partitions = 4" in caplog.text

    def test_of_a_node_without_data_neither(self, caplog):
        assert answer(OPEN, {}).error.reason == TOLD
        assert "must hold 'data-path', or 'partition-id' and 'num-partitions'" in caplog.text

    @pytest.mark.parametrize("settings", [OPEN, GAUSSIAN, DP_SGD])
    def test_to_a_misspelt_budget_is_no_model(self, tmp_path, monkeypatch, settings):
        node = own_node(tmp_path)
        arrays_of(answer(settings, node))
        before = len(ledger_of_node(node).entries)
        monkeypatch.setattr("cloister.client.app.model_and_trainer_of", pytest.fail)
        for key in ("max-epsilom", "max-exampel-epsilon", "max-leakege", "polcy", "max_epsilon"):
            assert answer(settings, node | {key: 1e-9}).error.reason == TOLD
        assert len(ledger_of_node(node).entries) == before


class TestTheOperator:
    def test_of_a_warm_node_is_told_all_of_it_at_once(self, monkeypatch):
        monkeypatch.setattr("cloister.deploy.warm.node._look_at_superlink", pytest.fail)
        said = "max-epsilom=3.0 public-size=-1 data-path='/secret/ward.npz'"
        result = CliRunner().invoke(cli.app, ["warm-node", "--insecure", "--node-config", said])
        assert result.exit_code == 1 and "Traceback" not in result.output
        told = " ".join(result.output.split())
        assert "node configuration: unknown key 'max-epsilom'" in told and "did you mean 'max-epsilon'?" in told
        assert "node configuration: public-size = -1 is not valid" in told

    def test_of_a_federation_writes_what_a_node_takes(self):
        """A kit starts its node with the keys of a site that say where its data is."""
        assert set(Site.model_fields) - {"name", "public_key", "public_signing_key"} <= set(NodeConfig.model_fields)
