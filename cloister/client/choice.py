"""Choice of a hypothesis by a client, for training, evaluation or its own model."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
    """Return the hypothesis of least loss, by a private choice if configured.

    Args:
        privacy: of the run.
        model: its weights are replaced to compute losses.
        models: k hypotheses.
        task: computes the losses.
        examples: of the client; possibly none.
    """
    if len(models) == 1:
        return 0
    if not privacy.chooses_privately:
        return best(model, models, task, examples)
    choice = choice_of(privacy, examples.groups is not None)
    losses_by = _losses if choice.unit == "client" else _losses_alone
    losses = [losses_by(model, hypothesis, task, examples) for hypothesis in models]
    # Numbers in place of names, which may be of any type.
    groups = None if examples.groups is None else np.unique(examples.groups, return_inverse=True)[1]
    return choice.choose(losses, groups)


def choice_of(privacy: PrivacyConfig, grouped: bool) -> PrivateChoice:
    """Return the mechanism of a private choice.

    It protects the units of DP-SGD, or the client as a whole.
    """
    unit: Literal["client", "example", "group"] = "client"
    if privacy.client.clips_gradients:
        unit = "group" if grouped else "example"
    return PrivateChoice(privacy.choice_epsilon, privacy.max_loss, unit)


def best(model: Model, models: Sequence[NamedArrays], task: Task, examples: Examples) -> int:
    """Assign the hypothesis of least mean loss to the model and return it.

    This answer carries no noise.
    """
    chosen = 0
    if len(models) > 1:
        chosen = int(np.argmin([_mean(_losses(model, hypothesis, task, examples)) for hypothesis in models]))
    model.assign(models[chosen])
    return chosen


def _losses(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """Return the loss of each example, shape (n,)."""
    if not len(examples):
        return np.zeros(0)
    model.assign(hypothesis)
    return task.losses(examples.y, model.predict(examples.x))


def _losses_alone(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """Return each loss, shape (n,), bit for bit independent of other rows.

    Processors sum in an order that depends on the number of rows. For some weights only one order overflows, so that
    one more row would change every loss. If a loss cannot be computed, it is ∞ for that row alone.
    """
    model.assign(hypothesis)
    return np.concatenate([np.zeros(0), *_contained_losses(model, task, examples)])


def _contained_losses(model: Model, task: Task, examples: Examples) -> Iterator[NDArray]:
    """Yield losses in order; after an exception, compute each half separately."""
    count = len(examples)
    if not count:
        return
    try:
        scores = model.predict_alone(examples.x)
        yield np.concatenate([task.losses(examples.y[i : i + 1], scores[i : i + 1]) for i in range(count)])
    except Exception:  # no exception may affect the losses of other examples
        if count == 1:
            yield np.full(1, np.inf)
            return
        for half in np.array_split(np.arange(count), 2):
            yield from _contained_losses(model, task, examples.take(half))


def _mean(losses: NDArray) -> float:
    """Return the mean loss; ∞ for a hypothesis that has diverged."""
    mean = float(np.mean(losses)) if len(losses) else 0.0
    return mean if math.isfinite(mean) else math.inf
