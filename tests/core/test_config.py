"""The run configuration: its defaults, and one clear line for everything that is wrong with one."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cloister.client.policy import read_policy
from cloister.config.errors import NEAREST
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import RunConfig, StrategyConfig, digest_of, flatten, known_keys, parse, shown
from cloister.config.variants import DpSgdPrivacy, GlobalPrivacy
from cloister.core.errors import ConfigError, PluginError
from cloister.deploy.federation import read_federation
from cloister.server.build import build
from cloister.server.strategies import named_strategy
from cloister.strategies import STRATEGIES

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def shipped():
    """`[tool.flwr.app.config]` as Flower hands it over."""
    return flatten(tomllib.loads(PYPROJECT.read_text())["tool"]["flwr"]["app"]["config"])


def options_of(name):
    """The keyword options of a built-in strategy, as they are written in a configuration."""
    parameters = inspect.signature(STRATEGIES.load(name)).parameters.values()
    return {p.name.replace("_", "-") for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def refusal(**keys):
    """What is said about a bad configuration; dots and dashes of the keys are written `__` and `_`."""
    flat = {key.replace("__", ".").replace("_", "-"): value for key, value in keys.items()}
    with pytest.raises(ConfigError) as caught:
        parse(flat)
    return str(caught.value)


# Defaults.


def test_the_shipped_defaults_are_the_parsed_ones_and_the_other_way_round():
    options = {key for key in shipped() if key not in known_keys()}
    assert {key: value for key, value in shipped().items() if key not in options} == RunConfig().flat()
    assert parse(shipped()) == parse({}) == RunConfig()


def test_every_shipped_default_has_the_type_that_is_parsed():
    # 1 == 1.0 == True in Python; Flower decides by the type of the default what an override may be.
    parsed = RunConfig().flat()
    assert {key: type(value) for key, value in shipped().items() if key in parsed} == {
        key: type(value) for key, value in parsed.items()
    }


def test_the_shipped_options_of_strategies_are_those_of_the_built_in_ones():
    # Flower refuses to override a key that is not in pyproject.toml: an option missing there cannot be used.
    shipped_options = {key.removeprefix("strategy.") for key in shipped() if key not in known_keys()}
    assert shipped_options == set().union(*map(options_of, STRATEGIES.names()))
    assert {shipped()[f"strategy.{option}"] for option in shipped_options} == {"auto"}


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_every_strategy_starts_from_the_shipped_defaults(name):
    assert named_strategy(parse(shipped() | {"strategy.name": name})) is not None


# Refusals. Each names the key, what was found and what is valid, in one line.


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num-round", "num-rounds"),
        ("privacy.noise-multiplyer", "privacy.noise-multiplier"),
        ("task.data_path", "task.data-path"),
        ("strategy.fraction_train", "strategy.fraction-train"),
        ("strategy.proximal_mu", "strategy.proximal-mu"),
        ("client.epochs", "client.local-epochs"),
        ("task", "task.name"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_few(key, meant):
    line = refusal_of(key)
    assert line.startswith(f"unknown key {key!r}; did you mean {meant!r}?")
    assert len(re.findall(r"'[^']*'", line)) <= 1 + NEAREST and len(line) < 200


def refusal_of(key):
    with pytest.raises(ConfigError) as caught:
        parse({key: 1})
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("key", ["", ".", "x", "privacy.", "strategy.", "strategy.a.b", "privacy.noise-multiplier.x"])
def test_a_key_that_resembles_nothing_is_refused_too(key):
    line = refusal_of(key)
    assert line.startswith(f"unknown key {key!r}; ") and 1 < len(re.findall(r"'[^']*'", line)) <= 1 + NEAREST


def test_every_unknown_key_has_a_line_of_its_own():
    lines = refusal(foo=1, num_round=1).splitlines()
    assert lines[0].startswith("unknown key 'foo'") and lines[1].startswith("unknown key 'num-round'")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("task.partition", ("auto", "iid", "shards", "dirichlet", "natural", "table")),
        ("strategy.sampling", ("fixed", "poisson")),
        ("strategy.weighting", ("auto", "examples", "uniform")),
        ("privacy.client", ("none", "dp-sgd", "gaussian", "laplace")),
        ("client.schedule", ("auto", "constant", "linear", "cosine")),
        ("privacy.clipping", ("fixed", "adaptive")),
        ("privacy.placement", ("update", "model")),
        ("privacy.distance-release", ("exact",)),
        ("privacy.distance-direction", ("divide", "multiply")),
        ("privacy.distance-clip", ("after", "before")),
        ("evaluation.federated", ("auto", "on", "off")),
    ],
)
def test_an_unknown_value_is_refused_with_the_choices(key, choices):
    with pytest.raises(ConfigError) as caught:
        parse({key: "nonsense"})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{key} = 'nonsense' is not valid: it must be ")
    assert all(repr(choice) in line for choice in choices)


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("num-rounds", "3", "a valid integer"),
        ("num-rounds", True, "a valid integer"),
        ("num-rounds", 2.0, "a valid integer"),
        ("client.local-epochs", "two", "a valid integer or 'auto'"),
        ("client.local-epochs", True, "a valid integer or 'auto'"),
        ("client.batch-size", 8.5, "a valid integer or 'auto'"),
        ("client.learning-rate", "fast", "a valid number or 'auto'"),
        ("client.learning-rate", False, "a valid number or 'auto'"),
        ("task.alpha", True, "a valid number"),
        ("client.class-weights", 1.0, "a valid string"),
        ("client.callbacks", "no", "a valid boolean"),
        ("tensorboard", 1, "a valid boolean"),
        ("evaluation.central", "true", "a valid boolean or 'auto'"),
        ("task.name", 5, "a valid string"),
        ("privacy.distance", 1.0, "a valid string"),
    ],
)
def test_a_wrong_type_is_refused(key, value, valid):
    with pytest.raises(ConfigError) as caught:
        parse({key: value})
    assert str(caught.value) == f"{key} = {value!r} is not valid: it must be {valid}"


@pytest.mark.parametrize(
    ("key", "value", "valid"),
    [
        ("num-rounds", 0, "greater than 0"),
        ("seed", -2, "greater than or equal to -1"),
        ("seed", 2**31, f"less than {2**31}"),
        ("keep-checkpoints", -1, "greater than or equal to 0"),
        ("round-timeout", 0.0, "greater than 0"),
        ("strategy.fraction-train", 0.0, "greater than 0"),
        ("strategy.fraction-train", 1.1, "less than or equal to 1"),
        ("strategy.fraction-evaluate", -0.1, "greater than or equal to 0"),
        ("strategy.min-nodes", 0, "greater than 0"),
        ("client.local-epochs", 0, "greater than 0 or 'auto'"),
        ("client.learning-rate", -0.1, "greater than 0 or 'auto'"),
        ("client.loss-scale", 0.0, "greater than 0 or 'auto'"),
        ("client.final-rate-share", 1.5, "less than or equal to 1 or 'auto'"),
        ("client.warmup-rounds", -1, "greater than or equal to 0 or 'auto'"),
        ("task.test-fraction", 1.0, "less than 1"),
        ("privacy.noise-multiplier", -1.0, "greater than or equal to 0 or 'auto'"),
        ("privacy.noise-multiplier", float("nan"), "a finite number or 'auto'"),
        ("privacy.clipping-norm", float("inf"), "a finite number"),
        ("privacy.clipping-norm", 0.0, "greater than 0"),
        ("privacy.min-distance", 0.0, "greater than 0"),
    ],
)
def test_a_number_out_of_range_is_refused(key, value, valid):
    with pytest.raises(ConfigError) as caught:
        parse({key: value})
    assert str(caught.value) == f"{key} = {value!r} is not valid: it must be {valid}"


def test_an_empty_output_dir_is_refused():
    assert refusal(output_dir="").startswith("output-dir = '' is not valid: ")


def test_every_bad_key_has_a_line_of_its_own():
    lines = refusal(num_rounds=0, client__local_epochs="x", privacy__client="y").splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["num-rounds", "client.local-epochs", "privacy.client"]


# Contradictions.

SETTINGS = {
    "noise-multiplier": 1.0,
    "clipping-norm": 1.0,
    "placement": "model",
    "distance": "l2",
    "distance-direction": "multiply",
    "distance-clip": "before",
    "min-distance": 0.5,
    "max-distance": 9.0,
    "distance-release": "private",
    "distance-noise-multiplier": 2.0,
    "noise-seed": 3,
    "target-delta": 1e-6,
    "max-epsilon": 3.0,
    "population": 9,
    "ledger-dir": "budget",
    "data-identity": "mine",
    "clipping": "adaptive",
    "clipping-quantile": 0.3,
    "clipping-rate": 0.1,
    "bits-noise-multiplier": 5.0,
    "examples-cap": 100.0,
    "canaries": 100,
}
DP_SGD_ONLY = {"clipping-decay": 0.1, "least-clipping-norm": 0.5, "batch-sampling": "shuffle", "group-cap": 3}
CLIPPED_ONLY = {"client-clipping-norm": 4.0, "client-max-epsilon": 2.0}
CHOICE_ONLY = {"choice": "exact", "choice-epsilon": 0.5, "max-loss": 3.0}
LAPLACE_ONLY = {"radius": 2.0, "per-layer": True, "max-leakage": 3.0}
CLIENT_ONLY = {"client-noise-multiplier": 4.0, **DP_SGD_ONLY, **CLIPPED_ONLY, **LAPLACE_ONLY, **CHOICE_ONLY}
NEEDED = {
    "clipping-decay": {"privacy.least-clipping-norm": 0.5},
    "group-cap": {"task.group": "patient"},
    **{key: {"privacy.server": "laplace-clustering"} for key in CHOICE_ONLY},
}
METRIC_ONLY = [key for key in SETTINGS if "distance" in key]
OF_THE_LEDGER = ("ledger-dir", "data-identity")
ADAPTIVE_ONLY = ["clipping-quantile", "clipping-rate", "bits-noise-multiplier"]


def test_the_settings_tried_here_are_all_there_are():
    keys = {key.removeprefix("privacy.") for key in known_keys() if key.startswith("privacy.")}
    assert keys - set(SETTINGS) - set(CLIENT_ONLY) == {
        "server",
        "client",
        "clusters",
        "clusters-start",
        "close-budget",
        "options",
    }


@pytest.mark.parametrize(
    ("client", "key"),
    [("none", key) for key in CLIENT_ONLY]
    + [("laplace", key) for key in (*DP_SGD_ONLY, *CLIPPED_ONLY)]
    + [("gaussian", key) for key in (*DP_SGD_ONLY, *LAPLACE_ONLY)]
    + [("dp-sgd", key) for key in LAPLACE_ONLY],
)
def test_a_setting_of_another_client_mechanism_is_refused(client, key):
    message = refusal(**{"privacy.client": client, f"privacy.{key}": CLIENT_ONLY[key]})
    assert message.startswith(f"privacy.{key} = {CLIENT_ONLY[key]!r} has no effect with privacy.client = {client!r}; ")


@pytest.mark.parametrize("key", CLIENT_ONLY)
def test_every_client_setting_has_an_effect_somewhere(key):
    client = "laplace" if key in LAPLACE_ONLY else "dp-sgd"
    assert parse({"privacy.client": client, f"privacy.{key}": CLIENT_ONLY[key]} | NEEDED.get(key, {}))


def test_a_private_choice_is_among_hypotheses():
    message = refusal(**{"privacy.client": "dp-sgd", "privacy.choice-epsilon": 0.5})
    assert message.startswith("privacy.choice-epsilon = 0.5 has no effect with privacy.server = 'metric'")
    exact = {"privacy.client": "dp-sgd", "privacy.server": "laplace-clustering", "privacy.choice": "exact"}
    assert "has no effect with privacy.choice = 'exact'" in refusal(**exact, **{"privacy.max-loss": 3.0})


def test_groups_are_what_dp_sgd_clips_together():
    assert "has no effect with privacy.client = 'gaussian'" in refusal(
        **{"task.group": "patient", "privacy.client": "gaussian"}
    )
    assert "has no effect with task.group = ''" in refusal(**{"privacy.group-cap": 3, "privacy.client": "dp-sgd"})


@pytest.mark.parametrize("key", OF_THE_LEDGER)
@pytest.mark.parametrize("server", ["none", "laplace-clustering", "global-dp", "metric"])
def test_every_run_says_whose_ledger_it_belongs_to(server, key):
    """Also what leaves without a guarantee is recorded there."""
    assert parse({"privacy.server": server, f"privacy.{key}": SETTINGS[key]})


def test_a_clip_that_shrinks_needs_a_floor():
    message = refusal(**{"privacy.client": "dp-sgd", "privacy.clipping-decay": 0.1})
    assert message.startswith("privacy.clipping-decay = 0.1 needs privacy.least-clipping-norm above 0")


@pytest.mark.parametrize("server", ["none", "global-dp", "metric", "laplace-clustering"])
def test_options_are_for_a_mechanism_of_another_package(server):
    assert f"has no effect with privacy.server = {server!r}" in refusal(privacy__server=server, privacy__options="a=1")


def test_any_other_name_on_the_server_is_a_mechanism_of_another_package():
    keys = {"privacy.server": "mine", "privacy.options": "radius=2.0 name='x'", "privacy.max-epsilon": 3.0}
    config = parse(shipped() | keys)
    assert config.privacy.server.options == {"radius": 2.0, "name": "x"}
    assert config.privacy.server.name == "mine" and config.privacy.server.is_noised and config.is_private
    assert parse(config.flat()) == config and config.flat()["privacy.options"] == keys["privacy.options"]
    with pytest.raises(PluginError, match=r"unknown mechanism privacy\.server = 'mine'; known: .*global-dp"):
        build(config)


def test_a_misspelt_mechanism_is_answered_with_the_nearest():
    with pytest.raises(
        PluginError, match=r"unknown mechanism privacy\.server = 'metrik'; did you mean 'metric'\?; known: "
    ):
        build(parse({"privacy.server": "metrik"}))
    assert refusal(privacy__server="metrik", privacy__distance="l2").endswith("; did you mean 'metric'?")


@pytest.mark.parametrize("name", ["", 5, "Mine", "../mine"])
def test_a_name_that_no_mechanism_can_have_is_refused(name):
    assert refusal(privacy__server=name).startswith(f"privacy.server = {name!r} is not valid: ")


def test_options_of_a_mechanism_that_cannot_be_read_are_refused():
    assert refusal(privacy__server="mine", privacy__options="a").startswith("privacy.options: 'a' does not begin")


def test_a_default_of_another_type_is_no_default():
    """`0` will do for `0.0`, as everywhere, and is not `false`."""
    assert parse({"privacy.radius": 0, "privacy.per-layer": False}) == parse({})
    assert refusal(privacy__per_layer=0).startswith("privacy.per-layer = 0 has no effect with privacy.client = 'none'")


def test_variants_are_values_of_their_own():
    """The keys of one variant do not exist in another, and a section made of variants is the one made of keys."""
    privacy = PrivacyConfig(server=GlobalPrivacy(noise_multiplier=2.0), client=DpSgdPrivacy(clipping_norm=3.0))
    keys = {"server": "global-dp", "noise-multiplier": 2.0, "client": "dp-sgd", "client-clipping-norm": 3.0}
    assert privacy == parse({f"privacy.{key}": value for key, value in keys.items()}).privacy
    assert not hasattr(privacy.server, "distance") and not hasattr(privacy.client, "radius")
    with pytest.raises(ConfigError, match=r"privacy.client = 'none', expected 'dp-sgd'"):
        _ = PrivacyConfig().dp_sgd


@pytest.mark.parametrize(("key", "value"), [("clusters", 3), ("clusters-start", "first-releases")])
def test_clusters_are_for_clustering(key, value):
    assert "has no effect with privacy.server = 'metric'" in refusal(**{f"privacy.{key}": value})
    assert parse({"privacy.server": "laplace-clustering", f"privacy.{key}": value})


def test_whom_to_hold_out_must_be_asked():
    assert "nobody would ask them" in refusal(evaluation__held_out_clients=0.3, evaluation__federated="off")
    assert parse({"evaluation.held-out-clients": 0.3, "task.test-fraction": 0.0}).evaluates_on_clients


def test_patience_needs_scores():
    message = refusal(evaluation__patience=3, evaluation__central=False, evaluation__federated="off")
    assert "evaluation.patience = 3 needs scores" in message


@pytest.mark.parametrize(
    ("server", "key"),
    [("none", key) for key in SETTINGS if key not in OF_THE_LEDGER] + [("global-dp", key) for key in METRIC_ONLY],
)
def test_a_privacy_setting_that_would_do_nothing_is_refused(server, key):
    with pytest.raises(ConfigError) as caught:
        parse({"privacy.server": server, f"privacy.{key}": SETTINGS[key]})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"privacy.{key} = {SETTINGS[key]!r} has no effect with privacy.server = {server!r}; ")


@pytest.mark.parametrize("key", SETTINGS)
def test_every_privacy_setting_has_an_effect_somewhere(key):
    needs = {"privacy.clipping": "adaptive"} if key in ADAPTIVE_ONLY else {}
    needs |= {"privacy.distance-release": "private"} if key == "distance-noise-multiplier" else {}
    needs |= {"strategy.weighting": "examples"} if key == "examples-cap" else {}
    server = "global-dp" if key == "population" else "metric"
    assert parse({"privacy.server": server, f"privacy.{key}": SETTINGS[key], **needs})


def test_every_idle_setting_is_named():
    lines = refusal(privacy__server="none", privacy__noise_multiplier=1.0, privacy__clipping_norm=1.0).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["privacy.clipping-norm", "privacy.noise-multiplier"]


def test_a_largest_distance_below_the_smallest_is_refused():
    message = refusal(privacy__min_distance=2.0, privacy__max_distance=1.0)
    assert message == "privacy.max-distance = 1.0 must be at least privacy.min-distance = 2.0, or 0 for no limit"
    assert parse({"privacy.min-distance": 2.0, "privacy.max-distance": 0.0})
    assert parse({"privacy.min-distance": 2.0, "privacy.max-distance": 2.0})


@pytest.mark.parametrize("server", ["global-dp", "metric"])
def test_weights_of_clients_are_refused_under_privacy(server):
    message = refusal(privacy__server=server, strategy__weighting="examples")
    assert message.startswith(f"strategy.weighting = 'examples' contradicts privacy.server = {server!r}")
    assert message.endswith("use 'uniform'")


@pytest.mark.parametrize(
    ("server", "weighting", "weighted"),
    [("none", "auto", True), ("none", "examples", True), ("none", "uniform", False), ("metric", "auto", False)],
)
def test_auto_weighting_is_by_examples_only_without_privacy(server, weighting, weighted):
    config = parse({"privacy.server": server, "strategy.weighting": weighting})
    assert config.weights_by_examples is weighted


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({}, False),
        ({"evaluation.federated": "on"}, True),
        ({"privacy.server": "none"}, True),
        ({"privacy.server": "none", "evaluation.federated": "off"}, False),
        ({"privacy.server": "none", "strategy.fraction-evaluate": 0.0}, False),
        ({"privacy.server": "none", "task.test-fraction": 0.0}, False),
    ],
)
def test_auto_evaluation_asks_clients_only_without_privacy(keys, asked):
    assert parse(keys).evaluates_on_clients is asked


@pytest.mark.parametrize("key", ADAPTIVE_ONLY)
def test_a_setting_of_the_adaptive_clip_needs_it(key):
    with pytest.raises(ConfigError, match=rf"privacy\.{key} = .* has no effect with privacy\.clipping = 'fixed'"):
        parse({f"privacy.{key}": SETTINGS[key]})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"privacy.noise-multiplier": "auto"}, "calibrated to privacy.max-epsilon"),
        ({"privacy.examples-cap": 9.0}, "privacy.examples-cap = 9.0 has no effect"),
        ({"privacy.population": 9, "strategy.sampling": "poisson"}, "privacy.population = 9 has no effect"),
        ({"privacy.distance-noise-multiplier": 2.0}, "no effect with privacy.distance-release = 'exact'"),
        ({"privacy.data-identity": "../other"}, "privacy.data-identity = '../other' is not valid"),
        ({"evaluation.federated": "on", "task.test-fraction": 0.0}, "needs task.test-fraction = 0.0"),
        ({"client.class-weights": "1,0"}, "client.class-weights = '1,0' is not valid: '0' must be a finite number"),
        ({"client.class-weights": "1,-1"}, "'-1' must be a finite number above 0"),
        ({"client.class-weights": "1;2"}, "'1;2' must be a finite number above 0"),
        ({"client.class-weights": "nan"}, "'nan' must be a finite number above 0"),
        ({"client.class-weights": "inf,1"}, "'inf' must be a finite number above 0"),
        ({"client.schedule": "constant", "client.final-rate-share": 0.5}, "has no effect with client.schedule"),
        ({"client.warmup-rounds": 10}, "client.warmup-rounds = 10 must be below num-rounds = 10"),
    ],
)
def test_other_contradictions(keys, says):
    with pytest.raises(ConfigError) as caught:
        parse(keys)
    assert says in str(caught.value)


# The same words for every file of settings.


@pytest.mark.parametrize(
    ("read", "text", "lines"),
    [
        (
            read_policy,
            "mechanisms = ['dp-sdg']\ntasks = []\nmin-row = 5\nmax-steps = 0.5",
            [
                "mechanisms holds 'dp-sdg'; did you mean 'dp-sgd'?; known: 'global-dp', 'metric', 'dp-sgd', "
                "'gaussian', 'laplace', or 'server:NAME' for a mechanism of another package on the server",
                "tasks = [] is not valid: it must have at least 1 item after validation, not 0",
                "max-steps = 0.5 is not valid: it must be a valid integer",
                "unknown key 'min-row'; valid keys: mechanisms, ...; did you mean 'min-rows'?",
            ],
        ),
        (
            read_federation,
            "sites = [{name = 'A', data-path = 'x', public-size = -1}]\n[server]\naddresses = ['a']\nprot = 1\n",
            [
                "name is missing",
                "unknown key 'server.prot'; valid keys: addresses, port, days; did you mean 'port'?",
                "sites.0.name = 'A' is not valid: it must match pattern '^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$'",
                "sites.0.public-size = -1 is not valid: it must be greater than or equal to 0",
            ],
        ),
        (
            lambda path: parse(flatten(tomllib.loads(path.read_text()))),
            "num-rounds = 0\n[privacy]\nserver = 'global-dp'\nclipping = 'adaptive'\nclipping-rate = -1.0\n"
            "population = 0.5\nnoise-multiplier = true\nclient = 'sgd'\n[strategy]\noptions = 'tau'\n",
            [
                "num-rounds = 0 is not valid: it must be greater than 0",
                "strategy.options: 'tau' does not begin with key=value",
                "privacy.noise-multiplier = True is not valid: it must be a valid number or 'auto'",
                "privacy.clipping-rate = -1.0 is not valid: it must be greater than 0",
                "privacy.population = 0.5 is not valid: it must be a valid integer",
                "privacy.client = 'sgd' is not valid: it must be 'none', 'dp-sgd', 'gaussian' or 'laplace'",
            ],
        ),
    ],
    ids=["policy", "federation", "run"],
)
def test_every_file_is_answered_in_the_same_words(read, text, lines, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(path)
    said = str(caught.value).replace(f"policy {path}: ", "").replace(f"{path}: ", "")
    assert sorted(re.sub("mechanisms, .*; did", "mechanisms, ...; did", said).splitlines()) == sorted(lines)


# Options of strategies.


def test_options_go_to_the_strategy_and_auto_means_not_given():
    config = parse({"strategy.proximal-mu": 0.25, "strategy.tau": "auto", "strategy.min-nodes": 3})
    assert config.strategy.options == {"proximal-mu": 0.25}
    assert config.strategy.min_nodes == 3


def test_the_options_of_a_strategy_may_be_carried_in_one_string():
    said = {"strategy.name": "fedprox", "strategy.proximal-mu": 0.25}
    for text in ("proximal-mu=0.25", "proximal_mu = 0.25", "# of FedProx\nproximal-mu = 0.25\n"):
        carried = parse({"strategy.name": "fedprox", "strategy.options": text})
        assert carried == parse(said) and carried.digest() == parse(said).digest()
    assert parse(shipped() | {"strategy.options": text}).strategy.options == {"proximal-mu": 0.25}
    assert carried.flat()["strategy.proximal-mu"] == 0.25 and carried.flat()["strategy.options"] == ""


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"options": 3}, "strategy.options = 3 is not valid: it must be a valid string"),
        ({"options": "tau"}, "strategy.options: 'tau' does not begin with key=value"),
        ({"options": "tau=1 tau=2"}, "strategy.options: tau is there twice"),
        ({"options": "tau=[1]"}, "strategy.options: tau is of type list"),
        ({"options": "tau=1", "tau": 2.0}, "strategy.options: tau = 1 contradicts strategy.tau = 2.0; keep one"),
        ({"options": "min-nodes=3"}, "strategy.options: min-nodes = 3 is no option of a strategy"),
        ({"options": "options=3"}, "strategy.options: options = 3 is no option of a strategy"),
        ({"options": "a.b=3"}, "strategy.options: a.b = 3 is no option of a strategy"),
        ({"options": "'a b'=3"}, "strategy.options: a b = 3 is no option of a strategy"),
    ],
)
def test_options_in_a_string_that_cannot_be_are_refused(keys, says):
    assert says in refusal(**{f"strategy.{key}": value for key, value in keys.items()})


def test_options_in_a_string_read_no_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("tau = 1.0")
    assert "does not begin with key=value" in refusal(**{"strategy.options": str(path)})
    assert "does not begin with key=value" in refusal(**{"privacy.server": "mine", "privacy.options": str(path)})


def test_a_section_made_in_code_keeps_its_options():
    section = StrategyConfig(name="fedprox", options={"proximal-mu": 1.0})
    assert section.options == {"proximal-mu": 1.0}
    assert RunConfig(strategy=section) == parse({"strategy.name": "fedprox", "strategy.proximal-mu": 1.0})


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("fedavg", "proximal-mu", 0.5, "strategy.proximal-mu = 0.5 is not an option of 'fedavg'; its options: none"),
        ("fedprox", "tau", 0.5, "strategy.tau = 0.5 is not an option of 'fedprox'; its options: strategy.proximal-mu"),
        (
            "fedavgm",
            "momentun",
            0.5,
            "strategy.momentun = 0.5 is not an option of 'fedavgm'; did you mean 'momentum'?; "
            "its options: strategy.momentum, strategy.server-learning-rate",
        ),
        (
            "fedavg",
            "fraction-trian",
            0.5,
            "strategy.fraction-trian = 0.5 is not an option of 'fedavg'; did you mean 'fraction-train'?; "
            "its options: none",
        ),
        (
            "fedprox",
            "proximal-mu",
            "big",
            "strategy.proximal-mu = 'big' is not valid: expected float, such as 0.5",
        ),
        ("fedprox", "proximal-mu", True, "strategy.proximal-mu = True is not valid: expected float, such as 0.5"),
        ("krum", "num-malicious", 1.0, "strategy.num-malicious = 1.0 is not valid: expected int, such as 0"),
        ("fedopt", "server-optimizer", 1, "strategy.server-optimizer = 1 is not valid: expected str, such as 'sgd'"),
    ],
)
def test_an_option_the_strategy_does_not_have_or_cannot_read_is_refused(name, key, value, said):
    with pytest.raises(ConfigError) as caught:
        named_strategy(parse({"strategy.name": name, f"strategy.{key}": value}))
    assert str(caught.value) == said


def test_a_whole_number_will_do_for_a_float_option():
    assert named_strategy(parse({"strategy.name": "fedprox", "strategy.proximal-mu": 1})).proximal_mu == 1.0


def test_a_missing_strategy_lists_the_known_ones():
    with pytest.raises(PluginError, match="unknown strategy 'fedavh'; known: fedadagrad, fedadam"):
        named_strategy(parse({"strategy.name": "fedavh"}))


# The configuration as a value.

configurations = st.fixed_dictionaries(
    {},
    optional={
        "num-rounds": st.integers(1, 1000),
        "seed": st.integers(-1, 2**31 - 1),
        "run-name": st.text(max_size=5),
        "tensorboard": st.booleans(),
        "round-timeout": st.floats(0.5, 1e6),
        "strategy.fraction-train": st.floats(0.01, 1.0),
        "strategy.sampling": st.sampled_from(["fixed", "poisson"]),
        "strategy.tau": st.floats(1e-9, 1.0) | st.just("auto"),
        "strategy.server-optimizer": st.sampled_from(["sgd", "adam", "auto"]),
        "client.local-epochs": st.integers(1, 50) | st.just("auto"),
        "client.learning-rate": st.floats(1e-6, 10.0) | st.integers(1, 3) | st.just("auto"),
        "privacy.noise-multiplier": st.floats(0.0, 10.0),
        "privacy.noise-seed": st.integers(-1, 2**40),
    },
)


@given(configurations)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_flat_keys_round_trip(flat):
    config = parse(flat)
    assert parse(config.flat()) == config
    assert parse(config.flat()).flat() == config.flat()
    assert all(isinstance(value, str | int | float | bool) for value in config.flat().values())


@given(configurations, configurations)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_digests_are_equal_exactly_for_configurations_that_are_shown_equal(one, other):
    first, second = parse(one), parse(other)
    assert (first.digest() == second.digest()) == (shown(first.flat()) == shown(second.flat()))


def test_nobody_finds_the_seed_of_the_noise_by_trying_digests():
    digests = {parse({"num-rounds": 3, "privacy.noise-seed": seed}).digest() for seed in (0, 7, 7_654_321, 2**31 - 1)}
    assert len(digests) == 1 and parse({"num-rounds": 3}).digest() not in digests
    assert digest_of(shown(parse({"privacy.noise-seed": 7}).flat())) == parse({"privacy.noise-seed": 8}).digest()


def test_the_digest_does_not_depend_on_the_order_of_keys_or_on_how_a_number_is_written():
    assert parse({"seed": 1, "num-rounds": 2}).digest() == parse({"num-rounds": 2, "seed": 1}).digest()
    assert parse({"privacy.clipping-norm": 1}).digest() == parse({"privacy.clipping-norm": 1.0}).digest()
    assert parse({"strategy.tau": "auto"}).digest() == parse({}).digest()
    assert parse({"seed": 1}).digest() != parse({"seed": 2}).digest()
    assert parse({"strategy.tau": 0.5}).digest() != parse({}).digest()


def test_a_configuration_is_frozen():
    config = parse({})
    for section, name in (
        (config, "num_rounds"),
        (config.privacy, "noise_seed"),
        (config.privacy.server, "noise_multiplier"),
        (config.privacy.server.clipping, "norm"),
        (config.task, "name"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, getattr(section, name))
    assert hash(config.task) == hash(parse({}).task) and hash(config.privacy) == hash(parse({}).privacy)
