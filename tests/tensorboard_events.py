"""What a training has written for TensorBoard."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New


def events(folder: Path) -> list[Event]:
    """The events of the only file in a folder."""
    (path,) = folder.iterdir()
    reader = PyRecordReader_New(str(path))
    found = []
    while True:
        try:
            reader.GetNext()
        except Exception:
            return found
        found.append(Event.FromString(reader.record()))
