"""What the plan needs to know of the chunks that sequences are cut into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.config.plugins import Registry
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array
from hvdtrain.data.views import PartsOfSequences


class Chunks(Protocol):
    """All chunks of a dataset, numbered sequence by sequence: a plan then consists of chunks.

    Attributes:
        key: of the config, that asks for them, for messages.
        sequences: the index of every chunk's sequence; int64 of shape (num_chunks,).
        numbers: the number of every chunk in its sequence, from 0; int64 of shape (num_chunks,).
        lengths: by data key, number of frames of every chunk; int32 of shape (num_chunks,).
    """

    @property
    def key(self) -> str: ...

    @property
    def sequences(self) -> Array: ...

    @property
    def numbers(self) -> Array: ...

    @property
    def lengths(self) -> Mapping[str, Array]: ...

    def numbers_of(self, sequences: Array) -> Array:
        """The chunks of some sequences, in order; for a sequence that occurs twice, its chunks come twice."""
        ...

    def dataset(self, dataset: Dataset) -> PartsOfSequences:
        """The chunks of a dataset's sequences as a dataset; its batches give the indices of the sequences, not of the chunks."""
        ...

    def as_text(self) -> Mapping[str, Any]:
        """By name, what determines them, among the inputs of a plan."""
        ...

    def arrays(self) -> Sequence[Array]:
        """What differs if they do."""
        ...

    def shares(self, used: Array) -> tuple[Array, str]:
        """Those of some sequences that have chunks, and a line about them for the log; empty: there is nothing to say."""
        ...


@dataclass(frozen=True)
class Chunker:
    """What cuts sequences into chunks.

    Attributes:
        make: the chunks, given the settings, whether it is for training, and by data key the lengths of all sequences; None: they
            stay whole. Raises: DataError.
        uses: given the settings, and whether it is for training: by key, whether it asks for chunks.
        data_keys: given the settings: by key, the data keys that it names.
    """

    make: Callable[[Any, bool, Mapping[str, Array]], Chunks | None]
    uses: Callable[[Any, bool], Mapping[str, bool]]
    data_keys: Callable[[Any], Mapping[str, list[str]]]


CHUNKERS: Registry[Chunker] = Registry("chunkers")
"""Those of plug-ins; the last one is used."""
