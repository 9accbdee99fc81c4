"""`cloister plan`: what it prints, what it refuses, and that it leaves nothing behind."""

import json
import re
import shlex
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from planned import DP_SGD, TINY, planned
from rich.console import Console
from support import failures
from typer.main import get_command
from typer.testing import CliRunner

from cloister import cli
from cloister.client.app import app
from cloister.config.io import as_pairs
from cloister.config.run import parse
from cloister.estimate.preview import Options, preview
from cloister.estimate.quantities import Series, configurations, shown_rounds
from cloister.estimate.render import _curves
from cloister.server.reports.console import ConsoleReporter
from cloister.server.run import run
from cloister.simulation.grid import LocalGrid
from cloister.simulation.simulate import simulate
from cloister.utils.errors import ConfigError, FederationError

TINILY = "task.model='softmax' num-rounds=2 seed=1 tensorboard=false client.local-epochs=1"
GLOBALLY = f"{TINILY} privacy.server='global-dp' privacy.noise-multiplier=2.0"
DP_SGDLY = f"{TINILY} privacy.server='none' privacy.client='dp-sgd'"
GAUSSIANLY = f"{TINILY} privacy.server='none' privacy.client='gaussian' privacy.gaussian-noise-multiplier=2.0"
POLICY = """
mechanisms = ["gaussian"]
tasks = ["digits"]
min-gaussian-noise-multiplier = 1.0
max-epsilon = 4.0
allowed-fabs = ["{digest}"]
""".format(digest="a" * 64)


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def printed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def tree(folder):
    """Every file below a folder, with its bytes and its time."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_it_says_what_a_run_would_cost():
    told = printed("-c", GLOBALLY, "--epsilon", 3)
    for part in (
        "noise multiplier 2, standard deviation 1 on a weight of the model",
        "privacy: global-dp, sound, reasonable\n",
        "global-dp: ε at δ = 1e-05 for one client, add-or-remove",
        "round     2  2.9",
        "leaves without noise: which nodes are connected",
        "within ε = 3",
        "num-rounds=2 with the noise that is set",
        "2.6 kB down and 2.6 kB up a message, 4 clients a round: 41.6 kB in all",
        "a client took",
    ):
        assert part in told, part
    assert "\x1b" not in told and "nothing was sent, spent or written" in told


def test_noise_without_limits_says_so():
    settings = f"{TINILY} privacy.server='metric' privacy.min-distance=0.0"
    assert "standard deviation of any size on a weight" in printed("-c", settings, "--no-timing")


@pytest.mark.slow
def test_sizes_that_are_stated_count_no_clients_and_one_round_is_one():
    told = printed("-c", DP_SGDLY, "-c", "num-rounds=1", "--no-timing", "--public-size", 200)
    assert "  a client with 200 examples: " in told and "1 client " not in told
    assert "that trained in 1 round:" in told


def test_bars_begin_in_one_column():
    series = Series("dp-sgd", "a client", "add-or-remove", "whoever", 1e-5, ((1, 324400.0), (2, 2720000.0), (3, 1.0)))
    _, *curve, _ = _curves(SimpleNamespace(series=[series], config=parse({})))
    assert [line.count("█") for line in curve] == [5, 40, 0] and curve[2].endswith("1")
    assert len({line.index("█") for line in curve[:2]}) == 1


@pytest.mark.parametrize("policy", [None, "policy.toml"])
@pytest.mark.parametrize("settings", [GLOBALLY + " privacy.max-epsilon=9.0", GAUSSIANLY])
def test_it_leaves_nothing_behind(tmp_path, monkeypatch, settings, policy):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy.toml").write_text(POLICY)
    before = tree(tmp_path)
    printed("-c", settings, *(["--policy", policy] if policy else []), "--epsilon", 4)
    assert tree(tmp_path) == before and {path.name for path in tmp_path.iterdir()} == {"policy.toml"}


def test_a_ledger_that_is_there_is_read_and_not_touched(tmp_path):
    settings = TINY | {
        "privacy.server": "global-dp",
        "privacy.noise-multiplier": 2.0,
        "privacy.data-identity": "ward-7",
    }
    simulate(settings)
    before = tree(tmp_path)
    told = planned(settings)
    assert tree(tmp_path) == before and any("ledgers" in path.parts for path in before)
    run, everything = told["privacy"]["claims"]
    assert run["epsilon"] < everything["epsilon"], "the ledger was not read"


def test_the_readme_shows_what_is_printed():
    (command,) = re.findall(r"^cloister plan (.*)$", README, re.MULTILINE)
    shown = re.search(r"^cloister plan .*\n```\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    assert f"cloister plan {command}\n" in (ROOT / "docs" / "plan.md").read_text()
    options = [str(ROOT / part) if part.endswith(".toml") else part for part in shlex.split(command)]
    lines = printed(*options, "--no-timing").splitlines()
    for line in shown.splitlines():
        assert line in lines or line.strip() in ("", "…"), line


def test_the_page_explains_every_option():
    page = (ROOT / "docs" / "plan.md").read_text()
    options = {option for parameter in get_command(cli.app).commands["plan"].params for option in parameter.opts}
    assert {"--epsilon", "--policy", "--png"} < options
    for option in options - {"-c", "-n", "--run-config", "--timing", "--help"}:
        assert f"| `{option}" in page, option


def test_json_for_machines():
    told = json.loads(printed("-c", GLOBALLY, "--json"))
    estimate = told["estimate"]
    assert set(told) == {
        *("note", "clients", "rounds", "stops", "refusal", "closing-refusal", "noise", "privacy", "by-round"),
        *("by-size", "budgets", "within", "estimate", "warnings", "closes-budgets"),
    }
    assert (estimate["down"], estimate["up"], estimate["cohort"], estimate["total-bytes"]) == (2600, 2600, 4, 41600)
    assert estimate["one-by-one-seconds"] >= estimate["side-by-side-seconds"] >= estimate["first-seconds"] > 0
    assert "first-seconds" not in json.loads(printed("-c", GLOBALLY, "--json", "--no-timing"))["estimate"]


def test_a_budget_that_not_one_round_fits_is_one_error_with_the_remedy():
    def check(settings, arguments, says):
        result = invoke("-c", settings, *arguments, "--no-timing", "--json")
        assert result.exit_code == 1 and "num-rounds=0" not in result.output
        assert json.loads(result.stdout)["clients"] == 4, "the plan itself is still printed"
        (line,) = result.stderr.splitlines()
        assert line.startswith("ConfigError: not one round fits the budget: ") and says in line
        if "set privacy" in says:
            noise, budget = re.search(r"multiplier=(\S+), or a budget of ε = (\S+), for all rounds", line).groups()
            more = settings.replace("multiplier=2.0", f"multiplier={noise}")
            assert invoke("-c", more, *arguments, "--no-timing").exit_code == 0
            assert invoke("-c", settings.replace("=0.5", f"={budget}"), "--no-timing").exit_code == 0
        assert not invoke("-c", settings, *arguments, "--no-timing").stdout, "a table of what cannot be"

    cases = [
        (
            GLOBALLY + " privacy.max-epsilon=0.5",
            (),
            "the server's of 0.5 for one client: set privacy.noise-multiplier=",
        ),
        (GLOBALLY, ("--epsilon", 0.5), "the server's of 0.5 for one client: set privacy.noise-multiplier="),
        (
            GAUSSIANLY,
            ("--epsilon", 0.5),
            "each client's of 0.5 for one client: set privacy.gaussian-noise-multiplier=",
        ),
        (
            f"{GAUSSIANLY} privacy.client-max-epsilon=0.5",
            (),
            "each client's of 0.5 for one client: set privacy.gaussian-noise-multiplier=",
        ),
    ]
    assert failures(cases, check) == []


@pytest.mark.slow
def test_clients_of_several_sizes_get_one_answer():
    settings, options = f"{DP_SGDLY} client.batch-size=64", ("--no-timing", "--epsilon")
    (line,) = invoke("-c", settings, *options, 1).stderr.splitlines()
    (noise,) = re.findall(r"set privacy.dp-sgd-noise-multiplier=(\S+), or a budget", line)
    assert "every client's of 1 for one example: " in line and "more strictly than the ε that a run claims" in line
    told = printed("-c", f"{settings} privacy.dp-sgd-noise-multiplier={noise}", *options, 1)
    assert told.count("a client's with ") > 1
    assert f"  every client's: privacy.dp-sgd-noise-multiplier={noise} for all rounds" in told


def test_a_run_that_closes_budgets_says_so_before():
    private = TINY | {"privacy.server": "none", "privacy.data-identity": "ward"}
    assert planned(private)["closes-budgets"] and not planned(TINY | {"privacy.server": "none"})["closes-budgets"]
    assert "budget     this run leaves releases without" in printed("-c", as_pairs(private), "--no-timing")
    guarded = private | {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0}
    assert not planned(guarded)["closes-budgets"]


def test_models_side_by_side_are_sent_all_and_come_back_one_by_one():
    settings = TINY | {"privacy.server": "laplace-clustering", "privacy.clusters": 3, "privacy.client": "gaussian"}
    estimate = planned(settings, clients=10)["estimate"]
    assert estimate["down"] == 3 * estimate["up"] == 3 * 2600
    few = {"strategy.fraction-train": 0.3, "evaluation.held-out-clients": 0.5}
    assert planned(TINY | few, clients=10)["estimate"]["cohort"] == 2


def test_a_picture(tmp_path):
    printed("-c", GLOBALLY, "--no-timing", "--png", "plan.png")
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG") and struct.unpack(">II", content[16:24])[0] >= 600


def test_curves_fit_on_a_screen():
    for rounds, expected in ((1, [1]), (3, [1, 2, 3]), (1000, [1, 112, 1000])):
        shown = shown_rounds(rounds)
        assert set(expected) <= set(shown) and len(shown) <= 10 and shown == sorted(shown)


class TestPolicy:
    def test_what_it_leaves_of_its_budgets(self, tmp_path):
        (tmp_path / "policy.toml").write_text(POLICY)
        told = planned(TINY | gaussian(2.0) | {"num-rounds": 9}, policy=tmp_path / "policy.toml")
        assert not told["refusal"]
        (budget,) = (found for found in told["budgets"] if found["unit"] == "client")
        assert (budget["limit"], budget["rounds"], budget["more"]) == (4.0, 3, 0) and 0.5 < budget["after"] <= 1

    def test_a_node_that_believes_the_server_is_counted_as_it_counts(self, tmp_path):
        path = tmp_path / "policy.toml"
        path.write_text('mechanisms = ["global-dp"]\ntasks = ["digits"]\nmax-epsilon = 4.0\n')
        settings = TINY | {"privacy.server": "global-dp", "privacy.noise-multiplier": 2.0, "num-rounds": 6}
        (budget,) = (found for found in planned(settings, policy=path)["budgets"] if "each" in found["whose"])
        config = parse(settings | {"output-dir": str(tmp_path)})
        simulated = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
        nodes = [*simulated[:2], simulated[2] | {"policy": str(path), "ledger-dir": str(tmp_path / "ledgers")}]
        rounds = run(LocalGrid(app, config.flat(), nodes), config, ConsoleReporter(6, Console(quiet=True))).rounds[1:]
        assert budget["rounds"] == sum(done.measured.accepted == 3 for done in rounds) == 3

    def test_what_it_refuses(self, tmp_path):
        (tmp_path / "policy.toml").write_text(POLICY)
        little = GAUSSIANLY.replace("=2.0", "=0.5")
        told = printed("-c", little, "--policy", "policy.toml", "--no-timing")
        assert "would refuse: refused by the policy" in told
        assert "privacy.gaussian-noise-multiplier = 0.5, demanded: at least 1" in told and "budgets" not in told

    def test_its_size_of_the_data_counts_for_dp_sgd(self, tmp_path):
        path = tmp_path / "policy.toml"
        path.write_text('mechanisms = ["dp-sgd"]\ntasks = ["digits"]\npublic-size = 64\nmax-example-epsilon = 9.0\n')
        config = parse(TINY | DP_SGD)
        assert [node["public-size"] for node in configurations(config, 4, (), path)] == [64]
        assert [node["public-size"] for node in configurations(config, 4, (32, 64), None)] == [32, 64]
        with pytest.raises(ConfigError, match="--public-size 32 has no effect: the policy states public-size = 64"):
            configurations(config, 4, (32,), path)

    @pytest.mark.slow
    def test_the_claim_is_for_its_size_of_the_data(self, tmp_path):
        path = tmp_path / "policy.toml"
        path.write_text('mechanisms = ["dp-sgd"]\ntasks = ["digits"]\npublic-size = 20\nmax-example-epsilon = 9.0\n')
        told = planned(TINY | DP_SGD | {"num-rounds": 1}, policy=path)["privacy"]["clients"]
        assert [size["examples"] for size in told["by-examples"]] == [20] and told["sizes-are-known"]

    @pytest.mark.slow
    def test_sites_of_a_stated_size_need_no_data(self):
        told = planned(TINY | DP_SGD | {"num-rounds": 1}, sizes=(32, 64))["by-size"]
        assert told["clients-of-size"] == {"32": 1, "64": 1}
        assert [size["examples"] for size in told["by-examples"]] == [32, 64]

    @pytest.mark.slow
    def test_sizes_that_a_seed_deals_out_name_it(self):
        unseeded = DP_SGDLY.replace("seed=1", "num-rounds=1").replace("num-rounds=2", "")
        (seed,) = re.findall(r"a seed that was drawn: seed=(\d+) deals", printed("-c", unseeded, "--no-timing"))
        assert int(seed) > 0
        assert "a seed that was drawn" not in printed("-c", unseeded, "--no-timing", "--public-size", 64)


def gaussian(z):
    return {"privacy.server": "none", "privacy.client": "gaussian", "privacy.gaussian-noise-multiplier": z}


ERRORS = [
    (["-c", "num-round=3"], "ConfigError: unknown key 'num-round'; did you mean 'num-rounds'"),
    (["-c", "stray"], "SettingsError: -c (--run-config): "),
    (["-c", TINILY, "-n", 1], "ConfigError: clients = 1 is fewer than strategy.min-nodes = 2"),
    (
        ["-c", f"{GLOBALLY} privacy.population=9"],
        "privacy.population = 9 registers the nodes of a run, and there are",
    ),
    (["-c", f"{TINILY} privacy.server='none'", "--epsilon", 1], "ConfigError: --epsilon 1 is a budget for noise"),
    (["-c", TINILY, "--epsilon", 1], "ConfigError: privacy.max-epsilon = 1 is a budget for a guarantee"),
    (
        ["-c", GLOBALLY, "--public-size", 5],
        "--public-size 5 has no effect with privacy.client = 'none'",
    ),
    (["-c", DP_SGDLY, "--public-size", 0], "ConfigError: --public-size must be > 0"),
    (["-c", GLOBALLY, "--policy", "gone.toml"], "policy gone.toml: No such file"),
    (["-c", GLOBALLY, "--png", "no/folder.png"], "ConfigError: --png no/folder.png cannot be written"),
    (["-c", f"{TINILY} privacy.server='none'", "--png", "a.png"], "ConfigError: --png a.png: no ε is claimed"),
    (["-c", f"{GLOBALLY} client.optimizer='best'"], "client.optimizer"),
]


def test_an_error_is_one_line_that_names_the_key(tmp_path):
    def check(arguments, says):
        result = invoke(*arguments)
        assert result.exit_code in (1, 2)
        (line,) = result.output.splitlines()
        assert says in line and len(line) < 600
        assert not list(tmp_path.iterdir())

    assert failures(ERRORS, check) == []


def test_a_client_that_cannot_be_timed_says_why(monkeypatch):
    def broken(self, data, plan):
        raise ValueError("values of arrays")

    monkeypatch.setattr("cloister.training.trainers.NumpyTrainer.fit", broken)
    with pytest.raises(FederationError, match="the client that was to be timed failed: ValueError"):
        preview(TINY | {"privacy.server": "none"}, Options())
