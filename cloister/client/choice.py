"""Which of several hypotheses a client trains, scores or keeps."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cloister.config.privacy import PrivacyConfig
from cloister.privacy.mechanisms.selection import PrivateChoice
from cloister.tasks.base import Examples, Model, Task

NamedArrays = Mapping[str, NDArray]


def chosen_to_train(
    privacy: PrivacyConfig, model: Model, models: Sequence[NamedArrays], task: Task, examples: Examples
) -> int:
    """The hypothesis that suits these examples best, by noised losses where the run protects the client.

    Args:
        privacy: of the run.
        model: whose weights are replaced while losses are computed.
        models: k hypotheses.
        task: knows the losses.
        examples: of the client; possibly none.
    """
    if len(models) == 1:
        return 0
    if not privacy.chooses_privately:
        return best(model, models, task, examples)
    losses = [_losses(model, hypothesis, task, examples) for hypothesis in models]
    return choice_of(privacy, examples.groups is not None).choose(losses, _numbered(examples.groups))


def choice_of(privacy: PrivacyConfig, grouped: bool) -> PrivateChoice:
    """The mechanism of a private choice: it protects the units that DP-SGD does, or the client as a whole."""
    unit: Literal["client", "example", "group"] = "client"
    if privacy.client.clips_gradients:
        unit = "group" if grouped else "example"
    return PrivateChoice(privacy.choice_epsilon, privacy.max_loss, unit)


def _numbered(groups: NDArray | None) -> NDArray | None:
    """Groups as whole numbers, whatever they are called."""
    return None if groups is None else np.unique(groups, return_inverse=True)[1]


def best(model: Model, models: Sequence[NamedArrays], task: Task, examples: Examples) -> int:
    """The hypothesis of the smallest mean loss: an un-noised answer of private data. It is put into the model."""
    means = [0.0]
    if len(models) > 1:
        means = [_mean(_losses(model, hypothesis, task, examples)) for hypothesis in models]
    chosen = int(np.argmin(means))
    model.assign(models[chosen])
    return chosen


def _losses(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """The loss of each example, shape (n,)."""
    if not len(examples):
        return np.zeros(0)
    model.assign(hypothesis)
    return task.losses(examples.y, model.predict(examples.x))


def _mean(losses: NDArray) -> float:
    """∞ for a hypothesis that has diverged: it suits nobody."""
    mean = float(np.mean(losses)) if len(losses) else 0.0
    return mean if math.isfinite(mean) else math.inf
