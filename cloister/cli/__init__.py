"""The `cloister` command."""

import json as jsonlib
import os
import sys
import time
from contextlib import nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

import cloister
from cloister.cli.operate import (
    FAILED,
    dashboard,
    ledger,
    provision_kits,
    site,
    status,
    superexec,
    superlink,
    warm_node,
    watch,
)
from cloister.config.io import read_settings
from cloister.utils.crash import FULL, INTERRUPTED, Crash, for_owner, one_line
from cloister.utils.errors import BudgetExhausted, ConfigError, SettingsError
from cloister.utils.text import clean, counted

MISUSED, BUDGET_SPENT = 2, 3
"""Exit codes, beside `FAILED`; 0: what was asked for was done."""
WIDTH = 110
"""Of what is printed, in characters."""
EXIT_CODES = {"as-asked": 0, "budget": BUDGET_SPENT, "site-budgets": BUDGET_SPENT, "operator": INTERRUPTED}
"""By how a run ended; any other end is `FAILED`."""
_OF_THE_COMMAND_LINE = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)
"""Exceptions that say how a command ends, and not that it failed unexpectedly."""


class Commands(TyperGroup):
    """Commands whose exceptions are one line each, and an exit code."""

    def invoke(self, context: click.Context) -> object:
        """Call the command that was asked for."""
        try:
            with one_line(unchanged=_OF_THE_COMMAND_LINE):
                try:
                    return super().invoke(context)
                finally:
                    # Here a full disk is told in one line; when the process ends it is not. There is no stdout if
                    # the parent process has closed it.
                    if sys.stdout is not None:
                        sys.stdout.flush()
        except click.NoSuchOption as error:
            text, name = error.message, error.option_name.lstrip("-").replace("_", "-")
            if error.ctx is not None and any("-c" in parameter.opts for parameter in error.ctx.command.params):
                from cloister.config.run import known_keys

                meant = [key for key in known_keys() if f"-{key.replace('.', '-')}".endswith(f"-{name}")]
                if nearest := min(meant, key=lambda key: (key.count("."), len(key)), default=""):
                    text += f" Settings of a run are given by -c, such as -c {nearest}=VALUE."
            raise click.NoSuchOption(error.option_name, text, error.possibilities, error.ctx) from None
        except Crash as crash:
            text = "\n".join(map(clean, str(crash).splitlines()))
            typer.secho(text, fg=typer.colors.RED, err=True)
            if isinstance(crash.cause, OSError) and crash.cause.errno in FULL:
                with suppress(OSError):  # Python would write buffered output at the end of the process, and fail again
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = BUDGET_SPENT if isinstance(crash.cause, BudgetExhausted) else FAILED
            raise typer.Exit(MISUSED if isinstance(crash.cause, SettingsError) else code) from None
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    help="Private federated learning on Flower.",
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=False,  # click does it too
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"cloister {cloister.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Private federated learning on Flower."""


Settings = Annotated[
    list[str] | None,
    typer.Option("--run-config", "-c", help="key=value pairs, or the path of a TOML file; a later -c wins."),
]
AllOfIt = Annotated[bool, typer.Option("--traceback", help="Print whole tracebacks, with the texts of exceptions.")]
Clients = Annotated[int, typer.Option("--clients", "-n", min=1, help="How many clients to simulate.")]


@app.command()
def run(
    settings: Settings = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", "-n", min=1, help="How many clients to simulate; 4, or as many as the resumed run."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="The directory of a run that broke off: go on with it, with its settings.")
    ] = None,
    traceback: AllOfIt = False,
) -> None:
    """Simulate a federation in this process; the defaults train digits under metric-aware noise.

    Exit code 0: the run ended as asked; 1: it failed, or a setting is not valid; 2: the command line, or the text of
    -c, cannot be read; 3: a budget ended it, or refused it; 130: it was stopped by Ctrl-C or SIGTERM.
    """
    from cloister.simulation.simulate import simulate

    earlier = {} if resume is None else {"resume": str(resume)}
    with for_owner(traceback):
        outcome = simulate(read_settings(settings or []) | earlier, clients)
    raise typer.Exit(EXIT_CODES.get(outcome.ended, FAILED))


