"""ServerApp that Flower loads."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cloister.config.calibration import calibrated
from cloister.config.run import parse
from cloister.utils.crash import one_line
from cloister.utils.errors import FederationError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run configuration describes.

    Raises:
        FederationError: the run ended early, with too few nodes or a full disk. Everything is saved by then, and Flower
            counts the run as failed.
    """
    from cloister.server.polling_grid import PollingGrid
    from cloister.server.run import run

    with one_line():
        config = calibrated(parse(context.run_config))
        outcome = run(PollingGrid(_packing(grid), config.late_timeout if config.is_private else None), config)
        if outcome.ended in ("too-few-nodes", "disk"):
            raise FederationError(outcome.stopped)


def _packing(grid: Grid) -> Grid:
    """Return the grid of a SuperLink with packed messages; any other as it is, since nothing of it leaves a machine."""
    from cloister.flower.messages import is_over_http

    if not is_over_http(grid):
        return grid
    from cloister.server.packed_grid import PackedGrid

    return PackedGrid.over(grid)
