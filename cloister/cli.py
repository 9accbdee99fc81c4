"""The `cloister` command."""

from pathlib import Path
from typing import Annotated

import typer

from cloister.core.config import Scalar
from cloister.core.errors import CloisterError, ConfigError

app = typer.Typer(help="Private federated learning on Flower.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Private federated learning on Flower."""


@app.command()
def run(
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", "-c", help="key=value pairs as `flwr run` takes them, or the path of a TOML file."
        ),
    ] = None,
    clients: Annotated[int, typer.Option("--clients", "-n", min=1, help="How many clients to simulate.")] = 4,
) -> None:
    """Simulate a federation in this process; the defaults train digits under metric-aware noise."""
    from cloister.local.simulation import simulate

    try:
        simulate(read_settings(settings or []), clients)
    except CloisterError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def read_settings(arguments: list[str]) -> dict[str, Scalar]:
    """Dotted keys from the arguments, with Flower's own parser.

    Raises:
        ConfigError: they are neither key=value pairs nor one TOML file.
    """
    from flwr.common.config import parse_config_args

    for argument in arguments:
        if argument.endswith(".toml") and not Path(argument).expanduser().is_file():
            raise ConfigError(f"--run-config: no file at {argument}")
    try:
        parsed: dict[str, Scalar] = parse_config_args(arguments)
    except (ValueError, typer.Exit) as error:
        raise ConfigError(f"--run-config: {error}") from error
    return parsed
