"""Run directories for tests of the page: written by hand, so that no model is trained."""

import json
from dataclasses import replace
from pathlib import Path

from claimed import HELD

from cloister.config.run import parse
from cloister.privacy.claims.claim import Claim, DpSgdClaim, Figure, LedgerState, LocalClaim, OfSize, Statement
from cloister.privacy.claims.premises import UNCHOSEN
from cloister.privacy.claims.server import ALL_RUNS, OUTSIDERS, RUN
from cloister.privacy.claims.to_json import record
from cloister.privacy.mechanisms.distributed.shares import COLLUDING
from cloister.tasks.scores import RATES

LEDGER = LedgerState("ledger.jsonl", "ab" * 32, 3, False)
PARAMETERS = {"privacy.noise-multiplier": 1.5, "privacy.clipping-norm": 1.0}
OF_RUN = Figure("client", "add-or-remove", None, OUTSIDERS, RUN, 1.0, 1e-5, "pld", {"pld": 1.0})
OF_ALL = Figure("client", "add-or-remove", None, OUTSIDERS, ALL_RUNS, 2.0, 1e-5, "pld", {"pld": 2.0}, (UNCHOSEN,))
SOUND = Claim("global-dp", premises=HELD, parameters=PARAMETERS, figures=(OF_RUN, OF_ALL), unprotected=("who replies",))
NONE = Claim("none", unprotected=("every client's model",))
DP_SGD = DpSgdClaim(
    "dp-sgd",
    premises=HELD,
    unit="example",
    sizes=(
        OfSize(64, 3, (Figure("example", "add-or-remove", "gradients count or not", "all", None, 3.0, 1e-5, "pld"),)),
    ),
)
LAPLACE = LocalClaim("laplace", premises=HELD, reasons=("its radius is private",), adversary="all")
SHARES = replace(SOUND, parameters=PARAMETERS | {COLLUDING: 1})
CLAIMS = {
    "sound": (SOUND, None),
    "shares": (SHARES, None),
    "none": (NONE, None),
    "mixed": (SOUND, None),
    "heuristic": (
        Claim("metric", premises=HELD, reasons=("it is steered by private data",), parameters=PARAMETERS),
        None,
    ),
    "dp-sgd": (NONE, DP_SGD),
    "laplace": (NONE, LAPLACE),
}
SETTINGS = {"privacy.server": "global-dp", "privacy.noise-multiplier": 1.5, "num-rounds": 3}


def line(number, secret=False, **more):
    """A line of `rounds.jsonl`."""
    measured = {"noise_std": 0.1, "noise_multiplier": 1.5, "clipping_norm": 1.0, "epsilon": 0.3 * number}
    measured |= {"clipped_fraction": 0.4321, "distance": 0.8765, "sensitivity": 0.1}
    measured |= {} if secret else {"asked": 4, "accepted": 3, "rejected": more.pop("rejected", [])}
    told = {"round": number, "central": {"loss": 1 / (number + 1), "accuracy": number / 4}} | more
    return told | ({"measured": measured} if number else {})


def evaluation(names=("0", "1", "2"), examples=30):
    """The content of `evaluation.json`, everything right but two of the first class."""
    count = len(names)
    confusion = [[10 if row == column else 0 for column in range(count)] for row in range(count)]
    confusion[0][:2] = [8, 2]
    scored = [{"name": name, "precision": 0.9, "recall": 0.8, "f1": 0.85, "support": 10} for name in names]
    metrics = {"loss": 0.3, "accuracy": 0.93}
    content = {"examples": examples, "metrics": metrics, "confusion": confusion, "classes": scored}
    return content | {"macro_f1": 0.91, "auc": 0.99}


def roc(names):
    """The ROC curves in `evaluation.json`, the worst class last."""
    areas = [1 - number / (2 * len(names)) for number in range(len(names))]
    return [
        {"name": name, "auc": area, "found": (RATES ** (1 / area - 1)).round(4).tolist()}
        for name, area in zip(names, areas, strict=True)
    ]


def write_run(place, kind="sound", rounds=None, settings=(), **files):
    """A run directory; `files` are JSON contents by the names of files without `.json`."""
    place.mkdir(parents=True, exist_ok=True)
    config = parse(SETTINGS | dict(settings))
    facts = {"config": config.flat(), "config-sha256": config.digest(), "seed": 1, "versions": {"flwr": "1.41.0"}}
    server, clients = CLAIMS[kind]
    ledger = replace(LEDGER, holds_releases_without_a_guarantee=kind == "mixed")
    statement = Statement(server, 3, "fixed, 100 % of the nodes", ledger, clients)
    ended = {"ended": {"how": "as-asked", "why": ""}}
    files = {"config": facts, "privacy": record(statement) | ended, "evaluation": evaluation()} | files
    for name, content in files.items():
        if content is not None:
            (place / f"{name}.json").write_text(json.dumps(content))
    lines = [line(number) for number in range(4)] if rounds is None else rounds
    (place / "rounds.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (place / "model.npz").write_bytes(b"weights")
    return Path(place)
