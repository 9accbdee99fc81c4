"""Training of a PyTorch model by minibatches, and optimizers of PyTorch by name."""

import inspect
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cloister.config.io import Scalar, as_pairs
from cloister.tasks.base import Examples, Recipe
from cloister.tasks.torch_model import TorchModel, called
from cloister.training.plan import TrainingPlan, check_optimizer_options
from cloister.utils.arrays import Optimizer, Tensor
from cloister.utils.crash import quoted
from cloister.utils.errors import ConfigError
from cloister.utils.text import suggestion

LEAST_SQUARE = 1e-12
"""Added below the root of a mean square, whose slope at 0 is infinite."""
ELSEWHERE = {"lr": "client.learning-rate sets it", "maximize": "a client's training minimises its loss"}
"""Arguments of PyTorch's optimizers that a recipe cannot set, with the reason."""
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of PyTorch's optimizers that choose among ways to compute the same step."""
SHARE = "share"
"""Key of a group of parameters: its learning rate, relative to that of the plan."""


class TorchTrainer:
    """Trainer that minimises the model's loss with an optimizer of PyTorch, and FedProx's penalty if the plan has one.

    The optimizer starts afresh in every `fit`, so that no state passes between clients.

    Args:
        model: trained in place.
        recipe: of the run: its optimizer and its class weights.

    Raises:
        ConfigError: PyTorch has no such optimizer or option, or the recipe has callbacks.
    """

    def __init__(self, model: TorchModel, recipe: Recipe) -> None:
        refuse_callbacks(recipe)
        self.model, self._recipe = model, recipe
        try_optimizer(recipe, model.trained.values())

    def fit(self, examples: Examples, plan: TrainingPlan) -> float:
        """Train the model from its current weights, and return the last epoch's mean loss.

        FedProx's penalty is centred on the weights at the start.

        Args:
            examples: to train on.
            plan: of this round.
        """
        trained = list(self.model.trained.values())
        optimizer = optimizer_of(self._recipe, trained)
        anchors = [each.detach().clone() for each in trained] if plan.proximal_mu else []
        factors = self._recipe.weights(examples)
        weights = np.ones(len(examples), np.float32) if factors is None else factors
        rng, loss = np.random.default_rng(plan.seed), 0.0
        with self.model.in_training(int(np.random.SeedSequence(plan.seed).generate_state(1)[0])):
            for epoch in range(plan.epochs):
                set_rate(optimizer, plan.rate(epoch))
                seen, order = plan.seen(examples, epoch), rng.permutation(len(examples))
                total = torch.zeros((), device=self.model.device)
                for chosen in self._minibatches(order, plan.batch_size):
                    own = self._loss(seen.take(chosen), weights[chosen])
                    objective = own
                    if anchors:  # μ/2·‖w - w_global‖² over the trained weights
                        pairs = zip(trained, anchors, strict=True)
                        objective = own + plan.proximal_mu / 2 * sum(torch.square(w - a).sum() for w, a in pairs)
                    optimizer.zero_grad()
                    objective.backward()
                    optimizer.step()
                    total += own.detach() * len(chosen)  # the last minibatch may be smaller
                loss = float(total) / len(examples)
        optimizer.zero_grad()
        return loss

    def _minibatches(self, order: NDArray, size: int) -> list[NDArray]:
        """Return the places of the examples of each minibatch.

        Normalisation of batches needs two examples. So a single last one joins the minibatch before it.
        """
        parts = np.split(order, range(size, len(order), size))
        if self.model.normalises_batches and len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [np.concatenate(parts[-2:])]
        return parts

    def _loss(self, batch: Examples, weights: NDArray) -> Tensor:
        """Return the loss of a minibatch: of each output the weighted mean over examples, for `rmse` its root."""
        outputs = called(self.model.module, self.model.given(batch.x))
        factors, total = torch.from_numpy(weights).to(self.model.device), torch.zeros((), device=self.model.device)
        losses = self.model.losses(self.model.expected(batch.y), outputs)
        for target, each in zip(self.model.targets.values(), losses, strict=True):
            loss = (each * factors).mean()
            if target.loss == "rmse":
                # The mean has the loss scale as a factor: so it is one of the root too.
                loss = torch.sqrt(loss * self._recipe.loss_scale + LEAST_SQUARE)
            total = total + target.weight * loss
        return total


