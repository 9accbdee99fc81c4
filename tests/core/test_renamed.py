"""Keys of earlier versions: refused by their new name in new settings, and read in the records of earlier runs."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipped import refusal

from cloister.client.policy import Policy
from cloister.config.privacy import DEFAULTS
from cloister.config.renamed import RENAMED, translated
from cloister.config.run import known_keys, parse

OLD, CLIP = "privacy.client-noise-multiplier", "privacy.client-clipping-norm"
CLIENTS = ("dp-sgd", "gaussian", "laplace")
GOLDEN = Path(__file__).parents[1] / "upgrade/golden/runs"


@pytest.mark.parametrize("client", CLIENTS)
def test_the_noise_of_a_client_is_refused_with_the_key_of_its_mechanism(client):
    message = refusal(**{"privacy.client": client, OLD: 2.0})
    assert message == f"{OLD} = 2.0 has a new name: use privacy.{client}-noise-multiplier"


@pytest.mark.parametrize("settings", [{}, {"privacy.client": "none"}, {"privacy.client": "gausian"}])
def test_without_a_mechanism_all_of_its_names_are_told(settings):
    told, *_ = refusal(**settings, **{OLD: 2.0}).splitlines()
    assert told.endswith(
        "use privacy.dp-sgd-noise-multiplier, privacy.gaussian-noise-multiplier or privacy.laplace-noise-multiplier"
    )


def test_every_old_key_is_refused_with_names_that_there_are():
    for old, names in RENAMED.items():
        assert old not in known_keys() and set(names) <= set(known_keys())
        assert all(name in refusal(**{old: 5.0}) for name in names)


def test_a_clip_is_that_of_its_mechanism():
    for client in ("dp-sgd", "gaussian"):
        recorded = {"privacy.client": client, CLIP: 3.0}
        assert refusal(**recorded) == f"{CLIP} = 3.0 has a new name: use privacy.{client}-clipping-norm"
        assert parse(translated(recorded)).privacy.client.bound == 3.0
    assert parse(translated({"privacy.client": "laplace", CLIP: 1.0})).privacy.client.bound == 0, "it had no effect"


@pytest.mark.parametrize("value", [1.0, 3.0])
def test_a_clip_that_its_mechanism_never_had_is_to_be_removed(value):
    message = refusal(**{"privacy.client": "laplace", CLIP: value})
    assert message == f"{CLIP} = {value} has no effect with privacy.client = 'laplace'; remove it"


@given(client=st.sampled_from(CLIENTS), multiplier=st.floats(1e-6, 1e6))
def test_recorded_noise_is_that_of_its_mechanism_and_of_no_other(client, multiplier):
    privacy = parse(translated({"privacy.client": client, OLD: multiplier})).privacy
    assert (privacy.client.name, privacy.client.noise_multiplier) == (client, multiplier)
    others = [f"{each}-noise-multiplier" for each in CLIENTS if each != client]
    assert all(privacy.model_dump()[key] == DEFAULTS[key] for key in others)


def test_a_recorded_adaptive_clip_keeps_its_noise():
    recorded = {"privacy.clipping": "adaptive", "privacy.bits-noise-multiplier": 3.0}
    assert parse(translated(recorded)).privacy.server.clipping.count_noise_multiplier == 3.0


@pytest.mark.parametrize("run", ["examples", "finished", "global", "secure"])
def test_recorded_runs_keep_every_other_setting(run):
    recorded = json.loads((GOLDEN / run / "config.json").read_text())["config"]
    read = parse(translated(recorded)).flat()
    assert {key: read[key] for key in recorded.keys() - RENAMED} == {
        key: value for key, value in recorded.items() if key not in RENAMED
    }
    assert parse(translated(read)).flat() == read


def test_the_keys_of_another_mechanism_do_nothing_and_are_refused():
    message = refusal(**{"privacy.client": "gaussian", "privacy.dp-sgd-noise-multiplier": 50.0})
    assert message.startswith("privacy.dp-sgd-noise-multiplier = 50.0 has no effect with privacy.client = 'gaussian'")


class TestTheNoiseThatAPolicyAsksFor:
    """One rule was for σ of DP-SGD and for z of noise on an update, which are not comparable."""

    @pytest.mark.parametrize("listed", [["dp-sgd"], ["gaussian"], ["dp-sgd", "gaussian", "laplace"]])
    def test_in_an_older_file_is_that_of_each_listed_mechanism(self, listed):
        rules = {"mechanisms": listed, "tasks": ["digits"], "max-epsilon": 8.0, "min-client-noise-multiplier": 0.7}
        found = {name: Policy.model_validate(rules).smallest_noise(name) for name in CLIENTS}
        assert found == {name: 0.7 * (name in listed and name != "laplace") for name in CLIENTS}

    def test_is_not_stated_twice(self):
        rules = {"mechanisms": ["dp-sgd"], "tasks": ["digits"], "min-client-noise-multiplier": 0.7}
        with pytest.raises(ValueError, match="has a new name, and min-dp-sgd-noise-multiplier is there too"):
            Policy.model_validate(rules | {"min-dp-sgd-noise-multiplier": 0.7})
