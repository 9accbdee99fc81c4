"""The run configuration: its defaults, and one clear line for everything that is wrong with one."""

import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from shipped import options_of, refusal, shipped
from support import failures

from cloister.client.policy import read_policy
from cloister.config.run import NEAREST, RunConfig, StrategyConfig, digest_of, flatten, known_keys, parse, shown
from cloister.deploy.provision.federation import read_federation
from cloister.server.build import named_strategy
from cloister.strategies import STRATEGIES
from cloister.utils.errors import ConfigError, PluginError

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


def test_every_strategy_starts_from_the_shipped_defaults():
    def check(name):
        assert named_strategy(parse(shipped() | {"strategy.name": name})) is not None

    assert failures(STRATEGIES.names(), check) == []


# Refusals. Each names the key, what was found and what is valid, in one line.


def test_an_unknown_key_is_refused_with_the_nearest_few():
    def check(key, meant):
        line = refusal_of(key)
        assert line.startswith(f"unknown key {key!r}; did you mean {meant!r}?")
        assert len(re.findall(r"'[^']*'", line)) <= 1 + NEAREST and len(line) < 200

    cases = [
        ("num-round", "num-rounds"),
        ("privacy.noise-multiplyer", "privacy.noise-multiplier"),
        ("task.data_path", "task.data-path"),
        ("strategy.fraction_train", "strategy.fraction-train"),
        ("strategy.proximal_mu", "strategy.proximal-mu"),
        ("client.epochs", "client.local-epochs"),
        ("task", "task.name"),
    ]
    assert failures(cases, check) == []


def refusal_of(key):
    with pytest.raises(ConfigError) as caught:
        parse({key: 1})
    (line,) = str(caught.value).splitlines()
    return line


def test_a_key_that_resembles_nothing_is_refused_too():
    def check(key):
        line = refusal_of(key)
        assert line.startswith(f"unknown key {key!r}; ") and 1 < len(re.findall(r"'[^']*'", line)) <= 1 + NEAREST

    cases = ["", ".", "x", "privacy.", "strategy.", "strategy.a.b", "privacy.noise-multiplier.x"]
    assert failures(cases, check) == []


def test_every_unknown_key_has_a_line_of_its_own():
    lines = refusal(foo=1, num_round=1).splitlines()
    assert lines[0].startswith("unknown key 'foo'") and lines[1].startswith("unknown key 'num-round'")
    assert len(lines) == 2


def test_an_unknown_value_is_refused_with_the_choices():
    def check(key, choices):
        with pytest.raises(ConfigError) as caught:
            parse({key: "nonsense"})
        (line,) = str(caught.value).splitlines()
        assert line.startswith(f"{key} = 'nonsense' is not valid: it must be ")
        assert all(repr(choice) in line for choice in choices)

    cases = [
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
    ]
    assert failures(cases, check) == []


def test_a_wrong_type_is_refused():
    def check(key, value, valid):
        with pytest.raises(ConfigError) as caught:
            parse({key: value})
        assert str(caught.value) == f"{key} = {value!r} is not valid: it must be {valid}"

    cases = [
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
    ]
    assert failures(cases, check) == []


def test_a_number_out_of_range_is_refused():
    cases = [
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
        ("task.test-fraction", 1.0, "less than 1 or 'auto'"),
        ("privacy.noise-multiplier", -1.0, "greater than or equal to 0 or 'auto'"),
        ("privacy.noise-multiplier", float("nan"), "a finite number or 'auto'"),
        ("privacy.clipping-norm", float("inf"), "a finite number"),
        ("privacy.clipping-norm", 0.0, "greater than 0"),
        ("privacy.min-distance", -0.1, "greater than or equal to 0"),
    ]

    def check(key, value, valid):
        assert refusal(**{key: value}) == f"{key} = {value!r} is not valid: it must be {valid}"

    assert failures(cases, check) == []


def test_an_empty_output_dir_is_refused():
    assert refusal(output_dir="").startswith("output-dir = '' is not valid: ")


def test_every_bad_key_has_a_line_of_its_own():
    lines = refusal(num_rounds=0, client__local_epochs="x", privacy__client="y").splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["num-rounds", "client.local-epochs", "privacy.client"]


# Contradictions.