def refuse_callbacks(recipe: Recipe) -> None:
    """Refuse the callbacks of a recipe.

    Raises:
        ConfigError: there are some.
    """
    if recipe.callbacks is not None:
        raise ConfigError(
            "the task's callbacks are those of Keras, and a PyTorch model has none; set client.schedule for the rate, "
            "and use client.callbacks = false"
        )


def optimizer_of(recipe: Recipe, parameters: Iterable[Tensor]) -> Optimizer:
    """Return a new optimizer of a recipe.

    Args:
        recipe: names an optimizer of `torch.optim` in lower case, such as `adamw`, or has a function that makes one.
        parameters: to be trained.

    Raises:
        ConfigError: PyTorch has no optimizer of this name, or it has no such option or value.
    """
    if isinstance(recipe.optimizer, str):
        optimizer = _named(recipe.optimizer, recipe.optimizer_options, list(parameters), recipe.learning_rate)
    elif recipe.optimizer_options:
        raise ConfigError("client.optimizer-options: the recipe's optimizer is a function, which sets its own options")
    else:
        optimizer = recipe.optimizer(list(parameters), recipe.learning_rate)
        if not isinstance(optimizer, torch.optim.Optimizer):
            found = type(optimizer).__name__
            raise ConfigError(f"recipe.optimizer must return an optimizer of PyTorch, found an object of type {found}")
    for group in optimizer.param_groups:
        group[SHARE] = float(group["lr"]) / recipe.learning_rate
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of an epoch; groups of parameters keep their ratios."""
    for group in optimizer.param_groups:
        group["lr"] = group[SHARE] * rate


def try_optimizer(recipe: Recipe, parameters: Iterable[Tensor]) -> None:
    """Make one step of a recipe's optimizer on copies of parameters, with gradients of zero.

    Raises:
        ConfigError: as in `optimizer_of`, or the optimizer cannot train these parameters.
    """
    doubles = [torch.zeros_like(each, requires_grad=True) for each in parameters]
    for each in doubles:
        each.grad = torch.zeros_like(each)
    try:
        optimizer_of(recipe, doubles).step()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"client.optimizer = {recipe.optimizer!r} cannot train this model: {quoted(error)}; use sgd or adam"
        ) from error


def _named(name: str, options: Mapping[str, Scalar], parameters: Sequence[Tensor], rate: float) -> Optimizer:
    kinds = {
        each.__name__.lower(): each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    }
    if name not in kinds:
        raise ConfigError(
            f"client.optimizer must be the name of an optimizer of PyTorch in lower case, such as sgd or adam; got "
            f"{name!r}{suggestion(name, list(kinds))}"
        )
    own = {each.name: each.default for each in inspect.signature(kinds[name]).parameters.values()}
    betas = own.get("betas", ())
    defaults = {option: default for option, default in own.items() if isinstance(default, int | float)}
    defaults = {option: default for option, default in defaults.items() if option not in (*ELSEWHERE, *HOW)}
    defaults |= {f"beta_{place}": beta for place, beta in enumerate(betas, 1)}
    check_optimizer_options(name, options, defaults, ELSEWHERE)
    given: dict[str, object] = {option: value for option, value in options.items() if option in own}
    if betas:
        given["betas"] = tuple(options.get(f"beta_{place}", beta) for place, beta in enumerate(betas, 1))
    try:
        return kinds[name](parameters, lr=rate, **given)
    except (ValueError, TypeError) as error:
        if not options:
            raise  # the parameters are not what it trains
        raise ConfigError(f"client.optimizer-options: {as_pairs(options)} is not valid: {quoted(error)}") from error
