"""Settings of mechanisms: each has an effect somewhere, and is refused where it would have none."""

from itertools import product

import pytest
from shipped import refusal, shipped
from support import failures

from cloister.config.privacy import PrivacyConfig
from cloister.config.run import known_keys, parse
from cloister.config.variants import DpSgdPrivacy, GlobalPrivacy
from cloister.server.build import build
from cloister.utils.errors import ConfigError, PluginError

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
    "clipping-count-noise-multiplier": 5.0,
    "examples-cap": 100.0,
    "canaries": 100,
}
DP_SGD_ONLY = {
    "dp-sgd-noise-multiplier": 4.0,
    "dp-sgd-clipping-norm": 4.0,
    "clipping-decay": 0.1,
    "min-clipping-norm": 0.5,
    "batch-sampling": "shuffle",
    "dp-sgd-sampling-rate": 0.5,
    "group-cap": 3,
}
CLIPPED_ONLY = {"client-max-epsilon": 2.0}
CHOICE_ONLY = {"choice": "exact", "choice-epsilon": 0.5, "max-loss": 3.0}
GAUSSIAN_ONLY = {"gaussian-noise-multiplier": 4.0, "gaussian-clipping-norm": 4.0}
LAPLACE_ONLY = {"laplace-noise-multiplier": 4.0, "radius": 2.0, "per-layer": True, "max-leakage": 3.0}
CLIENT_ONLY = DP_SGD_ONLY | GAUSSIAN_ONLY | CLIPPED_ONLY | LAPLACE_ONLY | CHOICE_ONLY
NEEDED = {
    "clipping-decay": {"privacy.min-clipping-norm": 0.5},
    "group-cap": {"task.group": "patient"},
    "dp-sgd-sampling-rate": {"privacy.server": "none", "secure-aggregation.enabled": True, "strategy.min-nodes": 5},
    **{key: {"privacy.server": "laplace-clustering"} for key in CHOICE_ONLY},
}
METRIC_ONLY = [key for key in SETTINGS if "distance" in key]
OF_THE_LEDGER = ("ledger-dir", "data-identity")
ADAPTIVE_ONLY = ["clipping-quantile", "clipping-rate", "clipping-count-noise-multiplier"]


def test_the_settings_tried_here_are_all_there_are():
    keys = {key.removeprefix("privacy.") for key in known_keys() if key.startswith("privacy.")}
    assert keys - set(SETTINGS) - set(CLIENT_ONLY) == {
        "server",
        "client",
        "clusters",
        "clusters-split-round",
        "close-budget",
        "options",
    }


def test_a_setting_of_another_client_mechanism_is_refused():
    others = {
        "none": CLIENT_ONLY,
        "laplace": (*DP_SGD_ONLY, *GAUSSIAN_ONLY, *CLIPPED_ONLY),
        "gaussian": (*DP_SGD_ONLY, *LAPLACE_ONLY),
        "dp-sgd": (*GAUSSIAN_ONLY, *LAPLACE_ONLY),
    }

    def check(client, key):
        message = refusal(**{"privacy.client": client, f"privacy.{key}": CLIENT_ONLY[key]})
        found = f"privacy.{key} = {CLIENT_ONLY[key]!r}"
        assert message.startswith(f"{found} has no effect with privacy.client = {client!r}; ")

    assert failures([(client, key) for client, keys in others.items() for key in keys], check) == []


def test_every_client_setting_has_an_effect_somewhere():
    def check(key):
        client = "laplace" if key in LAPLACE_ONLY else "gaussian" if key in GAUSSIAN_ONLY else "dp-sgd"
        assert parse({"privacy.client": client, f"privacy.{key}": CLIENT_ONLY[key]} | NEEDED.get(key, {}))

    assert failures(CLIENT_ONLY, check) == []


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


def test_every_run_says_whose_ledger_it_belongs_to():
    """Also what leaves without a guarantee is recorded there."""

    def check(key, server):
        assert parse({"privacy.server": server, f"privacy.{key}": SETTINGS[key]})

    cases = product(OF_THE_LEDGER, ["none", "laplace-clustering", "global-dp", "metric"])
    assert failures(cases, check) == []


def test_a_clip_that_shrinks_needs_a_floor():
    message = refusal(**{"privacy.client": "dp-sgd", "privacy.clipping-decay": 0.1})
    assert message.startswith("privacy.clipping-decay = 0.1 needs privacy.min-clipping-norm above 0")


