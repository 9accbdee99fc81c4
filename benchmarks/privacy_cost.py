"""The cost of privacy on this machine, for a task and configuration: steps, aggregation, noise, bytes, a round.

Inputs are random numbers of the task's shapes. No data is read, nothing is sent, no budget is spent.

    python benchmarks/privacy_cost.py -c "task.model='softmax' privacy.server='global-dp' privacy.client='dp-sgd'"
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median, quantiles

import numpy as np
from common import machine, table
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from cloister.client.trainers import ModelAndTrainer
from cloister.config.io import read_settings
from cloister.config.privacy import PrivacyConfig
from cloister.config.run import RunConfig, parse
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian, kernel
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.build import Plan, build
from cloister.server.private_strategy import PrivateStrategy
from cloister.simulation.grid import LocalGrid, quiet
from cloister.simulation.simulate import refuse_other_population, refuse_too_few
from cloister.tasks.base import Examples, Task
from cloister.tasks.making import model_of
from cloister.tasks.recipe import Augmentation, recipe_of
from cloister.training.plan import TrainingPlan
from cloister.utils.arrays import Layout, to_record
from cloister.utils.errors import CloisterError
from cloister.utils.wire import ARRAYS, EXAMPLES, METRICS

SHARES = {"training": 0.4, "aggregation": 0.4, "message": 0.075, "number": 0.05}
"""Shares of the total time; the share of a message is used twice, for two kinds of noise."""
MAX_TURNS = 200
STEPS = 8
"""Training steps in a turn: they share the trainer's work once per round."""
NUMBERS = 1 << 19
"""Numbers of exact noise in a turn: too few for a second thread."""
POOL = 1 << 28
"""Bytes of distinct replies: more than a cache. A round that needs more reuses them."""

Action = Callable[[], Callable[[], object]]
"""A function that prepares a turn, untimed, and returns the function that is timed."""
Arrays = Mapping[str, NDArray]


@dataclass(frozen=True)
class Row:
    """Seconds of an action's turns, without privacy and with it.

    Attributes:
        what: the action.
        plain: seconds of each turn without privacy; empty: there is no such action.
        private: seconds of each turn with privacy; empty: the action is impossible.
        why: the reason why it is impossible; empty if it is possible.
    """

    what: str
    plain: tuple[float, ...]
    private: tuple[float, ...]
    why: str = ""

    @property
    def cells(self) -> list[str]:
        """Cells of the table: medians with quartiles, the median ratio of turns, and the number of turns."""
        ratio = ""
        if self.plain and self.private:  # a slow moment of the machine affects both times of a turn
            ratio = f"{median(own / base for own, base in zip(self.private, self.plain, strict=True)):.3g}"
        return [self.what, spread(self.plain), spread(self.private), ratio, str(len(self.private or self.plain))]


def spread(seconds: Sequence[float]) -> str:
    """Median and quartiles in milliseconds, or in nanoseconds below a microsecond."""
    if not seconds:
        return "-"
    low, middle, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * list(seconds)
    unit, factor = ("ns", 1e9) if middle < 1e-6 else ("ms", 1e3)
    return f"{factor * middle:.3g} {unit} ({factor * low:.3g} to {factor * high:.3g})"


def timed(what: str, plain: Action | None, private: Callable[[], Action], seconds: float, parts: int = 1) -> Row:
    """Run two actions in turns until the time is up; return the times of one of the `parts` of a turn.

    Each runs once untimed before, to load libraries and to compile.
    """
    actions, why = {} if plain is None else {"plain": plain}, ""
    try:
        actions["private"] = private()
        actions["private"]()()
    except CloisterError as error:
        actions.pop("private", None)
        why = str(error)
    if plain is not None:
        plain()()
    taken: dict[str, list[float]] = {"plain": [], "private": []}
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        if turn and time.perf_counter() >= end:
            break
        for name, prepare in actions.items():
            work = prepare()
            start = time.perf_counter()
            work()
            taken[name].append((time.perf_counter() - start) / parts)
    return Row(what, tuple(taken["plain"]), tuple(taken["private"]), why)


