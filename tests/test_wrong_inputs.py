"""People's mistakes, in one table: each gives a few lines that name the key or the file."""

import importlib
import io
import json
import re
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from click.testing import CliRunner
from quick_runs import quick_runs  # noqa: F401
from support import failures
from typer.main import get_command

from cloister import cli
from cloister.client import data as client_data
from cloister.client import trainers
from cloister.privacy.mechanisms import MECHANISMS
from cloister.strategies import STRATEGIES
from cloister.tasks import TASKS

CLOISTER = get_command(cli.app)
LINES, CHARACTERS = 5, 1500
"""Of what is said at most."""
ARRAY = re.compile(r"array\(|\[\s*-?\d+\.?\d*(e[-+]\d+)?[,\s]+-?\d+\.?\d*[,\s]+-?\d")
QUICK = "num-rounds=1 task.model='softmax' tensorboard=false report=false"
Content = str | bytes | None | Callable[[Path], None]
"""Of a file: text, bytes, None to remove it, or what changes it."""


@dataclass(frozen=True)
class Wrong:
    """A mistake.

    Attributes:
        command: after `cloister`, in a folder with `files`; where it says `run/`, a finished run is there too.
        says: what the error must name.
        files: by name.
        limit: bytes that a file may have, as on a full disk; 0: no limit.
    """

    command: str
    says: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=lambda: MappingProxyType({}))
    limit: int = 0


def wrong(command: str, *says: str, limit: int = 0, **files: Content) -> Wrong:
    """A mistake whose files are `a_toml=...` for a.toml."""
    return Wrong(
        command, says, {name.replace("__", "/").replace("_", "."): each for name, each in files.items()}, limit
    )


def run(settings: str, *says: str, **more: Content) -> Wrong:
    return wrong(f'run -c "{settings}"', *says, **more)


def quick(settings: str, *says: str, limit: int = 0, **files: Content) -> Wrong:
    """Of a run that would begin at once, without TensorFlow."""
    return wrong(f'run -c "{QUICK} {settings}"', *says, limit=limit, **files)


