"""RETURNN's HDFDataset, read as RETURNN reads it. `pip install hvdtrain[benchmark]`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy


def check() -> None:
    """End the program where RETURNN is not installed."""
    if importlib.util.find_spec("returnn") is None:
        raise SystemExit("expected RETURNN, to compare with, got none (pip install hvdtrain[benchmark])")


def open_dataset(path: Path, cache_bytes: int = 0) -> Any:
    """An HDFDataset, in random order. `cache_bytes` is what RETURNN makes of its key cache_size; 0 is off."""
    from returnn.datasets.hdf import HDFDataset

    with quiet():
        dataset = HDFDataset(files=[str(path)], cache_byte_size=cache_bytes, seq_ordering="random")
        dataset.initialize()
    return dataset


def default_cache_bytes() -> int:
    """What the training data gets where the config does not say `cache_size`, and there are no other data."""
    from returnn.util.basic import default_cache_size_in_gbytes

    return int(default_cache_size_in_gbytes() * (1 << 30)) + 1


def sequences(dataset: Any, epoch: int) -> Iterator[dict[str, numpy.ndarray]]:
    """The arrays of an epoch, sequence by sequence, without tags: the least that RETURNN does."""
    with quiet():
        dataset.init_seq_order(epoch)
        keys = dataset.get_data_keys()
        index = 0
        while dataset.is_less_than_num_seqs(index):
            dataset.load_seqs(index, index + 1)
            yield {key: dataset.get_data(index, key) for key in keys}
            index += 1


def batches(dataset: Any, epoch: int, size: int) -> Iterator[dict[str, Any]]:
    """The padded batches of an epoch, through the parts that RETURNN's engine for PyTorch puts together, in this process.

    With one thread: PyTorch pads with all of them, and on a busy machine they wait for each other most of the time.
    """
    import torch
    from returnn.torch.data.pipeline import BatchingIterDataPipe, collate_batch
    from returnn.torch.data.returnn_dataset_wrapper import ReturnnDatasetIterDataPipe

    torch.set_num_threads(1)
    with quiet():
        pipe = ReturnnDatasetIterDataPipe(dataset, reset_callback=lambda: dataset.init_seq_order(epoch))
        for batch in BatchingIterDataPipe(pipe, batch_size=None, max_seqs=size):
            yield collate_batch(batch)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """RETURNN tells what it does on the standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def write(path: Path, arrays: Iterator[numpy.ndarray]) -> None:
    """A file by SimpleHDFWriter, sequence by sequence, as RETURNN's models dump features: HDF5 chooses the chunks."""
    from returnn.datasets.hdf import SimpleHDFWriter

    with quiet():
        writer = None
        for number, frames in enumerate(arrays):
            if writer is None:
                writer = SimpleHDFWriter(str(path), dim=frames.shape[-1])
            writer.insert_batch(frames[None], [len(frames)], [f"seq-{number}"])
        if writer is not None:
            writer.close()