def steps(config: RunConfig, task: Task, privacy: PrivacyConfig) -> Action:
    """One epoch of a client with `STEPS` batches of random examples, each a unit of its own."""
    client = config.client.model_copy(update={"callbacks": False})  # DP-SGD has none
    recipe = replace(recipe_of(task, client, privacy), local_epochs=1)
    trainer = ModelAndTrainer(config.task, client, privacy).trainer
    rng, count = np.random.default_rng(0), STEPS * recipe.batch_size
    x = rng.random((count, *task.input_shape), np.float32)
    y = rng.integers(0, task.classes, count) if task.classes else rng.random(count, np.float32)
    examples = Examples(x, y, np.arange(count) if config.task.group else None)
    plan = TrainingPlan.of(recipe, (0, 1, 0), augmentation=Augmentation.of(task, recipe))
    return lambda: lambda: trainer.fit(examples, plan)


def training(plan: Plan, seconds: float) -> Row:
    """A training step, plain and of DP-SGD with the run's settings, or with the defaults."""
    config, task, plain = plan.config, plan.task, parse({"privacy.server": "none"}).privacy
    default = parse({"privacy.server": "none", "privacy.client": "dp-sgd"}).privacy
    privacy = config.privacy if config.privacy.client.clips_gradients else default
    what = "a training step, DP-SGD"
    return timed(what, steps(config, task, plain), lambda: steps(config, task, privacy), seconds, STEPS)


def with_fixed_cohort(config: RunConfig, privacy: PrivacyConfig) -> RunConfig:
    """A run with this privacy whose cohort is not drawn."""
    fixed = config.strategy.model_copy(update={"sampling": "fixed"})
    return config.model_copy(update={"strategy": fixed, "privacy": privacy})


def without_noise(config: RunConfig) -> RunConfig:
    """A run without privacy, with a fixed cohort."""
    return with_fixed_cohort(config, parse({"privacy.server": "none"}).privacy)


def with_noise(config: RunConfig) -> RunConfig:
    """A run whose server adds noise, its own or that of `global-dp`, without a budget."""
    chosen = config.privacy.server
    server = chosen if chosen.is_noised else parse({"privacy.server": "global-dp"}).privacy.server
    free: dict[str, object] = {"max_epsilon": 0.0}
    if server.is_calibrated:
        free["noise_multiplier"] = 1.0  # the value does not affect the time
    return with_fixed_cohort(config, config.privacy.model_copy(update={"server": server.model_copy(update=free)}))


def never_called(message: Message, context: Context) -> Message:
    """A node of a benchmark of the server."""
    raise NotImplementedError("the nodes of a benchmark of the server are asked nothing")


def rounds(config: RunConfig, arrays: Arrays, trained: Sequence[Arrays], clients: int) -> Action:
    """Rounds on the server without a ledger, from the replies to the new model."""
    strategy, sent = build(config).strategy, to_record(arrays)
    if isinstance(strategy, PrivateStrategy):
        strategy.budget = None
    grid = LocalGrid(never_called, {}, [{}] * clients)

    def prepare() -> Callable[[], object]:
        asked = strategy.configure_train(1, sent, ConfigRecord(), grid)
        replies = [
            Message(RecordDict({ARRAYS: to_record(model), METRICS: MetricRecord({EXAMPLES: 1})}), reply_to=message)
            for message, model in zip(asked, cycle(trained), strict=False)
        ]
        return lambda: strategy.aggregate_train(1, replies)

    return prepare


