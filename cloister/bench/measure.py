"""Measurement of privacy's cost on a machine: the rows of the table, and the derived duration of a round."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cloister.bench import rows
from cloister.bench.aggregation import Arrays, without_noise
from cloister.bench.machine import Machine
from cloister.bench.rows import Row
from cloister.config.run import RunConfig, parse
from cloister.config.section import Scalar
from cloister.core import check
from cloister.core.arrays import Layout
from cloister.local.grid import quiet
from cloister.local.simulation import refuse_other_population, refuse_too_few
from cloister.server.build import Plan, build
from cloister.tasks.making import model_of


@dataclass(frozen=True)
class Options:
    """Parameters of a benchmark beside its configuration.

    Attributes:
        clients: number of nodes.
        examples: number of examples of each node.
        seconds: duration of all turns; loading libraries and compiling is extra.
    """

    clients: int = 4
    examples: int = 1000
    seconds: float = 60.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, a round and its messages.

    Attributes:
        parameters: of the model sent.
        batch_size: examples of a step.
        steps: of a client in a round.
        cohort: clients of a round.
        down, up: bytes of the arrays in a message to a client, and in its reply.
    """

    parameters: int
    batch_size: int
    steps: int
    cohort: int
    down: int
    up: int


@dataclass(frozen=True)
class Round:
    """Seconds of a round: the sum of its parts' medians, without messages, evaluation and networks.

    Attributes:
        one_by_one: if the clients train sequentially in one process.
        side_by_side: if each client has a machine like this one.
    """

    one_by_one: float
    side_by_side: float


@dataclass(frozen=True)
class Bench:
    """Result of a benchmark: the cost of privacy on a machine.

    Attributes:
        config, options: input of the benchmark.
        machine: before the first turn.
        load: after the last turn, as in `Machine`.
        sizes: of the model, of a message and of a round.
        rows: timed actions: `training`, `aggregation`, `gaussian`, `laplace`, `number`.
    """

    config: RunConfig
    options: Options
    machine: Machine
    load: float | None
    sizes: Sizes
    rows: Mapping[str, Row]

    @property
    def plain(self) -> Round | None:
        """Duration of a round without privacy."""
        return self._round(self._without("training"), 0.0, self._without("aggregation"))

    @property
    def configured(self) -> Round | None:
        """Duration of a round as configured; None: a part of it is impossible."""
        client, server = self.config.privacy.client, self.config.privacy.server
        step = self._with("training") if client.clips_gradients else self._without("training")
        noise = self._with(client.name) if client.noise_on_update else 0.0
        return self._round(step, noise, self._with("aggregation") if server.is_noised else self._without("aggregation"))

    def _without(self, name: str) -> float | None:
        times = self.rows[name].plain
        return None if times is None else times.median

    def _with(self, name: str) -> float | None:
        times = self.rows[name].private
        return None if times is None else times.median

    def _round(self, step: float | None, noise: float | None, aggregation: float | None) -> Round | None:
        if step is None or noise is None or aggregation is None:
            return None
        client = self.sizes.steps * step + noise
        return Round(self.sizes.cohort * client + aggregation, client + aggregation)


def bench(settings: Mapping[str, Scalar], options: Options) -> Bench:
    """Measure the cost of privacy on this machine with random inputs.

    It reads no data, sends and writes nothing, and spends no budget.

    It reads no data, sends nothing, and writes no ledger.

    Args:
        settings: dotted keys of the run configuration.
        options: parameters of the benchmark.

    Raises:
        CloisterError: the configuration permits no such run.
    """
    config = parse(settings)
    _check(config, options)
    plan = build(config)
    model = model_of(plan.task)
    model.initialise(0)
    arrays, machine = model.arrays(), Machine.now()
    sizes = _sizes(plan, arrays, options)
    with quiet("flwr"):  # Flower's strategies write a line for each round
        found = _rows(plan, arrays, sizes.cohort, options)
    return Bench(config, options, machine, Machine.now().load, sizes, found)


def _rows(plan: Plan, arrays: Arrays, cohort: int, options: Options) -> dict[str, Row]:
    seconds = options.seconds
    return {
        "training": rows.training(plan, rows.TRAINING * seconds),
        "aggregation": rows.aggregation(plan, arrays, options.clients, cohort, rows.AGGREGATION * seconds),
        **dict(rows.messages(plan, arrays, rows.MESSAGE * seconds)),
        "number": rows.number(rows.NUMBER * seconds),
    }


def _check(config: RunConfig, options: Options) -> None:
    """Refuse options that permit no benchmark.

    Raises:
        ConfigError: there are too few clients, their number differs from the registered population, or a number is out
            of range.
    """
    check.positive(**{"--seconds": options.seconds, "--examples": options.examples})
    refuse_too_few(config, options.clients)
    refuse_other_population(config, options.clients)


def _sizes(plan: Plan, arrays: Arrays, options: Options) -> Sizes:
    recipe, size = plan.recipe, sum(array.nbytes for array in arrays.values())
    return Sizes(
        parameters=Layout.of(arrays).size,
        batch_size=recipe.batch_size,
        steps=recipe.local_epochs * math.ceil(options.examples / recipe.batch_size),
        cohort=int(build(without_noise(plan.config)).cohort(options.clients)),
        down=size * max(1, plan.hypotheses),
        up=size,
    )
