"""Curves of a run for TensorBoard, written without TensorFlow."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from cloister.server.loop import Round

FORMAT = "brain.Event:2"


class TensorBoardObserver:
    """One scalar per metric and round.

    Args:
        folder: for the event file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        # The package's own file writer would import TensorFlow; its record writer does not.
        self._records = RecordWriter((folder / f"events.out.tfevents.{int(time.time())}.cloister").open("wb"))
        self._write(Event(wall_time=time.time(), file_version=FORMAT))

    def __call__(self, done: Round, _: object) -> None:
        """Write the scalars of a round."""
        scalars = {f"central/{name}": value for name, value in done.central.items()}
        scalars |= {f"federated/{name}": value for name, value in done.federated.items()}
        if done.measured and done.measured.noise_std is not None:
            scalars["privacy/noise-std"] = done.measured.noise_std
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=done.number, summary=Summary(value=values)))

    def close(self) -> None:
        """Finish the file."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
