"""Reading RETURNN's HDFDataset the way RETURNN does. Needs `pip install -e '.[benchmark]'`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy


def check() -> None:
    """Exit if RETURNN is not installed."""
    if importlib.util.find_spec("returnn") is None:
        raise SystemExit("expected the package returnn for the comparison, got none (pip install -e '.[benchmark]')")


def open_dataset(path: Path, cache_bytes: int = 0) -> Any:
    """Open an HDFDataset in random order. `cache_bytes` is RETURNN's key cache_size in bytes; 0 turns the cache off."""
    from returnn.datasets.hdf import HDFDataset

    with quiet():
        dataset = HDFDataset(files=[str(path)], cache_byte_size=cache_bytes, seq_ordering="random")
        dataset.initialize()
    return dataset


def default_cache_bytes() -> int:
    """The cache size of the training data if the config does not set `cache_size` and there is no other data."""
    from returnn.util.basic import default_cache_size_in_gbytes

    return int(default_cache_size_in_gbytes() * (1 << 30)) + 1


def sequences(dataset: Any, epoch: int) -> Iterator[dict[str, numpy.ndarray]]:
    """The arrays of an epoch, sequence by sequence, without tags: RETURNN's minimal work."""
    with quiet():
        dataset.init_seq_order(epoch)
        keys = dataset.get_data_keys()
        index = 0
        while dataset.is_less_than_num_seqs(index):
            dataset.load_seqs(index, index + 1)
            yield {key: dataset.get_data(index, key) for key in keys}
            index += 1


def batches(dataset: Any, epoch: int, size: int) -> Iterator[dict[str, Any]]:
    """The padded batches of an epoch, through the data pipeline of RETURNN's engine for PyTorch, in this process.

    Uses one thread: PyTorch pads with all threads, which mostly wait for each other on a busy machine.
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
    """Suppress what RETURNN prints to the standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def write(path: Path, arrays: Iterator[numpy.ndarray]) -> None:
    """Write a file with SimpleHDFWriter, sequence by sequence, as RETURNN's models dump features. HDF5 chooses the chunks."""
    from returnn.datasets.hdf import SimpleHDFWriter

    with quiet():
        writer = None
        for number, frames in enumerate(arrays):
            if writer is None:
                writer = SimpleHDFWriter(str(path), dim=frames.shape[-1])
            writer.insert_batch(frames[None], [len(frames)], [f"seq-{number}"])
        if writer is not None:
            writer.close()
