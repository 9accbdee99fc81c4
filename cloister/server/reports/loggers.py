"""Curves of a run for TensorBoard and MLflow."""

import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cloister.config.run import NOT_SHOWN
from cloister.server.build import Plan
from cloister.server.reports.rundir import PRIVACY, REPORT, RunDirectory
from cloister.server.round import Round, published
from cloister.server.stopping import Ending
from cloister.utils.errors import ConfigError
from cloister.utils.files import expanded

FORMAT = "brain.Event:2"
logger = logging.getLogger("cloister.server")
EXPERIMENT = "cloister"
DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
"""Default store, in the output-dir."""
SQLITE = "sqlite:///"
PLACE = "MLFLOW_TRACKING_URI"
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true"}
"""Setting that disables MLflow's usage telemetry."""
ENVIRONMENT = {"MLFLOW_LOGGING_LEVEL": "WARNING", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""Settings that silence MLflow and shorten its wait for an absent server."""
BATCH, LONGEST = 100, 6000
"""Maximum number of parameters in one MLflow request, and maximum characters of one."""
STATUS = {"as-asked": "FINISHED", "budget": "FINISHED", "site-budgets": "FINISHED", "operator": "KILLED"}
"""MLflow status by the end of a run; every other end is a failure."""


def scalars(done: Round, secret_cohorts: bool) -> dict[str, float]:
    """Return the scores and the publishable measurements of a round, by name.

    Args:
        done: a finished round.
        secret_cohorts: whether to omit the number of rejected replies.
    """
    found = {f"central/{name}": value for name, value in done.central.items()}
    found |= {f"federated/{name}": value for name, value in done.federated.items()}
    if (measured := done.measured) is not None:
        # The strategy omits measurements that would be another release.
        known = {
            "privacy/noise-std": measured.noise_std,
            "privacy/epsilon": measured.epsilon,
            "privacy/clipping-norm": measured.clipping_norm,
            "privacy/clipped-fraction": measured.clipped_fraction,
            "replies/rejected": None if secret_cohorts else len(measured.rejected),
        }
        found |= {name: float(value) for name, value in known.items() if value is not None}
    return found


class TensorBoardObserver:
    """Observer that writes one TensorBoard scalar per metric and round, without TensorFlow.

    Args:
        folder: for the event file.
        hides_times: whether to truncate the times of events to the day.
        secret_cohorts: whether to omit the number of rejected replies.
        after: the round after which a run is resumed. TensorBoard then discards later rounds of earlier files. None: a
            new run.
    """

    def __init__(
        self, folder: Path, hides_times: bool = False, secret_cohorts: bool = False, after: int | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.hides_times = hides_times
        self.secret_cohorts = secret_cohorts
        # Files of the same day are read in the order of their names.
        self._path = folder / f"events.out.tfevents.{int(self._now())}.cloister.{len(list(folder.iterdir())):03d}"
        # The package's file writer would import TensorFlow; its record writer does not.
        self._records = RecordWriter(self._path.open("wb"))
        self._write(Event(wall_time=self._now(), file_version=FORMAT))
        if after is not None:
            begun = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=self._now(), step=after + 1, session_log=begun))

    def __call__(self, done: Round, _: object) -> None:
        """Write the scalars of a round."""
        found = scalars(done, self.secret_cohorts)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
        self._write(Event(wall_time=self._now(), step=done.number, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file if the disk allows it; every round is already written."""
        with suppress(OSError):
            self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def _now(self) -> float:
        return published(time.time(), self.hides_times)


class MlflowTracker:
    """Observer that sends a run to an MLflow store; a failed request is logged and the run continues.

    Args:
        plan: of the run.
        directory: of the run.

    Raises:
        ConfigError: MLflow is not installed, the store cannot be used, or it would reveal the times of a run that hides
            them.
    """

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._directory, self._hides_times = directory.path, plan.hides_times
        self._secret_cohorts = plan.strategy.has_secret_cohorts
        self._store = _store(plan)
        if self._hides_times and not self._store.startswith(SQLITE):
            raise ConfigError(
                "tracking = 'mlflow' contradicts the secrecy of draws in this run: a store behind an address notes "
                "when each round is over, which tells how many took part; name a file, as in sqlite:///runs/mlflow.db"
            )
        self._mlflow: Any = _installed()
        try:
            self._client = self._mlflow.MlflowClient(self._store)
            if (found := self._client.get_experiment_by_name(EXPERIMENT)) is not None:
                experiment = str(found.experiment_id)
            else:
                artifacts = None
                if self._store.startswith(SQLITE):
                    artifacts = (Path(self._store.removeprefix(SQLITE)).resolve().parent / ARTIFACTS).as_uri()
                experiment = str(self._client.create_experiment(EXPERIMENT, artifact_location=artifacts))
            made = self._client.create_run(experiment, start_time=self._now(), run_name=self._directory.name)
            self._run = str(made.info.run_id)
            settings = {key: value for key, value in plan.config.flat().items() if key not in NOT_SHOWN}
            pairs = (settings | {"seed": plan.seed}).items()
            params = [self._mlflow.entities.Param(key, str(value)[:LONGEST]) for key, value in pairs]
            for start in range(0, len(params), BATCH):
                self._client.log_batch(self._run, params=params[start : start + BATCH])
            self._is_open = True
        except Exception as error:  # raised by any store; its text may contain a password
            default = f"{DATABASE} in output-dir = {plan.config.output_dir!r}"
            place = PLACE if os.environ.get(PLACE) else default
            if plan.config.tracking_uri:
                place = f"tracking-uri = {plan.config.tracking_uri!r}"
            raise ConfigError(f"{place} cannot be used as a store of MLflow: {type(error).__name__}") from None

    def __call__(self, done: Round, _: object) -> None:
        """Log the scalars of a round."""
        found, now = scalars(done, self._secret_cohorts), self._now()
        metric = self._mlflow.entities.Metric
        points = [metric(re.sub(r"[^\w\-. /:]", "_", name), value, now, done.number) for name, value in found.items()]
        self._tried(f"round {done.number}", lambda: self._client.log_batch(self._run, metrics=points))

    def finish(self, ending: Ending) -> None:
        """Log the claim and the report, and the end of the run."""
        for name in (PRIVACY, REPORT):
            if (path := self._directory / name).is_file():
                self._tried(name, lambda path=path: self._client.log_artifact(self._run, path))  # type: ignore[misc]
        self._end(STATUS.get(ending.how, "FAILED"))

    def close(self) -> None:
        """End the MLflow run as failed, unless `finish` has ended it."""
        if self._is_open:
            self._end("FAILED")

    def _end(self, status: str) -> None:
        self._is_open = False
        self._tried("the end", lambda: self._client.set_terminated(self._run, status, end_time=self._now()))

    def _tried(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            logger.warning("MLflow does not have %s: %s", what, type(error).__name__)

    def _now(self) -> int:
        return int(published(time.time(), self._hides_times) * 1000)


def _store(plan: Plan) -> str:
    """Return the address of the store; by default a file in the output-dir."""
    config = plan.config
    default = f"{SQLITE}{expanded(config.output_dir).resolve() / DATABASE}"
    return config.tracking_uri or os.environ.get(PLACE) or default


def _installed() -> Any:
    """Import MLflow, without telemetry, and return it.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ |= NO_TELEMETRY
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
        from mlflow.telemetry import set_telemetry_client
    except ImportError:
        raise ConfigError("tracking = 'mlflow' needs MLflow: pip install 'cloister-fl[mlflow]'") from None
    set_telemetry_client()  # again, with telemetry off: another module may have imported MLflow earlier
    return mlflow