@app.command()
def plan(
    settings: Settings = None,
    clients: Clients = 4,
    epsilon: Annotated[
        float, typer.Option(min=0, help="ε of a budget: say which noise, or how many rounds, stay within it.")
    ] = 0.0,
    policy: Annotated[Path | None, typer.Option(help="The policy.toml of a site that takes part.")] = None,
    public_size: Annotated[
        list[int] | None, typer.Option(help="How many examples (or groups) a site states, with dp-sgd; repeatable.")
    ] = None,
    timing: Annotated[bool, typer.Option(help="Let one client train in this process, to estimate the time.")] = True,
    png: Annotated[Path | None, typer.Option(help="Draw ε by round into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    minutes: Annotated[
        float, typer.Option("--suggest", min=0, help="Print settings of dp-sgd for sites that train so many minutes.")
    ] = 0.0,
    traceback: AllOfIt = False,
) -> None:
    """Say what a run would cost before it runs: noise, ε by round, budgets, time and bytes.

    Nothing is sent, nothing is spent, and no run directory is made. Exit code 1: not one round fits a budget.
    """
    from cloister.estimate.preview import Options, preview
    from cloister.estimate.render import draw, record, render, render_nothing

    if minutes:
        from cloister.estimate.suggest import measured, suggest

        if not public_size or len(public_size) > 1 or not epsilon or policy or png:
            raise ConfigError("--suggest needs one --public-size and --epsilon, and takes no --policy or --png")
        with for_owner(traceback):
            given = read_settings(settings or [])
            made = suggest(given, public_size[0], epsilon, minutes, clients, measured(given))
        content = {"settings": made.settings, "reasons": made.reasons, "notes": made.notes}
        typer.echo(jsonlib.dumps(content, indent=2) if json else "\n".join(made.lines()))
        return
    options = Options(clients, epsilon, policy, tuple(public_size or ()), timing)
    with for_owner(traceback):
        found = preview(read_settings(settings or []), options)
    if png is not None:
        draw(found, png)
    nothing = render_nothing(found)
    if json or not nothing:
        typer.echo(jsonlib.dumps(record(found), indent=2) if json else "\n".join(render(found)))
    if nothing:
        raise ConfigError(nothing)


app.command("warm-node", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(warm_node)
app.command()(status)


check = typer.Typer(help="Try out what you wrote, or this machine, before a run.", no_args_is_help=True)
app.add_typer(check, name="check")


@check.command("task")
def check_task(
    name: Annotated[str, typer.Argument()],
    data: Annotated[
        Path | None, typer.Option(help="A site's own file or folder; without it, the task's benchmark data is tried.")
    ] = None,
    settings: Settings = None,
    traceback: AllOfIt = False,
) -> None:
    """Check a task's data and model, and run one round of two clients; a line a fault, with the remedy.

    NAME is the task's, as in task.name. Of -c the keys of task and client count, such as task.image-size=64.

    Exit code 0: nothing is wrong; 1: there are faults.
    """
    from rich.console import Console

    from cloister.simulation import checking
    from cloister.utils.terminal import can_redraw

    console, kinds, given = Console(highlight=False, soft_wrap=True), set(), read_settings(settings or [])
    with for_owner(traceback), console.status("") if can_redraw(console) else nullcontext() as status:
        for line in checking.check_task(name, data, given, status.update if status else lambda _: None):
            console.print(str(line), markup=False, emoji=False)
            kinds.add(line.kind)
    if "fault" in kinds:
        raise typer.Exit(FAILED)


@check.command("kernels")
def check_kernels(
    seconds: Annotated[int, typer.Option(min=1, help="How long to try; each model is tried once at least.")] = 60,
    framework: Annotated[str, typer.Option(help="keras or torch; by default, each that is installed.")] = "",
) -> None:
    """Try on this machine whether TensorFlow and PyTorch compute each example alone, as DP-SGD takes for granted.

    It gives small models weights of every scale. What is kept of one example must not change by a bit with the
    numbers of the others, nor from one call to the next.

    Exit code 0: nothing changed; 1: something did, and DP-SGD has no guarantee here.
    """
    from cloister.audits.kernels import are_broken, told

    if framework not in ("", "keras", "torch"):
        raise ConfigError(f"--framework {framework!r} is not known: use keras or torch")
    names = [framework] if framework else [name for name in ("torch", "keras") if find_spec(name)]
    broken = False
    for name in names or ["keras"]:
        until = time.monotonic() + seconds / max(1, len(names))
        kernels = import_module(f"cloister.audits.{name}_kernels")
        typer.echo(kernels.platform_name())
        trials = kernels.tried(until)
        for line in told(trials):
            typer.echo(line)
        broken |= are_broken(trials)
    if broken:
        raise typer.Exit(FAILED)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(metavar="task|strategy|mechanism")],
    name: Annotated[str, typer.Argument()],
    source: Annotated[str, typer.Option("--from", help="Of a task: csv, npz or images.")] = "csv",
    framework: Annotated[str, typer.Option(help="Of a task's model: keras, torch or numpy.")] = "keras",
    folder: Annotated[Path | None, typer.Option("--to", help="Folder to make; by default, one of that name.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="With csv: your table, or a folder with one of each site; its rows stay there.")
    ] = None,
    target: Annotated[str, typer.Option(help="With --data: the column to predict; else the last.")] = "",
    site: Annotated[str, typer.Option(help="With --data: the column that says at which site a row is.")] = "",
    patient: Annotated[str, typer.Option(help="With --data: the column that says whose a row is.")] = "",
    columns: Annotated[str, typer.Option(help="With --data without a header: names of all columns, by commas.")] = "",
) -> None:
    """Write a package of your own that runs at once: code to change, tests, example data and a README.

    The first word says what to write: a task (data and model), a strategy (how the server combines models) or a
    mechanism (how it protects them). NAME is what it will be called: small letters, digits and '-'.

    Example: cloister new task ward-rows --from csv --data rows.csv --target outcome --patient "Patient ID"
    """
    from cloister.scaffold.inference import Asked, guess
    from cloister.scaffold.package import write_package
    from cloister.simulation.checking import refuse_taken

    refuse_taken(kind, name)
    if data is None and (about := target or site or patient or columns):
        raise ConfigError(f"{about!r} is about a table: name that too, by --data FILE")
    if data is not None and (kind, source) != ("task", "csv"):
        raise ConfigError(f"--data {data}: only a task with --from csv is made from a table")
    names = tuple(name.strip() for name in columns.split(",")) if columns else ()
    table = None if data is None else guess(Asked(data, target, site, patient, names))
    made = write_package(kind, name, source, folder or Path(name), table, framework)
    then = ""
    if table is not None and data is not None:
        typer.echo("\n".join(map(clean, table.told(data))))
        then = f"""cloister check task {name} -c "task.data-path='{data.resolve()}'", """
    typer.echo(f"made {made}; next: pip install -e {made}, {then}then read {made / 'README.md'}")


@app.command()
def policy(path: Annotated[Path, typer.Argument()]) -> None:
    """Check the policy of a site, and say in words what it demands.

    PATH is a policy.toml file.
    """
    from cloister.client.policy import read_policy, render

    typer.echo("\n".join(render(read_policy(path))))


@app.command("signing-key")
def signing_key(folder: Annotated[Path, typer.Argument()]) -> None:
    """Make the key with which a site signs in secure aggregations, unless FOLDER has one. The site's start.sh calls it.

    The private half, signing.key, stays at the site. The public half, signing.pub, is for the roster's keeper.
    """
    from cloister.client.keys import make_key

    told = make_key(folder)
    typer.echo(f"{folder}/signing.pub: send it to the roster's keeper, and read out its fingerprint {told}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument()],
    data: Annotated[Path, typer.Argument()],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the predictions, as CSV; else they are printed.")
    ] = None,
    hypothesis: Annotated[
        int | None, typer.Option(min=0, help="Which of several hypotheses; needed if the examples have no labels.")
    ] = None,
) -> None:
    """Score examples with a trained model; print figures of merit too where the examples have labels.

    MODEL is a run directory, or the model-dir of a client. DATA is a CSV file, an .npz file, or a folder of images; it
    need not have labels.
    """
    from cloister.predict import predict as predictions

    found = predictions(model, data, hypothesis)
    if out:
        found.write(out)
        typer.echo(f"{counted(len(found.names), 'row')} written to {out}", err=True)
    else:
        typer.echo("\n".join(found.lines()))
    if found.hypotheses > 1:
        typer.echo(f"hypothesis {found.hypothesis} of {found.hypotheses}", err=True)
    usable = len(found.names) - sum(map(bool, found.reasons))
    if usable < len(found.names):
        unusable = counted(len(found.names) - usable, "example")
        typer.echo(f"{unusable} cannot be scored; the column reason has the causes", err=True)
    if 0 < found.labelled < usable:
        typer.echo(f"{found.labelled} of {usable} examples have a label; the figures are of these", err=True)
    for name, value in found.metrics.items():
        typer.echo(f"{name} {value:.6g}", err=True)


