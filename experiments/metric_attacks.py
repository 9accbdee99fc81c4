"""The client inference attack of the metric-privacy paper on the brain scans: its tables 10 to 13 and E.16 to E.19.

    python experiments/metric_attacks.py run --data FOLDER [--kinds single several] [--size 128] [--strategies …]
        [--results FOLDER]
    python experiments/metric_attacks.py table [--size 128]

There are three clients (`table-9`). The first one asks whether the third takes part, whose classes are least like the
others'. `single`: one round of 20 local epochs, and the loss of the released model on a tenth of the target's examples
beside that on what the clients keep back. `several`: 20 rounds of 5 epochs; the score of a round is minus the loss on
that tenth with noise on it. The paper prints losses of runs with the target alone. Here each cell is run with it and
without it, as an attack has to tell the two apart. A cell is one file in metric_attacks of the results, and a cell
that is there is not run again. The hours that are to come are said first.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cells import data_at, in_turn, parser
from metric_cells import LAST, PLACEMENTS, SERVERS, STRATEGIES, seconds_of_an_epoch
from metric_cells import Cell as Setting

from cloister.audits.client_inference import Arrays, Game, shadow_set
from cloister.audits.scores import Evidence
from cloister.config.run import parse
from cloister.server.build import build
from cloister.server.prepare import initial_model
from cloister.simulation.shadow import Shadow, dealt, outsiders
from cloister.tasks.base import Examples
from cloister.tasks.making import named_task

CLIENTS, TARGET = 3, 2
ROUNDS: Mapping[str, Mapping[str, Any]] = {
    "single": {"num-rounds": 1, "client.local-epochs": 20},
    "several": {"num-rounds": 20, "client.local-epochs": 5},
}
SINGLE = {
    # Losses on the clients' test sets, on the target's examples, and on the server's examples, in the order of SERVERS.
    "fedavg": ((1.032, 1.182, 1.010), (3.603, 4.848, 3.514), (1.135, 1.506, 1.106)),
    "fedavgm": ((0.897, 1.118, 0.993), (0.969, 1.115, 1.048), (0.945, 1.211, 1.041)),
    "fedmedian": ((1.068, 1.188, 1.046), (2.079, 2.911, 2.071), (1.393, 1.880, 1.387)),
    "fedprox": ((1.032, 1.182, 1.010), (1.846, 2.681, 1.744), (1.163, 1.548, 1.149)),
    "fedopt": ((0.595, 0.599, 0.645), (0.743, 0.807, 0.845), (0.756, 0.853, 0.823)),
    "fedyogi": ((0.795, 0.895, 0.870), (0.949, 1.170, 1.036), (0.815, 0.957, 0.902)),
}
"""Its tables 10, 11, E.16 to E.19, and 12. By its text, table 11 is of FedOpt; its caption says FedYogi."""
SEVERAL = {"fedavg": ((0.890, 0.767, 0.977), (0.397, 0.224, 0.585), (0.493, 0.296, 0.689))}
"""Its table 13: the AUC with its 95 % interval."""


class Cell(NamedTuple):
    """One federation, with the target and without it."""

    kind: str
    setting: Setting

    @property
    def path(self) -> Path:
        """Return the path of its result in the folder of results."""
        return Path(str(self.setting.size)) / f"{self.kind}-{self.setting.path.name}"

    def __str__(self) -> str:
        """The name of its result."""
        return self.path.stem

    @property
    def epochs(self) -> int:
        """Local epochs of a client in both of its runs."""
        return 2 * ROUNDS[self.kind]["num-rounds"] * ROUNDS[self.kind]["client.local-epochs"]

    def settings(self) -> dict[str, Any]:
        """The keys of its configuration, all but where the images are."""
        return self.setting.settings() | ROUNDS[self.kind]


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Those that are asked for."""
    chosen = (arguments.kinds, arguments.strategies, arguments.servers, range(arguments.seeds))
    for kind, strategy, server, seed in itertools.product(*chosen):
        yield Cell(kind, Setting(arguments.size, "table-9", strategy, server, arguments.placement, seed))


def game_of(settings: Mapping[str, Any]) -> Game:
    """The federation of a configuration, and who attacks whom in it."""
    config = parse(dict(settings))
    plan, shadow = build(config), Shadow(config)
    parts = dealt(config, CLIENTS, config.seed)
    start = initial_model(plan, shadow.model)
    train, kept = [part.train for part in parts], [part.test for part in parts]
    return Game(shadow, named_task(config.task), train, kept, TARGET, start, config.seed)


def kept_back(game: Game, inside: bool) -> list[Examples]:
    """What the clients that take part are scored on."""
    return [test for number, test in enumerate(game.tests) if inside or number != game.target]


def single(game: Game, inside: bool) -> dict[str, float]:
    """Losses of the first released model, and the published score."""
    (arrays,) = game.released(inside, game.seed, 1)
    groups = {
        "aggregated": kept_back(game, inside),
        "target": [shadow_set(game.parts[game.target], game.seed)],
        "server": [outsiders(game.shadow.config)],
    }
    found = {
        name: float(np.concatenate([game.losses(arrays, each) for each in group]).mean())
        for name, group in groups.items()
    }
    return found | {"difference": 100 * (found["target"] - found["aggregated"]) / found["target"]}


