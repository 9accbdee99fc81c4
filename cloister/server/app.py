"""The ServerApp that Flower loads."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cloister.core.config import parse
from cloister.core.crash import one_line

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run configuration describes."""
    from cloister.server.patience import PatientGrid
    from cloister.server.run import run

    with one_line():
        run(PatientGrid(grid), parse(context.run_config))