@app.command()
def audit(
    run_directory: Annotated[Path | None, typer.Argument(metavar="RUN")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Instead of RUN: settings of a run that is simulated first."),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", "-n", min=1, help="With -c: how many clients to simulate.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help="Name of an audit; all that fit if it is left out.")] = None,
    shadows: Annotated[int, typer.Option(min=4, help="How many runs of its own an attack learns from.")] = 16,
) -> None:
    """Attack a finished run as its adversaries would, and write audit.json beside what it claims.

    RUN is the directory of a run that has ended.

    Exit code 0: no attack contradicts the claim; 1: one does, or the audit failed; 2: the settings cannot be read.
    """
    from rich.console import Console

    from cloister.audits.audit import Effort, Progress
    from cloister.audits.audit import audit as attacked
    from cloister.simulation.simulate import simulate

    if (run_directory is None) == (settings is None):
        raise ConfigError("give either a run directory or settings with -c; one of them is audited")
    path = run_directory or simulate(read_settings(settings or []), clients).directory.path
    console = Console(width=WIDTH, highlight=False, soft_wrap=True, markup=False)
    found = attacked(path, Effort(shadows, progress=Progress(console)), only or ())
    found.show(console)
    if found.contradicted:
        raise typer.Exit(FAILED)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN")],
    statements: Annotated[
        Path | None, typer.Option(help="TOML file of what only the operator can state, for the officer's page; kept.")
    ] = None,
) -> None:
    """Write report.html of a finished run into its directory.

    RUN is a run directory.
    """
    from cloister.config.io import read_toml
    from cloister.server.reports.html.data import Statements
    from cloister.server.reports.html.page import write_report

    stated = read_toml(Statements, statements, str(statements)) if statements else None
    typer.echo(write_report(directory, stated))