def several(game: Game, inside: bool) -> dict[str, Any]:
    """The score of each round, and how good the last models are on what the clients keep back."""
    models = game.released(inside, game.seed, 0)
    last = [qualities(game, arrays, inside) for arrays in models[-LAST:]]
    return {"scores": [game.confidence(arrays) for arrays in models], "last": last}


def qualities(game: Game, arrays: Arrays, inside: bool) -> dict[str, float]:
    """Accuracy and F1 on each client's test set, weighted by its size, as a server aggregates them."""
    model, tests = game.shadow.model, kept_back(game, inside)
    model.assign(arrays)
    found = [game.task.metrics(test.y, model.predict(test.x)) for test in tests]
    weights = [len(test) for test in tests]
    return {name: float(np.average([each[name] for each in found], weights=weights)) for name in ("accuracy", "f1")}


PLAY: Mapping[str, Callable[[Game, bool], dict[str, Any]]] = {"single": single, "several": several}


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing, and say before each cell how long the rest takes."""
    left = [cell for cell in cells(arguments) if not (arguments.results / cell.path).exists()]
    data = data_at(arguments.data, "alzheimer-mri") if left else ""
    for cell in in_turn(left, seconds_of_an_epoch(arguments.size), lambda cell: cell.epochs):
        start, game = time.perf_counter(), game_of(cell.settings() | {"task.data-path": data})
        found = {name: PLAY[cell.kind](game, inside) for name, inside in (("with", True), ("without", False))}
        seconds = round(time.perf_counter() - start)
        place = arguments.results / cell.path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"settings": cell.settings(), **found, "seconds": seconds}, indent=2) + "\n")


def table(arguments: argparse.Namespace) -> None:
    """Write the paper's figures beside ours."""
    lines = [f"Images of {arguments.size}×{arguments.size}, placement {arguments.placement}, the first seed."]
    if arguments.size != 128:
        lines.append("The paper's are of 128×128: these are not its tables.")
    lines += ["", *_single(arguments), "", *_several(arguments)]
    text = "\n".join(lines) + "\n"
    print(text)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"table-{arguments.size}-{arguments.placement}.md").write_text(text)


def _found(arguments: argparse.Namespace, kind: str, strategy: str, server: str) -> dict[str, Any] | None:
    cell = Cell(kind, Setting(arguments.size, "table-9", strategy, server, arguments.placement, 0))
    place = arguments.results / cell.path
    return json.loads(place.read_text()) if place.exists() else None


def _single(arguments: argparse.Namespace) -> Iterator[str]:
    """Losses after one round: of the clients' tests, of the target's examples, and of the server's examples."""
    yield "| strategy | mechanism | paper: clients, target, difference, server | ours, with the target | without it |"
    yield "|---|---|---|---|---|"
    for strategy, server in itertools.product(STRATEGIES, SERVERS):
        clients, target, own = SINGLE[strategy][SERVERS.index(server)]
        paper = _losses({"aggregated": clients, "target": target, "server": own})
        found = _found(arguments, "single", strategy, server)
        ours = " | ".join(_losses(found[name]) for name in ("with", "without")) if found else "– | –"
        yield f"| {strategy} | {server} | {paper} | {ours} |"


def _losses(found: Mapping[str, float]) -> str:
    apart = 100 * (found["target"] - found["aggregated"]) / found["target"]
    return f"{found['aggregated']:.3f}, {found['target']:.3f}, {apart:.1f} %, {found['server']:.3f}"


def _several(arguments: argparse.Namespace) -> Iterator[str]:
    """AUC of the scores of all rounds, with the target and without it."""
    yield "| strategy | mechanism | paper: AUC (95 % interval) | ours | accuracy with the target, without it | F1 |"
    yield "|---|---|---|---|---|---|"
    for strategy, server in itertools.product(SEVERAL, SERVERS):
        value, low, high = SEVERAL[strategy][SERVERS.index(server)]
        found = _found(arguments, "several", strategy, server)
        ours = _told(found) if found else "– | – | –"
        yield f"| {strategy} | {server} | {value:.3f} ({low:.3f} to {high:.3f}) | {ours} |"


def _told(found: Mapping[str, Any]) -> str:
    sides = [found[name] for name in ("with", "without")]
    scores = Evidence("several", "client", *(np.array(side["scores"]) for side in sides)).auc()
    good = (
        ", ".join(f"{np.mean([one[name] for one in side['last']]):.3f}" for side in sides)
        for name in ("accuracy", "f1")
    )
    return " | ".join((f"{scores.value:.3f} ({scores.low:.3f} to {scores.high:.3f})", *good))


def main() -> None:
    """Run cells, or make the table of those that are there."""
    options = parser(__doc__, ["alzheimer-mri"])
    options.add_argument("what", choices=("run", "table"))
    options.add_argument("--size", type=int, default=128)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--kinds", nargs="+", choices=tuple(ROUNDS), default=list(ROUNDS))
    options.add_argument("--placement", choices=tuple(PLACEMENTS), default="published")
    options.add_argument("--strategies", nargs="+", choices=tuple(STRATEGIES), default=["fedavg"])
    options.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    arguments = options.parse_args()
    arguments.results /= "metric_attacks"
    {"run": run, "table": table}[arguments.what](arguments)


if __name__ == "__main__":
    main()