def test_whom_to_hold_out_must_be_asked():
    assert "the server would not ask them" in refusal(evaluation__held_out_clients=0.3, evaluation__federated="off")
    assert parse({"evaluation.held-out-clients": 0.3, "task.test-fraction": 0.0}).evaluates_on_clients


def test_patience_needs_scores():
    message = refusal(evaluation__patience=3, evaluation__central=False, evaluation__federated="off")
    assert "evaluation.patience = 3 needs scores" in message


@pytest.mark.parametrize("server", ["global-dp", "metric"])
def test_weights_of_clients_are_refused_under_privacy(server):
    message = refusal(privacy__server=server, strategy__weighting="examples")
    assert message.startswith(f"strategy.weighting = 'examples' contradicts privacy.server = {server!r}")
    assert message.endswith("use 'uniform'")


def test_auto_weighting_is_by_examples_only_without_privacy():
    def check(server, weighting, weighted):
        config = parse({"privacy.server": server, "strategy.weighting": weighting})
        assert config.weights_by_examples is weighted

    cases = [("none", "auto", True), ("none", "examples", True), ("none", "uniform", False), ("metric", "auto", False)]
    assert failures(cases, check) == []


def test_auto_evaluation_asks_clients_only_without_privacy():
    def check(keys, asked):
        assert parse(keys).evaluates_on_clients is asked

    cases = [
        ({}, False),
        ({"evaluation.federated": "on"}, True),
        ({"privacy.server": "none"}, True),
        ({"privacy.server": "none", "evaluation.federated": "off"}, False),
        ({"privacy.server": "none", "strategy.fraction-evaluate": 0.0}, False),
        ({"privacy.server": "none", "task.test-fraction": 0.0}, False),
    ]
    assert failures(cases, check) == []


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.0),
        ({"privacy.server": "none"}, 0.2),
        ({"evaluation.federated": "on"}, 0.2),
        ({"evaluation.held-out-clients": 0.3}, 0.0),
        ({"evaluation.held-out-clients": 0.3, "privacy.server": "laplace-clustering"}, 0.2),
        ({"task.test-fraction": 0.4}, 0.4),
    ],
    ids=str,
)
def test_nothing_is_held_back_where_nothing_is_scored(changes, share):
    config = parse(changes)
    assert config.for_clients.task.held_back == share
    assert config.for_clients.evaluates_on_clients is config.evaluates_on_clients
    assert config.flat()["task.test-fraction"] == changes.get("task.test-fraction", "auto")


GAUSSIAN = {"privacy.client": "gaussian", "privacy.client-max-epsilon": 8.0}


