"""Status of a federation: nodes and runs of the SuperLink, and the rounds of a run directory."""

import fcntl
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from cloister.privacy.claims.claim import Claim, Figure
from cloister.privacy.claims.premises import listed
from cloister.privacy.claims.render import tier, weakest
from cloister.privacy.claims.server import RUN
from cloister.privacy.claims.to_json import statement_of
from cloister.server.reports.rundir import BEGUN, HIDES_TIMES, RUNNING
from cloister.server.round import published
from cloister.utils.errors import ConfigError, FederationError
from cloister.utils.files import DAY, Json, JsonTable, complete_lines, read_json
from cloister.utils.text import at_least, at_most, clean

STOPPED_AFTER = 60
"""Timeout in seconds of Flower's command line."""
State = Literal["running", "ended", "dead"]
Budgets = Mapping[tuple[str, str], float]
"""Share of the budget that is spent, by ledger and unit."""


@dataclass(frozen=True)
class RunState:
    """State of a run, read from the files it has written so far.

    Attributes:
        path: of its directory.
        task, strategy: of its configuration.
        privacy: the mechanism on the server, and the mechanism on the clients if there is one.
        round, rounds: number of the last finished round, and of all planned rounds.
        written: time of the last write in seconds since 1970, truncated to the day if times are hidden.
        replies: numbers of counted and requested replies in the last round; None before the first round or if cohorts
            are secret.
        rejected: reasons of the last round, a line each.
        codes: number of rejected replies in the last round, by code.
        seconds: duration of the last round; None if times are hidden.
        timeout: seconds for which a round waits for replies.
        quorum: nodes that must be connected for a round to begin.
        epsilon: of everything in the ledger so far; None without a claim.
        claimed: the largest ε that an ended run claims for itself, for its server's mechanism, otherwise its clients'.
            A run that ended early by choice claims more than it released. None without a claim.
        claimed_for: the word for the unit of `claimed`; empty without one.
        budget_left: of `privacy.max-epsilon`; None without a budget or without a claim.
        ended: whether the run has recorded its end.
        state: `ended`; `running`: a process of this machine executes the run; `dead`: no process executes it, and it
            recorded no end.
        how: kind of its end in `privacy.json`; empty before the end.
        why: reason for a person; empty after all rounds.
        premises: of the claim, by name, with the resulting status; empty without a claim.
    """

    path: str
    task: str
    strategy: str
    privacy: str
    round: int
    rounds: int
    written: float
    replies: tuple[int, int] | None
    rejected: tuple[str, ...]
    codes: Mapping[str, int]
    seconds: float | None
    timeout: float
    quorum: int
    epsilon: float | None
    claimed: float | None
    claimed_for: str
    budget_left: float | None
    ended: bool
    state: State
    how: str
    why: str
    premises: str = ""

    @property
    def hides_times(self) -> bool:
        """Return whether `written` is truncated to the day, to hide draws."""
        return not self.written % DAY

    @property
    def hides_progress(self) -> bool:
        """Return whether the run is under way and its progress would reveal draws."""
        return self.hides_times and self.state == "running"

    @property
    def worth(self) -> str:
        """Return `weak` if that is the tier of the shown ε; otherwise empty."""
        shown = self.epsilon if self.claimed is None and self.state == "running" else self.claimed
        return "weak" if shown is not None and tier(shown) == "weak" else ""

    def without_ledger(self) -> "RunState":
        """Return the state without values of the ledger.

        They may reveal the progress of hidden runs.
        """
        return replace(self, epsilon=None, budget_left=None)

    @property
    def seconds_left(self) -> float | None:
        """Return the estimated remaining seconds; None if they are unknown."""
        if self.state != "running" or self.seconds is None:
            return None
        return self.seconds * (self.rounds - self.round)


def newest_run(output: Path) -> Path:
    """Return the newest run directory in `output-dir`, or `output` if it is one.

    Raises:
        ConfigError: `output` contains none.
    """
    if found := run_directories(output):
        return found[0]
    raise ConfigError(f"no run directory in {output}")


