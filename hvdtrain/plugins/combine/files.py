"""FilesDataset: thousands of HDF files as one dataset, of which few are open at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy

from hvdtrain.data.combine.files import open_files
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.handles import Handles, Opened
from hvdtrain.data.hdf.dataset import HDFFile
from hvdtrain.data.types import Array, Padded
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.keys import FilesDatasetKeys


class ReopenedFile(Dataset):
    """A file that is open only while something of it is read: there are more files than may be open.

    Args:
        open_file: opens it. Raises: DataError.
        pool: of open files.
    """

    def __init__(self, path: str, open_file: Callable[[str], Dataset], pool: Handles) -> None:
        self._path = path
        self._open_file = open_file
        self._pool = pool
        file = open_file(path)
        self.streams = file.streams
        self.lengths = file.lengths
        self._size = file.num_sequences
        file.close()

    def open(self) -> Opened:
        """The file, opened again. Raises: DataError, if it is another one by now."""
        with Opened() as stack:
            file = stack.handle = self._open_file(self._path)
            stack.callback(file.close)
            for name, column in self.lengths.items():
                if name not in file.streams or not numpy.array_equal(file.lengths[name], column):
                    raise DataError(f"{self._path}: expected the same lengths as at the start, got different ones in {name!r}")
            opened = stack.pop_all()
            opened.handle = file
            return opened

    @property
    def num_sequences(self) -> int:
        return self._size

    def _file(self) -> Dataset:
        return self._pool.opened(self).handle  # type: ignore[no-any-return]  # what `open` put there

    def sequence(self, index: int) -> dict[str, Array]:
        return self._file().sequence(index)

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self._file().padded(indices)

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        return self._file().packed(indices, keys)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._file().tags(indices)

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._file().tag_bytes(start, stop)

    def how_read(self) -> str:
        return f"up to {self._pool.most} files open at a time"

    def close(self) -> None:
        self._pool.close(self)

    def release(self) -> None:
        self.close()


def open_files_dataset(where: str, keys: FilesDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open files as one dataset. Raises: DataError, if one is bad or does not match the first one."""
    handles = Handles()
    pool = Handles(keys.max_open_files)

    def open_file(path: str) -> Dataset:
        return HDFFile(Path(path), handles=handles)

    return open_files(where, keys.data_files(), lambda path: ReopenedFile(path, open_file, pool))