def measured(plan: Plan, arrays: Arrays, clients: int, cohort: int, seconds: float) -> dict[str, Row]:
    """All rows of the table by name; a client mechanism for messages by its own."""
    config, rng = plan.config, np.random.default_rng(0)
    distinct = min(cohort, POOL // max(1, sum(array.nbytes for array in arrays.values())))
    trained = [
        {
            name: array + (0.01 * rng.standard_normal(array.shape, np.float32)).astype(array.dtype)
            for name, array in arrays.items()
        }
        for _ in range(max(1, distinct))
    ]
    bare, noised = without_noise(config), with_noise(config)
    rows = {
        "training": training(plan, SHARES["training"] * seconds),
        "aggregation": timed(
            f"aggregation, {noised.privacy.server.name}",
            rounds(bare, arrays, trained, clients),
            lambda: rounds(noised, arrays, trained, clients),
            SHARES["aggregation"] * seconds,
        ),
    }
    mechanisms: dict[str, LocalMechanism] = {"gaussian": LocalGaussian(1.0, 1.0), "laplace": LocalLaplace(1.0, 1.0)}
    if own := config.privacy.client.noise_on_update:
        mechanisms[config.privacy.client.name] = own
    for name, mechanism in mechanisms.items():

        def release(mechanism: LocalMechanism = mechanism) -> Action:
            return lambda: lambda: mechanism.release(trained[0], arrays, GaussianNoise())

        rows[name] = timed(f"noise on a message, {name}", None, release, SHARES["message"] * seconds)

    def numbers() -> Action:
        return lambda: lambda: DiscreteGaussian().integers(NUMBERS)

    what = f"a number of exact noise, {kernel().NAME}"
    return rows | {"number": timed(what, None, numbers, SHARES["number"] * seconds, NUMBERS)}


def duration(config: RunConfig, rows: Mapping[str, Row], steps: int, cohort: int) -> str:
    """Seconds of a round as configured: the sum of its parts' medians."""
    client, server = config.privacy.client, config.privacy.server
    training, aggregation = rows["training"], rows["aggregation"]
    parts = [training.private if client.clips_gradients else training.plain]
    parts += [aggregation.private if server.is_noised else aggregation.plain]
    parts += [rows[client.name].private] if client.noise_on_update else []
    if not all(parts):
        return "cannot be done"
    step, aggregated, *noise = map(median, parts)
    one = steps * step + sum(noise)
    return f"{cohort * one + aggregated:.3g} one client after the other, {one + aggregated:.3g} with a machine for each"


def main() -> None:
    """Print the table, the bytes of a message and the seconds of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--run-config", action="append", default=[], help="settings, as for `cloister run`")
    parser.add_argument("-n", "--clients", type=int, default=4, help="number of nodes")
    parser.add_argument("--examples", type=int, default=1000, help="examples of a client")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to measure, beside loading and compiling")
    given = parser.parse_args()
    config = parse(read_settings(given.run_config))
    refuse_too_few(config, given.clients)
    refuse_other_population(config, given.clients)
    plan = build(config)
    model = model_of(plan.task)
    model.initialise(0)
    arrays, recipe = model.arrays(), plan.recipe
    cohort = int(build(without_noise(config)).cohort(given.clients))
    count = recipe.local_epochs * math.ceil(given.examples / recipe.batch_size)
    machine()
    print(
        f"{config.task.name}, {config.strategy.name}; {Layout.of(arrays).size:,} parameters, batches of "
        f"{recipe.batch_size}, {cohort} of {given.clients} clients a round\n"
    )
    with quiet("flwr"):  # Flower's strategies write a line for each round
        rows = measured(plan, arrays, given.clients, cohort, given.seconds)
    table(["", "without privacy", "with it", "times", "turns"], [row.cells for row in rows.values()])
    for row in rows.values():
        if row.why:
            print(f"{row.what}: cannot be done: {row.why}")
    size = sum(array.nbytes for array in arrays.values())
    print(f"bytes of the arrays of a message: {size * max(1, plan.hypotheses):,} down, {size:,} up\n")
    print(
        f"seconds of a round, {given.examples} examples a client, {count} steps; messages, scores and networks not in:"
    )
    print("  without privacy:", duration(without_noise(config), rows, count, cohort))
    print("  as configured:  ", duration(config, rows, count, cohort))


if __name__ == "__main__":
    main()