def npz(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def cut(path: Path) -> None:
    """As after a copy that was broken off."""
    path.write_bytes(path.read_bytes()[:40])


def changed(**keys: object) -> Callable[[Path], None]:
    """A JSON file with other values; None: without them."""

    def change(path: Path) -> None:
        content = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def configured(**keys: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = json.loads(path.read_text())
        content["config"] |= {key.replace("_", "."): value for key, value in keys.items()}
        path.write_text(json.dumps(content))

    return change


def without_first_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


MANY = "".join(f"key{number} = 1\n" for number in range(40))
DEEP = f"key = {'[' * 3000}{']' * 3000}"
LONG = "x" * 300

FLAGS = [
    wrong("rnu", "No such command 'rnu'", "Did you mean 'run'?"),
    wrong("run --client 3", "No such option '--client'", "--clients"),
    wrong("run --clients 0", "'--clients' / '-n'", "x>=1"),
    wrong("run --clients three", "'--clients' / '-n'", "'three' is not a valid integer"),
    wrong("run -c", "'-c' requires an argument"),
    wrong("run digits", "unexpected extra argument (digits)"),
    wrong("audit", "give either a run directory or settings with -c"),
    wrong("audit run/ -c num-rounds=1", "give either a run directory or settings with -c"),
    wrong("audit run/ --shadows 2", "'--shadows'", "x>=4"),
    wrong("audit run/ --only nosuch", "unknown audit 'nosuch'", "membership-inference"),
    wrong("predict run/", "Missing argument 'DATA'"),
    wrong("plan --epsilon -1", "'--epsilon'", "x>=0"),
    wrong(f'plan --no-timing --epsilon nan -c "{QUICK}"', "--epsilon must be > 0, got nan"),
    wrong(f"plan --no-timing --epsilon 1 -c \"{QUICK} privacy.server='none'\"", "--epsilon 1 is a budget for noise"),
    wrong(f'plan --no-timing --public-size 0 -c "{QUICK}"', "--public-size must be > 0"),
    wrong(f'plan --no-timing --public-size 9 -c "{QUICK}"', "--public-size 9 has no effect", "dp-sgd"),
    wrong(f'plan --no-timing --png a.png -c "{QUICK}"', "--png a.png: no ε is claimed"),
    wrong("plan -n 1", "clients = 1 is fewer than strategy.min-nodes = 2", "lower strategy.min-nodes"),
    wrong("ledger leakage", "Missing argument 'PATHS"),
    wrong("ledger show run/ledger.jsonl --delta 2", "delta must be above 0 and below 1, got 2"),
    wrong("ledger show run/ledger.jsonl --delta nan", "delta must be above 0 and below 1"),
    wrong("ledger show run/ledger.jsonl --relation add", "relation must be one of add-or-remove, replace-one"),
    wrong("ledger verify run/ledger.jsonl --head abc", "--head 'abc' is not valid", "64 hexadecimal digits"),
    wrong(f"ledger verify run/ledger.jsonl --head {'1' * 64}", "no line has the hash 1111", "lines were cut off"),
    wrong("warm-node --fastest-poll 9 --slowest-poll 1", "--fastest-poll = 9", "--slowest-poll = 1"),
    wrong("warm-node --insecure --node-config data-path", "--node-config: 'data-path' does not begin with key=value"),
    wrong(
        """warm-node --insecure --node-config 'policy "p.toml" data-path="x"'""", "--node-config", '\'policy "p.toml"'
    ),
    wrong("""warm-node --insecure --node-config 'data-pth="x"'""", "unknown key 'data-pth'", "'data-path'"),
    wrong("""warm-node --insecure --node-config 'policy="p.toml"'""", "policy of this node cannot be read"),
    wrong("warm-node --insecure --isolation process", "--isolation = 'process'", "leave it out"),
    wrong("warm-node --nosuch", "cloister warm-node", "--nosuch"),
    wrong("superlink", "Missing option '--operators'"),
]

SETTINGS = [
    run("num-rounds", "'num-rounds' is neither", "key=value"),
    run("num-rounds: 3", "'num-rounds: 3' is neither"),
    run("num-rounds=3 num-rounds=4", "num-rounds is there twice"),
    run("num-rounds=0", "num-rounds = 0 is not valid: it must be greater than 0"),
    run("num-rounds='3'", "num-rounds = '3' is not valid: it must be a valid integer"),
    run("privacy.client='gausian'", "privacy.client = 'gausian' is not valid", "did you mean 'gaussian'?"),
    run("privacy.clipping='adaptiv'", "privacy.clipping = 'adaptiv' is not valid", "did you mean 'adaptive'?"),
    quick("privacy.server='globaldp'", "privacy.server = 'globaldp'", "did you mean 'global-dp'?"),
    quick("privacy.distance='cosin'", "privacy.distance = 'cosin'", "did you mean 'cosine'?"),
    run("task.name='breastcancer'", "task.name = 'breastcancer'", "did you mean 'breast-cancer'?"),
    quick("strategy.name='fed-adam'", "strategy.name = 'fed-adam'", "did you mean 'fedadam'?"),
    run("num_rounds=3", "unknown key 'num_rounds'; did you mean 'num-rounds'?"),
    run("seed=99999999999", "seed = 99999999999 is not valid", "less than 2147483648"),
    run("tensorboard=yes", "tensorboard = yes is not valid", "true or false"),
    run("output-dir=''", "output-dir = '' is not valid: it must have at least 1 character"),
    run("run-name='a/b' task.model='softmax'", "run-name = 'a/b' must be", "letters, digits"),
    run(f"run-name='{LONG}' task.model='softmax'", "run-name = 'xxx", "at most 200"),
    run("task.name=digits", "task.name = digits is not valid", "in quotes"),
    run("task.name='didgits'", "unknown task task.name = 'didgits'", "did you mean 'digits'?"),
    quick("privacy.server='dp-sgd'", "is a mechanism of the clients: use privacy.client = 'dp-sgd' and privacy.server"),
    run("num-round=3 evaluation.patience=-1", "unknown key 'num-round'", "evaluation.patience = -1 is not valid"),
    run("task.model='cnn'", "task.model must be one of mlp, softmax", "'cnn'"),
    quick("task.data-path='mine.npz'", "task.data-path = 'mine.npz' has no effect", "cloister new task"),
    run("task.partition='dirichlet' task.alpha=0", "task.alpha = 0 is not valid"),
    run("task.alpha=0.1", "task.alpha = 0.1 has no effect", "'dirichlet'"),
    quick("task.partition='table'", "task.table is empty", "'10,20;30,0'"),
    quick("task.partition='natural'", "task.partition = 'natural' needs examples with owners"),
    quick("strategy.name='fedavgg'", "strategy.name = 'fedavgg'", "did you mean 'fedavg'?"),
    quick("strategy.learning-rate=0.1", "strategy.learning-rate = 0.1 is not an option of 'fedavg'"),
    run("strategy.fraction-train=10", "strategy.fraction-train = 10 is not valid: it must be less than or equal to 1"),
    quick("strategy.name='krum'", "privacy.placement = 'update'", "privacy.placement = 'model'"),
    quick("client.optimizer='adamm'", "client.optimizer must be 'sgd'", "'adamm'"),
    run("client.learning-rate=-0.1", "client.learning-rate = -0.1 is not valid"),
    quick("privacy.server='global_dp'", "privacy.server = 'global_dp'", "did you mean 'global-dp'?"),
    run("privacy.noise-multiplier=nan", "privacy.noise-multiplier = nan is not valid: it must be a finite number"),
    run("privacy.noise-multiplier=1e400", "privacy.noise-multiplier = inf is not valid"),
    run("privacy.client='dpsgd'", "privacy.client = 'dpsgd' is not valid", "did you mean 'dp-sgd'?"),
    quick("privacy.max-epsilon=1.0", "privacy.max-epsilon = 1 is a budget for a guarantee, and there is none"),
    run("privacy.server='none' privacy.noise-multiplier=2.0", "privacy.noise-multiplier = 2.0 has no effect"),
    run(
        "privacy.server='global-dp' privacy.noise-multiplier='auto'", "privacy.noise-multiplier = 'auto'", "max-epsilon"
    ),
    run("privacy.server='global-dp' privacy.target-delta=1", "privacy.target-delta = 1 is not valid"),
    run(f"privacy.data-identity='{LONG}'", "privacy.data-identity = 'xxx", "{0,200}"),
    run("evaluation.patience=2 evaluation.central=false", "evaluation.patience = 2 needs scores"),
    run(f"log-format='{'x' * 5000}'", "log-format = 'xxx", "it must be 'text' or 'json'"),
    run(f"{'x' * 5000}=1", "unknown key 'xxx", "docs/configuration.md"),
    wrong(f'run -n 2000 -c "{QUICK}"', "2000 clients cannot share 1438 training examples"),
]

FILES_OF_SETTINGS = [
    wrong("run -c nowhere.toml", "there is no file at nowhere.toml"),
    wrong("run -c ~nosuchuser/a.toml", "there is no file at ~nosuchuser/a.toml"),
    wrong(f"run -c {LONG}.toml", "there is no file at xxx"),
    wrong("run -c a.yaml", "'a.yaml' is neither", ".toml", a_yaml="num-rounds: 3"),
    wrong("run -c a.toml", "a.toml cannot be read as TOML", "line 1", a_toml="num-rounds = \n"),
    wrong("run -c a.toml", "a.toml cannot be read as TOML", a_toml=b"\xff\xfe\x00"),
    wrong("run -c a.toml", "a.toml cannot be read as TOML", "nested too deeply", a_toml=DEEP),
    wrong("run -c a.toml", "num-rounds is of type list", a_toml="num-rounds = [1, 2, 3]\n"),
    wrong("run -c a.toml", "unknown key 'key0'", "and 36 more", a_toml=MANY),
    wrong("run -c a.toml", "unknown key 'task'; did you mean 'task.name'?", a_toml="task = 'digits'\n"),
    wrong("run -c a.toml", "[tool.flwr.app.config]", a_toml="[tool.flwr.app.config]\nnum-rounds = 3\n"),
    wrong("policy nowhere.toml", "policy nowhere.toml: No such file"),
    wrong("policy ~nosuchuser/a.toml", "policy ~nosuchuser/a.toml: No such file"),
    wrong("policy .", "policy .: Is a directory"),
    wrong("policy a.toml", "policy a.toml: mechanisms is missing", "policy a.toml: tasks is missing", a_toml=""),
    wrong("policy a.toml", "policy a.toml", "nested too deeply", a_toml=DEEP),
    wrong("policy a.toml", "tasks = 'digits' is not valid", "list", a_toml="mechanisms = []\ntasks = 'digits'\n"),
    wrong("policy a.toml", "must have at least 1 item", a_toml="mechanisms = []\ntasks = []\n"),
    wrong("policy a.toml", "'dp-sdg'; did you mean 'dp-sgd'?", a_toml="mechanisms = ['dp-sdg']\ntasks = ['digits']\n"),
    wrong("policy a.toml", "min-dp-sgd-noise-multiplier", a_toml="mechanisms = ['dp-sgd']\ntasks = ['digits']\n"),
    *(
        wrong("policy a.toml", f"unknown key {key!r}; {how} {near!r}", a_toml=f"{key} = 1\n")
        for how, key, near in (
            ("did you mean", "max-exmple-epsilon", "max-example-epsilon"),
            ("did you mean", "mechanism", "mechanisms"),
            ("did you mean", "learning-rate", "max-learning-rate"),
            ("the nearest valid key is", "steps-max", "max-steps"),
            ("the nearest valid key is", "size", "public-size"),
        )
    ),
    wrong("policy a.toml", "'key0'", "and 36 more", a_toml="mechanisms = []\ntasks = ['digits']\n" + MANY),
    wrong(f'plan --no-timing --policy a.toml -c "{QUICK}"', "policy a.toml is no TOML", a_toml="x"),
    wrong("report run/ --statements nowhere.toml", "nowhere.toml: No such file"),
    wrong("report run/ --statements a.toml", "'units'", "did you mean 'unit'?", a_toml="units = 'a'\n"),
    wrong("report run/ --statements a.toml", "a.toml: unit = 'yyy", "240", a_toml=f"unit = '{'y' * 3000}'\n"),
]

FEDERATION = 'name = "h"\n[server]\naddresses = ["localhost"]\n[[sites]]\nname = "a"\ndata-path = "x"\n'
EXTERNAL = FEDERATION + '[authority]\nkind = "external"\ncertificate = "c.pem"\nca-certificate = "d.pem"\n'


def federation(*says: str, old: str = "", new: str = "", text: str = FEDERATION, options: str = "") -> Wrong:
    return wrong(f"provision a.toml {options}", *says, a_toml=text.replace(old, new) if old else text + new)


KITS = [
    wrong("provision nowhere.toml", "nowhere.toml: No such file"),
    federation("a.toml: name is missing", "a.toml: server is missing", text=""),
    federation("'https://x:1' is neither a host name nor an IP address", old="localhost", new="https://x:1"),
    federation("'0.0.0.0' means every interface", old="localhost", new="0.0.0.0"),
    federation("server.port = 99999 is not valid", old="[server]\n", new="[server]\nport = 99999\n"),
    federation("sites.0.name = 'My Site' is not valid: it must", old='"a"', new='"My Site"'),
    federation("site names must be unique; twice: a", new='[[sites]]\nname = "a"\ndata-path = "x"\n'),
    federation("site 'a' needs data-path, or partition-id", old='data-path = "x"', new=""),
    federation("unknown key 'sites.0.epsilon'", "public-size", new="epsilon = 3\n"),
    federation("did you mean 'addresses'?", old='addresses = ["localhost"]', new="address = 'localhost'"),
    federation("public-key", "k.pub: No such file", new='public-key = "k.pub"\n'),
    federation("authority.certificate", "c.pem: No such file", text=EXTERNAL),
    federation("--remake 'nosuch' is none of server, operator, sites/a", options="--remake nosuch"),
    federation("/proc/kits: No such file", "the kits are not complete", options="--output /proc/kits"),
    wrong("provision a.toml", "kits/issued.json is no record", a_toml=FEDERATION, kits__issued_json="x"),
    wrong(
        "provision a.toml",
        "kits/server/server.key is no private EC key",
        a_toml=FEDERATION,
        kits__server__server_key="x",
    ),
    wrong(
        "provision a.toml", "kits/authority/ca.crt is no certificate", a_toml=FEDERATION, kits__authority__ca_crt="x"
    ),
    wrong("superlink --operators nowhere", "operators nowhere: No such file"),
    wrong("superlink --operators o", "operators o must hold the SHA-256", o="x"),
]

NEW = [
    wrong("new tasks ward", "'tasks' cannot be made; valid: task, strategy, mechanism"),
    wrong("new task Ward", "the name 'Ward' is not valid", "small letters"),
    wrong("new task class", "the name 'class' is not valid"),
    wrong("new task ward --from xls", "--from 'xls' is not valid: it must be csv, npz, images"),
    wrong("new task ward", "ward is there already", "--to", ward__notes="mine"),
    wrong("new task ward --to notes/ward", "notes/ward: Not a directory", notes="mine"),
    wrong("new task ward --to /proc/ward", "/proc/ward: No such file"),
    wrong("new task digits", "the task 'digits' is there already; choose another name"),
    wrong("new strategy krum", "the strategy 'krum' is there already"),
    wrong("new task numpy", "the name 'numpy' is that of an installed package"),
    wrong(f"new task {LONG}", "File name too long"),
]

X = np.linspace(0, 1, 30 * 30, dtype=np.float32).reshape(30, 30)
Y = np.arange(30) % 2
SCORED = npz(x=np.zeros((3, 64), np.float32))
HEADER = ",".join(f"c{number}" for number in range(64))


def site(*says: str, **arrays: object) -> Wrong:
    return wrong("check task breast-cancer --data a.npz", *says, a_npz=npz(**arrays))


def scored(*says: str, **arrays: object) -> Wrong:
    return wrong("predict run/ a.npz", *says, a_npz=npz(**arrays))


DATA = [
    wrong("check task didgits", "unknown task task.name = 'didgits'"),
    wrong("check task breast-cancer --data nowhere.npz", "no file at nowhere.npz", "x (numbers) and y"),
    wrong("check task breast-cancer --data ~nosuchuser/a.npz", "no file at ~nosuchuser/a.npz"),
    wrong("check task breast-cancer --data .", "data-path: no file at ."),
    wrong("check task breast-cancer --data a.npz", "a.npz must be an .npz file", a_npz=b"PK"),
    wrong("check task breast-cancer --data a.csv", "lacks the columns mean radius", "26 more", a_csv="a,b\n1,2\n"),
    site("a.npz must be an .npz file", x=X, z=Y),
    site("inputs of shape (30,), found (5,)", x=X[:, :5], y=Y),
    site("labels 0 (malignant) or 1 (benign)", x=X, y=Y + 1),
    site("labels 0 (malignant) or 1 (benign)", x=X, y=np.array(["M", "B"] * 15)),
    site("y of float64 (30,)", x=X, y=Y.astype(float)),
    site("inputs that are NaN or infinite", x=X * np.nan, y=Y),
    site("x of <U", x=X.astype(str), y=Y),
    site("a.npz holds 30 inputs but 7 targets; each input needs one", x=X, y=Y[:7]),
    site("no examples; at least one is needed", x=X[:0], y=Y[:0]),
    wrong("run -c \"task.name='mnist' task.data-path='nowhere'\"", "task.data-path = 'nowhere': no file at nowhere"),
    wrong("run -c \"task.name='mnist' task.data-path='~no/a'\"", "no file at ~no/a"),
    wrong(
        "run -c \"task.name='mnist' task.data-path='a.npz'\"", "a.npz must be an .npz file with x_train", a_npz=b"PK"
    ),
    wrong("run -c \"task.name='heart-disease' task.data-path='.'\"", "processed.cleveland.data", "UCI"),
    wrong("run -c \"task.name='hospital-charges' task.data-path='.'\"", "IPPS_DRG_CSV.zip"),
    wrong("run -c \"task.name='alzheimer-mri' task.data-path='.'\"", "no images at .", "Mild_Demented"),
    wrong("predict run/ nowhere.csv", "no file or folder at nowhere.csv"),
    wrong(f"predict run/ {LONG}", "xxx", "File name too long"),
    wrong("predict run/ a.csv", "a.csv must have 64 columns", "found 2", a_csv="a,b\n1,2\n"),
    wrong("predict run/ a.csv", "a.csv must be a .csv file with a header; it is in UTF-16", a_csv=b"\xff\xfe\x00\x01"),
    wrong("predict run/ a.csv", "a.csv holds no examples", a_csv=HEADER + "\n"),
    wrong("predict run/ a.csv", "no example can be scored; 0: column c63 is empty", a_csv=f"{HEADER}\n{'0,' * 63}\n"),
    wrong("predict run/ a.xlsx", "a.xlsx is a spreadsheet; save it as a CSV file", a_xlsx=b"PK\x03\x04"),
    scored("a.npz must be an .npz file with an array x", z=X),
    scored("inputs of shape (64,), found (8, 8)", x=np.zeros((3, 8, 8))),
    scored("a.npz must hold labels from 0 to 9", x=np.zeros((3, 64)), y=np.array([1, 2, 99])),
    scored("a.npz must hold as many labels as inputs, found 2 and 3", x=np.zeros((3, 64)), y=np.array([1, 2])),
    scored("a.npz holds no examples", x=np.zeros((0, 64))),
    wrong("predict run/ scans", "scans holds no images", ".png", scans__notes="mine"),
    wrong("predict run/ scans", "scans: no example can be scored; a.png: is damaged", scans__a_png=b"PNG"),
    wrong("predict run/ a.npz --hypothesis 3", "--hypothesis 3: run holds 1", a_npz=SCORED),
    wrong("predict run/ a.npz --out /proc/a.csv", "--out: /proc/a.csv cannot be written", a_npz=SCORED),
    wrong("predict run/ a.npz --out /dev/null", "--out: /dev/null is no file that could be replaced", a_npz=SCORED),
]

RUNS = [
    wrong("report nowhere", "nowhere is no run directory: it has no config.json"),
    wrong("report run/config.json", "run/config.json is no run directory: it is a file"),
    wrong("report run/", "run/config.json cannot be read: it is no JSON", run__config_json="{"),
    wrong("report run/", "run/config.json is not what a run writes", run__config_json=changed(config=None)),
    wrong("report run/", "run/privacy.json: schema 1 was found", run__privacy_json="{}"),
    wrong("report run/", "run/rounds.jsonl is not what a run writes", run__rounds_jsonl="[]\n"),
    wrong("report run/", "run/rounds.jsonl is not what a run writes", run__rounds_jsonl="nonsense\n"),
    wrong("report run/", "run/evaluation.json is not what a run writes", run__evaluation_json="[1]"),
    wrong("report run/", "run/audit.json is not what a run writes", run__audit_json="7"),
    wrong("report run/", "run/report.html: Is a directory", run__report_html__x="mine"),
    wrong("status --runs nowhere", "no run directory in nowhere"),
    wrong(f"status --runs {LONG}", "File name too long"),
    wrong("status --runs run/", "run/config.json is not what a run writes", run__config_json="[]"),
    wrong(
        "status --runs run/",
        "run is no run directory: rounds.jsonl or config.json is not",
        run__config_json='{"config": {}}',
    ),
    wrong(
        "status --runs run/", "run is no run directory: rounds.jsonl or config.json is not", run__rounds_jsonl="[]\n"
    ),
    wrong(
        "status --runs run/",
        "run is no run directory: rounds.jsonl or config.json is not",
        run__rounds_jsonl='{"round":1,"measured":7}\n',
    ),
    wrong("audit nowhere", "nowhere is no run directory: it has no config.json"),
    wrong("audit run/", "this run has not ended", "cloister status", run__privacy_json='{"status": "running"}'),
    wrong("audit run/", "run/privacy.json is not what a run writes: it has no status", run__privacy_json="{}"),
    wrong(
        "audit run/",
        "run/config.json: num-rounds = 'x' is not valid",
        run__config_json=configured(**{"num-rounds": "x"}),
    ),
    wrong("audit run/", "unknown task task.name = 'gone'", run__config_json=configured(task_name="gone")),
    wrong("audit run/", "run/simulation.json is not what a run writes", "clients", run__simulation_json="{}"),
    wrong("audit run/", "run/model.npz holds no model", run__model_npz=cut),
    wrong("audit run/", "run/model.npz: array 'a'", "are the tasks the same?", run__model_npz=npz(a=X)),
    wrong("predict nowhere a.npz", "nowhere is no run directory and no model-dir", a_npz=SCORED),
    wrong("predict run/ a.npz", "run must hold one model.npz", a_npz=SCORED, run__model_npz=None),
    wrong("predict run/ a.npz", "run/model.npz holds no model", a_npz=SCORED, run__model_npz=cut),
    wrong(
        "predict run/ a.npz",
        "run/config.json: seed = 'x' is not valid",
        a_npz=SCORED,
        run__config_json=configured(seed="x"),
    ),
    wrong("ledger verify nowhere", "no ledger at nowhere"),
    wrong(f"ledger verify {LONG}", "File name too long"),
    wrong("ledger verify run/ledger.jsonl", "ledger.jsonl, line 1: not JSON", run__ledger_jsonl=b"\xff\xff\n"),
    wrong("ledger verify run/ledger.jsonl", "ledger.jsonl, line 1: not a line", run__ledger_jsonl="[]\n"),
    wrong("ledger verify a.jsonl", "a.jsonl: there is no whole line to verify", a_jsonl=b""),
    wrong("ledger verify a.jsonl", "a.jsonl: there is no whole line to verify", a_jsonl=b'{"v": 3, "seq": 0'),
    wrong("ledger verify b.jsonl", "b.jsonl: there is no whole line to verify", b_jsonl=b"x"),
    wrong(
        "ledger verify run/ledger.jsonl",
        "ledger.jsonl, line 1: the chain is broken",
        run__ledger_jsonl=without_first_line,
    ),
    wrong("ledger show run/config.json", "run/config.json, line 1: not JSON"),
]

OURS = "privacy.server='global-dp' privacy.noise-multiplier=1.0"
DISKS = [
    quick("output-dir='/proc/runs'", "output-dir = '/proc/runs' cannot be written", "name a folder"),
    quick("output-dir='notes'", "output-dir = 'notes' cannot be written: it is a file", notes="mine"),
    quick("output-dir='notes/runs'", "output-dir = 'notes/runs' cannot be written: it is a file", notes="mine"),
    quick(f"output-dir='{LONG}'", "xxx", "File name too long"),
    quick("output-dir='.' run-name='run'", "run-name = 'run' is taken", "choose another", run__config_json="{}"),
    quick("privacy.ledger-dir='/proc/ledgers'", "/proc/ledgers/digits", "the ledger cannot be written"),
    quick(f"privacy.ledger-dir='notes' {OURS}", "notes/digits", "the ledger cannot be written", notes="mine"),
    quick("privacy.data-identity='d' privacy.ledger-dir='.'", "d.jsonl, line 1: not JSON", d_jsonl="x\n"),
    quick("privacy.data-identity='d' privacy.ledger-dir='.'", "d.jsonl: Is a directory", d_jsonl__x="mine"),
    quick("", "has no room for 4 MB", limit=100_000),
    quick("", "File too large", "make room", limit=500),
    wrong("report run/", "File too large", "make room", limit=500),
    wrong("predict run/ a.npz --out a.csv", "--out: a.csv cannot be written: File too large", a_npz=SCORED, limit=20),
    wrong(
        f'plan --no-timing --png a.png -c "{QUICK} {OURS}"', "--png a.png cannot be written: File too large", limit=500
    ),
    wrong("new task ward", "File too large", limit=20),
]

PLUGIN = """
import numpy as np
from cloister.tasks.base import Dataset, Examples, Recipe, Task
from cloister.tasks.numpy_models import SoftmaxRegression


class Ward(Task):
    recipe = Recipe(1, 8, 0.1)
    classes = 3
    class_names = ("a", "b", "c")
    input_shape = (4,)
    models = ("softmax",)

    def load(self):
        x = np.random.default_rng(0).random((90, 4), np.float32)
        y = np.arange(90) % 3
        return Dataset(Examples(x, y), Examples(x, y))

    def build(self):
        return SoftmaxRegression(features=4, classes=3)
"""


def plugin(*says: str, old: str = "", new: str = "", text: str = PLUGIN, points: str = "") -> Wrong:
    """A task of one's own with a mistake in it."""
    assert not old or text.count(old) == 1
    files = {"MODULE.py": text.replace(old, new) if old else text + new, "POINTS": points or "ward = MODULE:Ward"}
    return Wrong("run -c \"task.name='ward' num-rounds=1\"", says, files)


X_OF_PLUGIN, Y_OF_PLUGIN = "np.random.default_rng(0).random((90, 4), np.float32)", "np.arange(90) % 3"
PLUGINS = [
    plugin(
        "task 'ward' (", "does not load: ModuleNotFoundError of 'nosuchlibrary'", ".py:1", text="import nosuchlibrary\n"
    ),
    plugin("task 'ward' (", "does not load: SyntaxError", text="def (:\n"),
    plugin("does not load: RuntimeError: ..., at", ".py:1", text="raise RuntimeError([1.5] * 400)\n"),
    plugin("does not load: AttributeError", text="other = 1\n"),
    plugin("task 'ward' (nosuchmodule:Ward) does not load", points="ward = nosuchmodule:Ward"),
    plugin("task 'digits' is claimed twice", points="digits = MODULE:Ward"),
    plugin("task 'ward' is no task", "subclass of cloister.tasks.base.Task", text="Ward = print\n"),
    plugin("task 'ward' is no task", text="class Ward: pass\n"),
    plugin("task 'ward' is not complete: write build, load", text=PLUGIN.partition("    def load")[0]),
    plugin("task 'ward' states no classes", "classes = 2", old="    classes = 3\n"),
    plugin("task 'ward' states no input_shape", old="    input_shape = (4,)\n"),
    plugin("task 'ward' states no recipe", "Recipe(", old="    recipe = Recipe(1, 8, 0.1)\n"),
    plugin("task 'ward': models must be a tuple", old='("softmax",)', new="()"),
    plugin("class_names: 2 names; give 3 different names", old='("a", "b", "c")', new='("a", "b")'),
    plugin("input_shape: 4; give a tuple", old="(4,)", new="4"),
    plugin("classes: 1; give the number of classes", old="classes = 3", new="classes = 1"),
    plugin(
        "load() gives an object of type NoneType", "Dataset(train, test)", old="return Dataset", new="return None and "
    ),
    plugin("x and y must be NumPy arrays", "np.asarray", old=X_OF_PLUGIN, new="[[1, 2, 3, 4]] * 90"),
    plugin("90 inputs but 50 targets", old=Y_OF_PLUGIN, new="(np.arange(90) % 3)[:50]"),
    plugin("labels from 1 to 3, where classes is 3", "- 1", old=Y_OF_PLUGIN, new="np.arange(90) % 3 + 1"),
    plugin("targets of shape (90, 3)", ".argmax(axis=1)", old=Y_OF_PLUGIN, new="np.eye(3)[np.arange(90) % 3]"),
    plugin("labels of <U1", "classes_of", old=Y_OF_PLUGIN, new="np.array(list('abc') * 30)"),
    plugin("inputs of shape (5,), where input_shape is (4,)", old="(90, 4)", new="(90, 5)"),
    plugin("NaN or infinity in 90 of 90 inputs", old=X_OF_PLUGIN, new="np.full((90, 4), np.nan)"),
    plugin("/nowhere/data.csv: No such file", old="        y =", new="        open('/nowhere/data.csv')\n        y ="),
    plugin("build(): the model cannot predict", "inputs of shape (4,)", old="features=4", new="features=5"),
    plugin("outputs of shape (64, 4), expected (64, 3)", "3 units", old="classes=3)", new="classes=4)"),
    plugin("build() gives an object of type NoneType", "KerasModel", old="return Softmax", new="_ = Softmax"),
    plugin("metrics(): KeyError: ..., at", new="\n    def metrics(self, y, scores):\n        raise KeyError(scores)\n"),
    plugin("metrics(): no 'loss'", new="\n    def metrics(self, y, scores):\n        return {'accuracy': 1.0}\n"),
    plugin(
        "metrics(): values that are no numbers",
        new="\n    def metrics(self, y, scores):\n        return {'loss': scores}\n",
    ),
]

WITHOUT_PLUGINS = {
    "flags": FLAGS,
    "settings": SETTINGS,
    "files of settings": FILES_OF_SETTINGS,
    "kits": KITS,
    "new": NEW,
    "data": DATA,
    "runs": RUNS,
    "disks": DISKS,
}
TABLE = [*(each for group in WITHOUT_PLUGINS.values() for each in group), *PLUGINS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a run that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    settings = f"{QUICK} {OURS} output-dir='{folder}' run-name='run' seed=1"
    assert CliRunner().invoke(CLOISTER, ["run", "-c", settings]).exit_code == 0
    return folder / "run"


def forget_tasks() -> None:
    """No task of another mistake, whose files had the same names."""
    for cache in (client_data.task_of, client_data.benchmark_of, client_data._parts, client_data._part):
        cache.cache_clear()
    for cache in (trainers._made, trainers._resolved):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    yield
    forget_tasks()


@pytest.fixture
def plugins_are_looked_for():
    """Packages are looked through anew after the test."""
    yield
    forget_plugins()


def forget_plugins() -> None:
    for registry in (TASKS, STRATEGIES, MECHANISMS):
        vars(registry).pop("_table", None)


def lay_out(files: Mapping[str, Content], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        elif callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content)


def installed(files: Mapping[str, Content], module: str) -> dict[str, Content]:
    """The files of a plugin, and what pip would leave of it."""
    text = {name: str(content).replace("MODULE", module) for name, content in files.items()}
    facts = f"{module}-1.0.dist-info"
    return {
        f"{module}.py": text["MODULE.py"],
        f"{facts}/METADATA": f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n",
        f"{facts}/entry_points.txt": f"[cloister.tasks]\n{text['POINTS']}\n",
    }


def contents(folder: Path) -> dict[Path, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {path: path.read_bytes() for path in files}


class full_disk:
    """The block, in which no file of this process grows past a limit.

    No bytecode is written in it: that of a module would be cut off, and the module never be imported again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.writes_no_bytecode = sys.dont_write_bytecode
        if self.limit:
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        signal.signal(signal.SIGXFSZ, self.handler)
        sys.dont_write_bytecode = self.writes_no_bytecode


@pytest.fixture
def new_folder(tmp_path, monkeypatch):
    """Makes a new working directory, and forgets the last one."""

    def make():
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "here"
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
        forget_tasks()
        return folder

    return make


@pytest.mark.parametrize("group", WITHOUT_PLUGINS)
def test_a_mistake_is_told_in_a_few_lines_that_name_it(group, finished, new_folder):
    def check(mistake):
        folder = new_folder()
        if re.search(r" run/", mistake.command):
            shutil.copytree(finished, folder / "run")
        assert_told(mistake, mistake.files, folder)

    assert failures(WITHOUT_PLUGINS[group], check) == []


def test_so_is_one_in_a_package_of_ones_own(new_folder, monkeypatch, plugins_are_looked_for):
    def check(mistake):
        folder = new_folder()
        forget_plugins()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            assert_told(mistake, installed(mistake.files, f"ward_{PLUGINS.index(mistake)}"), folder)

    assert failures(PLUGINS, check) == []


def assert_told(mistake: Wrong, files: Mapping[str, Content], folder: Path) -> None:
    """Check that a command says what is wrong with these files, and leaves everything as it was."""
    lay_out(files, folder)
    importlib.invalidate_caches()
    before = contents(folder.parent)
    with full_disk(mistake.limit):
        result = CliRunner().invoke(CLOISTER, shlex.split(mistake.command), env={"COLUMNS": "200"})
    said = result.output
    assert result.exit_code != 0, said
    lines = [line for line in said.splitlines() if line.strip()]
    assert 1 <= len(lines) <= LINES and len(said) <= CHARACTERS, said
    words = " ".join(said.split())
    assert all(expected in words for expected in mistake.says), said
    assert "traceback" not in said.lower() and not ARRAY.search(said), said
    assert contents(folder.parent) == before, "something was left, or changed"


def test_there_are_enough_of_them():
    different = {(each.command, str(dict(each.files)), each.limit) for each in TABLE}
    assert len(different) == len(TABLE) >= 200


def test_every_file_of_the_table_can_be_there_without_its_mistake(finished):
    """The table spoils files that a run writes: a renamed file would be spoilt in vain."""
    spoilt = {Path(name).name for each in RUNS for name in each.files if name.startswith("run/")}
    assert spoilt - {path.name for path in finished.iterdir()} <= {"audit.json", "x"}
