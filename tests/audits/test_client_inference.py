"""Shadow federations, and client inference on small ones."""

from dataclasses import replace

import numpy as np
import pytest

from cloister.audits.audit import Effort, FinishedRun
from cloister.audits.client_inference import AUDIT, RATIO, SEVERAL, SINGLE, Game, blurred, most_unlike, shadow_set
from cloister.audits.testing import flat
from cloister.config.run import parse
from cloister.simulation.shadow import Shadow, dealt, without_noise, without_privacy
from cloister.tasks.base import Examples
from cloister.utils.errors import ConfigError

LITTLE = Effort(shadows=4)


def examples(labels):
    y = np.array(labels)
    return Examples(np.linspace(0, 1, len(y))[:, None].astype(np.float32), y)


def controls_of(finding, attack):
    return {control.expected: control for control in finding.controls if control.measured.attack == attack}


@pytest.fixture
def run(plain_run):
    return FinishedRun.read(plain_run)


class TestShadow:
    def test_on_a_runs_own_examples_it_repeats_the_run(self, run):
        parts = [data.train for data in dealt(run.config, run.clients, run.seed)]
        seen = Shadow(run.config).run(parts, run.seed)
        released = run.released()
        assert list(released) == [0, 1, 2] and len(seen) == 3
        for number, arrays in enumerate(seen):
            assert all((arrays[name] == released[number][name]).all() for name in arrays)

    def test_an_absent_client_contributes_nothing(self, run):
        parts = [data.train for data in dealt(run.config, run.clients, run.seed)]
        shadow = Shadow(run.config)
        absent = shadow.run([*parts[:3], None], 0, rounds=1)[-1]
        without = shadow.run(parts[:3], 0, rounds=1)[-1]
        assert all((absent[name] == without[name]).all() for name in absent)

    def test_it_leaves_nothing_behind(self, run, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        parts = [data.train for data in dealt(run.config, run.clients, run.seed)]
        Shadow(run.config).run(parts, 0, rounds=1)
        assert not list(tmp_path.iterdir())

    def test_somebody_has_to_take_part(self, run):
        with pytest.raises(ConfigError, match="needs a client with examples"):
            Shadow(run.config).run([None, None], 0)

    def test_without_privacy_nothing_else_changes(self, run_of):
        config = FinishedRun.read(run_of(**{"privacy.server": "global-dp", "strategy.name": "fedavgm"})).config
        bare = without_privacy(config)
        assert not bare.is_private and bare.strategy.name == "fedavgm"
        assert (bare.task, bare.client, bare.num_rounds) == (config.task, config.client, config.num_rounds)
        assert bare.weights_by_examples == config.weights_by_examples


class TestShadowSets:
    def test_a_tenth_without_repetition(self):
        held = shadow_set(examples(range(50)), 0)
        assert len(set(held.y.tolist())) == 5 and len(shadow_set(examples([1, 2]), 0)) == 1

    def test_noise_is_a_fifth_of_the_largest_input(self):
        clean = Examples(np.full((1, 10_000), 5.0, np.float32), np.array([0]))
        assert (blurred(clean, 0).x - 5).std() == pytest.approx(1.0, rel=0.05)

    def test_the_client_with_other_classes_is_the_target(self):
        assert most_unlike([examples([0, 1] * 9), examples([0, 0, 0]), examples([1, 0])], 2) == 1
        assert most_unlike([examples([0]), examples([0, 0])], 0) == 1


class TestGame:
    def test_the_published_score_by_hand(self, run, monkeypatch):
        game = Game.of(run, 0)
        sizes = [len(test) for test in game.tests]
        losses = {id(test): float(number + 1) for number, test in enumerate(game.tests)}

        def known(self, arrays, held):
            return np.full(len(held), losses.get(id(held), 10.0))

        monkeypatch.setattr(Game, "losses", known)
        everybody = sum(size * (number + 1) for number, size in enumerate(sizes)) / sum(sizes)
        assert game.published({}, inside=True) == pytest.approx(100 * (10 - everybody) / 10)
        others = [number for number in range(4) if number != game.target]
        rest = sum(sizes[number] * (number + 1) for number in others) / sum(sizes[number] for number in others)
        assert game.published({}, inside=False) == pytest.approx(100 * (10 - rest) / 10)

    def test_under_a_mean_over_all_the_direction_is_the_targets_own_update(self, run_of):
        noisy = {"privacy.server": "global-dp", "privacy.noise-multiplier": 9.0, "privacy.clipping-norm": 0.1}
        noised = FinishedRun.read(run_of(**noisy))
        game = Game.of(noised, 0)
        alone = [part if number == game.target else None for number, part in enumerate(game.parts)]
        own = flat(Shadow(without_privacy(noised.config)).run(alone, 0, game.start, 1)[-1]) - flat(game.start)
        assert game.direction == pytest.approx(own / np.linalg.norm(own), abs=1e-4)
        assert game.projection({name: array + 1 for name, array in game.start.items()}) == pytest.approx(
            game.direction.sum()
        )

    def test_without_noise_the_mechanism_stays(self):
        for settings in (
            {"privacy.server": "none"},
            {"privacy.server": "metric"},
            {"privacy.noise-multiplier": "auto", "privacy.max-epsilon": 3.0, "privacy.server": "global-dp"},
            {"privacy.server": "none", "privacy.client": "dp-sgd", "privacy.client-max-epsilon": 3.0},
            {"privacy.server": "none", "privacy.client": "laplace", "privacy.max-leakage": 3.0},
        ):
            silent = without_noise(parse(settings)).privacy
            names = settings["privacy.server"], settings.get("privacy.client", "none")
            assert (silent.server.name, silent.client.name) == names
            assert silent.client.noise_multiplier == 0 and silent.server.max_epsilon == silent.client.max_epsilon == 0
            assert silent.server.is_silent


class TestAudit:
    def test_without_privacy_the_target_is_told(self, run, few_resamples):
        found = AUDIT.conduct(run, LITTLE)
        assert {item.attack for item in found.measured if item.quantity == "auc"} == {SINGLE, SEVERAL, RATIO}
        (ratio,) = [item for item in found.borne_out("auc") if item.attack == RATIO]
        assert ratio.value > 0.9 and ratio.low > 0.5
        controls = controls_of(found, RATIO)
        assert controls["succeeds"].met and controls["fails"].met
        assert f"client {Game.of(run, 0).target}" in found.meaning

    @pytest.mark.slow
    def test_much_noise_hides_it_and_the_control_still_succeeds(self, run_of, few_resamples, seeded_noise):
        noisy = {"privacy.server": "global-dp", "privacy.noise-multiplier": 50.0, "privacy.clipping-norm": 0.5}
        found = AUDIT.conduct(FinishedRun.read(run_of(**noisy)), LITTLE)
        (ratio,) = [item for item in found.measured if item.attack == RATIO and item.quantity == "auc"]
        assert ratio.low < 0.5
        assert controls_of(found, RATIO)["succeeds"].met
        assert found.borne_out("epsilon")[0].value == 0

    @pytest.mark.slow
    def test_an_attack_that_looks_the_wrong_way_is_found_out(self, run, few_resamples, monkeypatch):
        """A projection on nothing in particular shows nothing, and its control says so."""
        # Drawn apart from the release: a hash of its bits would be another draw on every processor.
        draws = np.random.default_rng(0)
        monkeypatch.setattr(Game, "projection", lambda self, arrays: float(draws.normal()))
        found = AUDIT.conduct(run, LITTLE)
        assert not controls_of(found, RATIO)["succeeds"].met
        assert RATIO not in {item.attack for item in found.borne_out("auc")}

    def test_a_run_of_nodes_is_not_attacked(self, run):
        assert "is not here" in AUDIT.misfit(replace(run, clients=0))
        assert AUDIT.misfit(run) == ""