def run_directories(output: Path) -> list[Path]:
    """Return the run directories in `output-dir`, newest first.

    If `output-dir` is one itself, it returns only that.
    """
    if (output / "config.json").is_file():
        return [output]
    found: list[tuple[float, Path]] = []
    for path in output.glob("*/config.json"):
        with suppress(FileNotFoundError):  # a run that fails at its start removes its directory
            found.append((_begun(path), path.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _begun(path: Path) -> float:
    """Return when a run was last configured; an earlier version truncated the file's time to the day."""
    changed = path.stat().st_mtime
    if changed % DAY:
        return changed
    try:
        return float(json.loads(path.read_text())[BEGUN])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return changed


def run_state(directory: Path) -> RunState:
    """Return the state of the run in a directory, which may be under way.

    Raises:
        ConfigError: the directory contains no run, or a file is damaged.
    """
    try:
        facts, written = read_json(directory / "config.json"), directory / "rounds.jsonl"
        config = facts["config"]
        lines = complete_lines(written)
        last = json.loads(lines[-1]) if lines else {}
        if not isinstance(last, dict):
            raise ValueError(f"a line of {written.name} must be a table, found {type(last).__name__}")
        changed = (written if last else directory / "config.json").stat().st_mtime
        measured = last.get("measured") or {}
        said = _last_words(directory)
        ending, (claim, claimed) = _ending(said), _claimed(said)
        epsilon, budget = _number(measured.get("epsilon")), float(config["privacy.max-epsilon"])
        rejected = [{name: str(value) for name, value in item.items()} for item in measured.get("rejected", ())]
        # Convert all numbers: the directory may contain arbitrary values, and `watch` computes with them.
        return RunState(
            path=str(directory.resolve()),
            task=config["task.name"],
            strategy=config["strategy.name"],
            privacy=_mechanisms(config),
            round=int(last["round"]) if last else 0,
            rounds=int(config["num-rounds"]),
            written=published(changed, bool(facts.get(HIDES_TIMES))),
            replies=(int(measured["accepted"]), int(measured["asked"])) if "accepted" in measured else None,
            rejected=tuple(
                f"{item.get('site') or 'node ' + item['node_id']}, {item['code']}: {item['detail']}"
                for item in rejected
            ),
            codes=dict(Counter(item["code"] for item in rejected)),
            seconds=_number(last.get("seconds", {}).get("total")),
            timeout=float(config["round-timeout"]),
            quorum=int(config["strategy.min-nodes" if config["strategy.quorum"] == "auto" else "strategy.quorum"]),
            epsilon=epsilon,
            claimed=None if claimed is None else claimed.epsilon,
            claimed_for="" if claim is None or claimed is None else claim.word_for(claimed.unit),
            budget_left=max(0.0, budget - epsilon) if budget and epsilon is not None else None,
            ended=ending is not None,
            state="ended" if ending is not None else "running" if _is_held(directory) else "dead",
            how=(ending or {}).get("how", ""),
            why=(ending or {}).get("why", ""),
            premises="" if claim is None else f"{claim.status}: {listed(claim.premises)}",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ConfigError(
            f"{directory} is no run directory: rounds.jsonl or config.json is not what a run writes"
        ) from None


def hides_progress(directory: Path) -> bool:
    """Return whether a run is under way whose progress must stay hidden.

    A run under way whose `config.json` cannot be read counts as one. An earlier version marked such a run by a time of
    the file that is a whole day.

    Args:
        directory: of the run.
    """
    try:
        path = directory / "config.json"
        is_marked = not path.stat().st_mtime % DAY
        return _is_held(directory) and bool(json.loads(path.read_text()).get(HIDES_TIMES, is_marked))
    except FileNotFoundError:
        return False  # the directory was removed in the meantime
    except (OSError, ValueError, AttributeError):
        return True


def _mechanisms(config: Mapping[str, object]) -> str:
    """Return the mechanisms in words, with secure aggregation; configurations of older runs lack its key."""
    server, clients = config["privacy.server"], config["privacy.client"]
    on_server = f"{server} (secure aggregation)" if config.get("secure-aggregation.enabled") else str(server)
    if clients == "none":
        return on_server
    return f"{clients} on clients" if on_server == "none" else f"{on_server}, {clients} on clients"


def _last_words(directory: Path) -> JsonTable:
    """Return the final privacy statement of a run.

    It is empty before the end or if the file is damaged.
    """
    try:
        facts = json.loads((directory / "privacy.json").read_text())
        return {} if facts["status"] == "running" else dict(facts)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _ending(said: Json) -> dict[str, str] | None:
    """Return the recorded end of the run; None before it."""
    try:
        return {name: str(value) for name, value in said.get("ended", {}).items()} if said else None
    except AttributeError:
        return None


def _claimed(said: Json) -> tuple[Claim, Figure] | tuple[None, None]:
    """Return the displayed claim, of the server or else of the clients, and its weakest figure for the run itself."""
    try:
        statement = statement_of(said)
    except ValueError:
        return None, None
    of_run = next((figure for figure in statement.claim.figures if figure.scope == RUN), None)
    if of_run is not None:
        return statement.claim, of_run
    clients = statement.clients
    of_clients = weakest(clients) if clients is not None else None
    return (None, None) if clients is None or of_clients is None else (clients, of_clients)


def _is_held(directory: Path) -> bool:
    """Return whether a living process holds the lock of a run."""
    try:
        with (directory / RUNNING).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


def superlink_runs(connection: str) -> list[JsonTable]:
    """Return the runs of a SuperLink, from `flwr list`.

    Args:
        connection: a name in Flower's `config.toml`.

    Raises:
        FederationError: the SuperLink gives no answer.
    """
    command = ("list", connection)
    # If this command's environment is not activated, use the `flwr` beside its interpreter.
    flwr = shutil.which("flwr") or str(Path(sys.executable).with_name("flwr"))
    try:
        done = subprocess.run(
            [flwr, *command, "--format", "json"], capture_output=True, text=True, timeout=STOPPED_AFTER, check=False
        )
        answer = json.loads(done.stdout[done.stdout.index("{") :])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise FederationError(f"flwr {' '.join(command)} gave no answer: {type(error).__name__}") from None
    if not answer.get("success"):
        raise FederationError(f"flwr {' '.join(command)}: {' '.join(answer.get('error-message', 'it failed').split())}")
    return list(answer["runs"])


def told(run: RunState | None, superlink: Json | None, budgets: Budgets | None = None) -> list[str]:
    """Return the status as lines of text.

    Args:
        run: None: no run was requested.
        superlink: its `warnings`, `nodes`, `roster` and `runs`, in this order; None: no SuperLink was requested.
        budgets: in force; None: none were requested.
    """
    lines = [f"warning: {line}" for line in (superlink or {}).get("warnings", [])]
    for node in (superlink or {}).get("nodes", []):
        since = f"since {node['since']}" if node["since"] else ""
        lines.append("  ".join(filter(None, (node["name"] or f"node {node['node-id']}", node["status"], since))))
    lines += [
        f"on the roster: {item['name']}  {item['fingerprint']}  made by {item['made-by']}"
        for item in (superlink or {}).get("roster", [])
    ]
    lines += [f"run {item['run-id']}  {item['status']}" for item in (superlink or {}).get("runs", [])]
    if run is not None:
        mechanisms = f"{run.task}, {run.strategy}, {run.privacy}"
        lines.append(f"{run.path}  {mechanisms}  round {run.round}/{run.rounds}  {format_state(run)}")
        if run.why:
            lines.append(f"  {run.why}")
        if run.replies:
            lines.append(f"  replies {run.replies[0]}/{run.replies[1]}")
        lines += [f"  rejected: {reason}" for reason in run.rejected]
        left = "" if run.budget_left is None else f", {at_least(run.budget_left, 3)} left of the budget"
        left += f"; {run.worth}" if run.worth else ""
        if run.claimed is not None:
            lines.append(f"  ε {at_most(run.claimed, 3)} claimed, for one {run.claimed_for}{left}")
            lines.append(f"  {run.premises}")
        elif run.epsilon is not None:
            lines.append(f"  ε {at_most(run.epsilon, 3)}{left}")
    for (path, unit), share in (budgets or {}).items():
        lines.append(f"budget for each {unit}: {at_most(100 * share, 3)} % is spent in {path}")
    return [clean(line) for line in lines]


def format_state(run: RunState) -> str:
    """Return a run's state and the time of its last write, if public."""
    if run.state == "ended":
        return f"ended: {run.how}" if run.how else "ended"
    if run.hides_times:
        written = f"last written on {time.strftime('%Y-%m-%d', time.gmtime(run.written))}"
    else:
        written = f"last written {time.time() - run.written:.0f} s ago"
    if run.state == "running":
        return written
    return f"dead: no process on this machine runs it, and it did not end in order; {written}"


def as_json(run: RunState | None, superlink: Json | None, budgets: Budgets | None = None) -> str:
    """Return the status as JSON.

    Args: as `told`.
    """
    spent = [{"ledger": path, "unit": unit, "spent": share} for (path, unit), share in (budgets or {}).items()]
    return json.dumps({"run": asdict(run) if run else None, "budgets": spent, **(superlink or {})})