@app.command()
def compare(
    directories: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    score: Annotated[str, typer.Option(help="Name of the score to compare by; by default the first beside loss.")] = "",
    output: Annotated[Path | None, typer.Option(help="Write it as an HTML page into this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the figures into this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put several runs beside each other: the settings that differ, scores, ε and time.

    Each RUN is a run directory, of a run that has finished or not.
    """
    from cloister.server.reports.compare.comparison import compared, each_alone, lines, record
    from cloister.server.reports.compare.page import write_page, write_png
    from cloister.server.reports.compare.runs import read_runs

    found = compared(each_alone(read_runs(directories)), score)
    if png is not None:
        write_png(found, png)
    if output is not None:
        write_page(found, output)
    typer.echo(jsonlib.dumps(record(found), indent=2) if json else "\n".join(lines(found)))


@app.command()
def sweep(
    description: Annotated[Path, typer.Argument(metavar="FILE")],
    check: Annotated[
        bool, typer.Option("--check", help="Check every cell, say what would run, and start none.")
    ] = False,
) -> None:
    """Run a grid of configurations and seeds, each in a process of its own; again: what is missing.

    FILE is a TOML file with base, grid and seeds.

    Exit code 0: every cell is done; 1: some failed; 3: a budget ended one; 130: it was stopped by Ctrl-C or SIGTERM.
    """
    from cloister.sweep.sweep import conduct

    raise typer.Exit(conduct(description, typer.echo, check))


app.add_typer(ledger, name="ledger")
app.add_typer(site, name="site")
app.command()(watch)
app.command()(dashboard)
app.command(name="provision")(provision_kits)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(superlink)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(superexec)
