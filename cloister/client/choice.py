"""Which of several hypotheses a client trains, scores or keeps."""

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
    choice = choice_of(privacy, examples.groups is not None)
    losses_by = _losses if choice.unit == "client" else _losses_alone
    losses = [losses_by(model, hypothesis, task, examples) for hypothesis in models]
    return choice.choose(losses, _numbered(examples.groups))


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
    chosen = 0
    if len(models) > 1:
        chosen = int(np.argmin([_mean(_losses(model, hypothesis, task, examples)) for hypothesis in models]))
    model.assign(models[chosen])
    return chosen


def _losses(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """The loss of each example, shape (n,)."""
    if not len(examples):
        return np.zeros(0)
    model.assign(hypothesis)
    return task.losses(examples.y, model.predict(examples.x))


def _losses_alone(model: Model, hypothesis: NamedArrays, task: Task, examples: Examples) -> NDArray:
    """The loss of each example, shape (n,), to the last bit whatever the others are and however many there are.

    Processors add up in another order for another number of rows. Of weights whose sums overflow in one order and not
    in the other, one row more would change everybody's loss. A loss that cannot be computed is ∞, for that row alone.
    """
    model.assign(hypothesis)
    return np.concatenate([np.zeros(0), *_contained_losses(model, task, examples)])


def _contained_losses(model: Model, task: Task, examples: Examples) -> Iterator[NDArray]:
    """Losses in the examples' order; where the computation raises an exception, halves are tried by themselves."""
    count = len(examples)
    if not count:
        return
    try:
        scores = model.predict_alone(examples.x)
        yield np.concatenate([task.losses(examples.y[i : i + 1], scores[i : i + 1]) for i in range(count)])
    except Exception:  # whatever it is, it must not tell in the others' losses that it happened
        if count == 1:
            yield np.full(1, np.inf)
            return
        for half in np.array_split(np.arange(count), 2):
            yield from _contained_losses(model, task, examples.take(half))


def _mean(losses: NDArray) -> float:
    """∞ for a hypothesis that has diverged: it suits nobody."""
    mean = float(np.mean(losses)) if len(losses) else 0.0
    return mean if math.isfinite(mean) else math.inf