def test_other_contradictions():
    def check(keys, says):
        with pytest.raises(ConfigError) as caught:
            parse(keys)
        assert says in str(caught.value)

    cases = [
        ({"privacy.noise-multiplier": "auto"}, "calibrated to privacy.max-epsilon"),
        ({"privacy.examples-cap": 9.0}, "privacy.examples-cap = 9.0 has no effect"),
        ({"privacy.population": 9, "strategy.sampling": "poisson"}, "privacy.population = 9 has no effect"),
        ({"privacy.distance-noise-multiplier": 2.0}, "no effect with privacy.distance-release = 'exact'"),
        ({"privacy.data-identity": "../other"}, "privacy.data-identity = '../other' is not valid"),
        ({"evaluation.federated": "on", "task.test-fraction": 0.0}, "needs task.test-fraction = 0.0"),
        (
            GAUSSIAN | {"evaluation.federated": "on"},
            "client-max-epsilon = 8 contradicts evaluation.federated = 'on': scores leave clients without noise, and "
            "no budget covers that; use evaluation.federated = 'off'",
        ),
        (
            GAUSSIAN | {"evaluation.held-out-clients": 0.5},
            "contradicts evaluation.held-out-clients = 0.5: scores leave clients without noise, and no budget covers "
            "that; use evaluation.held-out-clients = 0.0",
        ),
        ({"client.class-weights": "1,0"}, "client.class-weights = '1,0' is not valid: '0' must be a finite number"),
        ({"client.class-weights": "1,-1"}, "'-1' must be a finite number above 0"),
        ({"client.class-weights": "1;2"}, "'1;2' must be a finite number above 0"),
        ({"client.class-weights": "nan"}, "'nan' must be a finite number above 0"),
        ({"client.class-weights": "inf,1"}, "'inf' must be a finite number above 0"),
        ({"client.schedule": "constant", "client.final-rate-share": 0.5}, "has no effect with client.schedule"),
        (
            {"privacy.server": "laplace-clustering", "privacy.clusters-split-round": 11},
            "privacy.clusters-split-round = 11 must be at most num-rounds = 10",
        ),
        (
            {"privacy.server": "laplace-clustering", "privacy.clusters": 1, "privacy.clusters-split-round": 9},
            "privacy.clusters-split-round = 9 has no effect with privacy.clusters = 1; use more",
        ),
        ({"client.warmup-rounds": 10}, "client.warmup-rounds = 10 must be below num-rounds = 10"),
    ]
    assert failures(cases, check) == []


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
                "unknown key 'min-row'; did you mean 'min-rows'?; valid keys: mechanisms, ...",
            ],
        ),
        (
            read_federation,
            "sites = [{name = 'A', data-path = 'x', public-size = -1}]\n[server]\naddresses = ['a']\nprot = 1\n",
            [
                "name is missing",
                "unknown key 'server.prot'; did you mean 'port'?; valid keys: addresses, port, superlink, days",
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
                "privacy.client = 'sgd' is not valid: it must be 'none', 'dp-sgd', 'gaussian' or 'laplace'; "
                "did you mean 'dp-sgd'?",
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
    assert sorted(re.sub("keys: mechanisms, .*", "keys: mechanisms, ...", said).splitlines()) == sorted(lines)


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


def test_options_in_a_string_that_cannot_be_are_refused():
    def check(keys, says):
        assert says in refusal(**{f"strategy.{key}": value for key, value in keys.items()})

    cases = [
        ({"options": 3}, "strategy.options = 3 is not valid: it must be a valid string"),
        ({"options": "tau"}, "strategy.options: 'tau' does not begin with key=value"),
        ({"options": "tau=1 tau=2"}, "strategy.options: tau is there twice"),
        ({"options": "tau=[1]"}, "strategy.options: tau is of type list"),
        ({"options": "tau=1", "tau": 2.0}, "strategy.options: tau = 1 contradicts strategy.tau = 2.0; keep one"),
        ({"options": "min-nodes=3"}, "strategy.options: min-nodes = 3 is no option of a strategy"),
        ({"options": "options=3"}, "strategy.options: options = 3 is no option of a strategy"),
        ({"options": "a.b=3"}, "strategy.options: a.b = 3 is no option of a strategy"),
        ({"options": "'a b'=3"}, "strategy.options: a b = 3 is no option of a strategy"),
    ]
    assert failures(cases, check) == []


def test_options_in_a_string_read_no_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("tau = 1.0")
    assert "does not begin with key=value" in refusal(**{"strategy.options": str(path)})
    assert "does not begin with key=value" in refusal(**{"privacy.server": "mine", "privacy.options": str(path)})


def test_a_section_made_in_code_keeps_its_options():
    section = StrategyConfig(name="fedprox", options={"proximal-mu": 1.0})
    assert section.options == {"proximal-mu": 1.0}
    assert RunConfig(strategy=section) == parse({"strategy.name": "fedprox", "strategy.proximal-mu": 1.0})


def test_an_option_the_strategy_does_not_have_or_cannot_read_is_refused():
    def check(name, key, value, said):
        with pytest.raises(ConfigError) as caught:
            named_strategy(parse({"strategy.name": name, f"strategy.{key}": value}))
        assert str(caught.value) == said

    cases = [
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
    ]
    assert failures(cases, check) == []


def test_a_whole_number_will_do_for_a_float_option():
    assert named_strategy(parse({"strategy.name": "fedprox", "strategy.proximal-mu": 1})).proximal_mu == 1.0


def test_a_missing_strategy_lists_the_known_ones():
    with pytest.raises(PluginError, match=r"strategy\.name = 'fedavh'; did you mean 'fedavg'\?; known: fedadagrad, "):
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
@settings(max_examples=25, deadline=None, derandomize=True)
def test_flat_keys_round_trip(flat):
    config = parse(flat)
    assert parse(config.flat()) == config
    assert parse(config.flat()).flat() == config.flat()
    assert all(isinstance(value, str | int | float | bool) for value in config.flat().values())


@given(configurations, configurations)
@settings(max_examples=25, deadline=None, derandomize=True)
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