def test_options_are_for_a_mechanism_of_another_package():
    def check(server):
        assert f"has no effect with privacy.server = {server!r}" in refusal(
            privacy__server=server, privacy__options="a=1"
        )

    assert failures(["none", "global-dp", "metric", "laplace-clustering"], check) == []


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


def test_a_name_that_no_mechanism_can_have_is_refused():
    def check(name):
        assert refusal(privacy__server=name).startswith(f"privacy.server = {name!r} is not valid: ")

    assert failures(["", 5, "Mine", "../mine"], check) == []


def test_options_of_a_mechanism_that_cannot_be_read_are_refused():
    assert refusal(privacy__server="mine", privacy__options="a").startswith("privacy.options: 'a' does not begin")


def test_a_default_of_another_type_is_no_default():
    """`0` will do for `0.0`, as everywhere, and is not `false`."""
    assert parse({"privacy.radius": 0, "privacy.per-layer": False}) == parse({})
    assert refusal(privacy__per_layer=0).startswith("privacy.per-layer = 0 has no effect with privacy.client = 'none'")


def test_variants_are_values_of_their_own():
    """The keys of one variant do not exist in another, and a section made of variants is the one made of keys."""
    privacy = PrivacyConfig(server=GlobalPrivacy(noise_multiplier=2.0), client=DpSgdPrivacy(clipping_norm=3.0))
    keys = {"server": "global-dp", "noise-multiplier": 2.0, "client": "dp-sgd", "dp-sgd-clipping-norm": 3.0}
    assert privacy == parse({f"privacy.{key}": value for key, value in keys.items()}).privacy
    assert not hasattr(privacy.server, "distance") and not hasattr(privacy.client, "radius")
    with pytest.raises(ConfigError, match=r"privacy.client = 'none', expected 'dp-sgd'"):
        _ = PrivacyConfig().dp_sgd


@pytest.mark.parametrize(("key", "value"), [("clusters", 3), ("clusters-split-round", 2)])
def test_clusters_are_for_clustering(key, value):
    assert "has no effect with privacy.server = 'metric'" in refusal(**{f"privacy.{key}": value})
    assert parse({"privacy.server": "laplace-clustering", f"privacy.{key}": value})


def test_a_privacy_setting_that_would_do_nothing_is_refused():
    idle = [("none", key) for key in SETTINGS if key not in OF_THE_LEDGER] + [("global-dp", key) for key in METRIC_ONLY]

    def check(server, key):
        (line,) = refusal(**{"privacy.server": server, f"privacy.{key}": SETTINGS[key]}).splitlines()
        assert line.startswith(f"privacy.{key} = {SETTINGS[key]!r} has no effect with privacy.server = {server!r}; ")

    assert failures(idle, check) == []


def test_every_privacy_setting_has_an_effect_somewhere():
    def check(key):
        needs = {"privacy.clipping": "adaptive"} if key in ADAPTIVE_ONLY else {}
        needs |= {"privacy.distance-release": "private"} if key == "distance-noise-multiplier" else {}
        needs |= {"strategy.weighting": "examples"} if key == "examples-cap" else {}
        server = "global-dp" if key == "population" else "metric"
        assert parse({"privacy.server": server, f"privacy.{key}": SETTINGS[key], **needs})

    assert failures(SETTINGS, check) == []


def test_every_idle_setting_is_named():
    lines = refusal(privacy__server="none", privacy__noise_multiplier=1.0, privacy__clipping_norm=1.0).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["privacy.clipping-norm", "privacy.noise-multiplier"]


def test_a_largest_distance_below_the_smallest_is_refused():
    message = refusal(privacy__min_distance=2.0, privacy__max_distance=1.0)
    assert message == "privacy.max-distance = 1.0 must be at least privacy.min-distance = 2.0, or 0 for no limit"
    assert parse({"privacy.min-distance": 2.0, "privacy.max-distance": 0.0})
    assert parse({"privacy.min-distance": 2.0, "privacy.max-distance": 2.0})


def test_a_setting_of_the_adaptive_clip_needs_it():
    def check(key):
        with pytest.raises(ConfigError, match=rf"privacy\.{key} = .* has no effect with privacy\.clipping = 'fixed'"):
            parse({f"privacy.{key}": SETTINGS[key]})

    assert failures(ADAPTIVE_ONLY, check) == []


def test_noise_whose_cost_depends_on_the_model_is_not_calibrated():
    settings = {"privacy.client": "laplace", "privacy.laplace-noise-multiplier": "auto"}
    told = "privacy.laplace-noise-multiplier = 'auto' is not possible: the cost of a round depends on the model's size"
    assert refusal(**settings).startswith(told)
