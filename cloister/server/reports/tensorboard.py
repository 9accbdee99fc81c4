"""Curves of a run for TensorBoard, written without TensorFlow."""

import time
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cloister.server.loop import Round, published
from cloister.server.reports.scalars import scalars

FORMAT = "brain.Event:2"


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
