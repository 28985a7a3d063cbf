"""The classes of datasets that a config can name, and where they are implemented."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import REQUIRED, key, not_negative, positive
from hvdtrain.data.combine.keys import CombinedDatasetKeys, ConcatDatasetKeys, FilesDatasetKeys, MapDatasetKeys, MetaDatasetKeys
from hvdtrain.data.keys import DatasetKeys, FileDatasetKeys
from hvdtrain.errors import Problem, problem

OWN = {
    "FolderDataset": "hvdtrain.data.formats.folder:FolderDataset",
    "IterableDataset": "hvdtrain.data.formats.iterable:IterableDataset",
    "HuggingFaceDataset": "hvdtrain.data.formats.hugging_face:HuggingFaceDataset",
    "ReturnnDataset": "hvdtrain.data.formats.returnn_stream:ReturnnDataset",
}
"""Sources whose lengths are not known in advance; the other entries of the dict are their arguments."""

BY_RETURNN = tuple(
    "AnythingDataset BlissDataset ChunkShuffleDataset ClusteringDataset ConcatSeqsDataset ConfusionNetworkDataset "
    "CopyTaskDataset DatasetWithTimeContext DistributeFilesDataset DummyDatasetMultipleDataKeys "
    "DummyDatasetMultipleSequenceLength DummyGenericDataset Enwik8Corpus ExternSprintDataset LibriSpeechCorpus "
    "LmDataset MapDatasetWrapper MegatronDataset MultiEpochDataset NemoSpeechDataset NltkTimitDataset "
    "NumpyDumpDataset OggZipDataset PostprocessingDataset RawWavDataset SiameseHDFDataset SprintCacheDataset "
    "StaticDataset StereoHdfDataset TaskEpisodicCopyDataset TaskNumberBaseConvertDataset "
    "TaskVariableAssignmentDataset TaskXmlModelingDataset TextDictDataset TimitDataset TranslationDataset "
    "TranslationFactorsDataset VariableDataset".split()
)
"""Datasets of RETURNN without a counterpart here: RETURNN itself reads them."""


@dataclass(frozen=True, kw_only=True)
class HDFDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "HDFDataset"`."""

    allow_external: bool = key(
        False,
        "follow external links, external storage and virtual datasets, by which a file makes the trainer read other files; "
        "such files are not copied to cache_dir",
    )

    def files_to_copy(self) -> tuple[str, ...]:
        # A path to another file is relative to the file that contains it, so a copy would not find the other file.
        return () if self.allow_external else self.data_files()


@dataclass(frozen=True, kw_only=True)
class NextGenHDFDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "NextGenHDFDataset"`: HDF files with a dataset for every sequence."""

    input_stream_name: str = key(REQUIRED, "the stream that is the data key 'data'; the others have their own names")


@dataclass(frozen=True, kw_only=True)
class DummyDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "DummyDataset"`: meaningless numbers."""

    input_dim: int = key(REQUIRED, "dimension of the vectors in 'data'", positive)
    output_dim: int = key(REQUIRED, "number of classes in 'classes'", positive)
    num_seqs: int = key(REQUIRED, "number of sequences", positive)
    seq_len: int | dict[str, int] = key(
        2, "frames of every sequence, or a dict with the frames of 'data' and 'classes'", positive
    )

    def problems(self) -> list[Problem]:
        if not isinstance(self.seq_len, dict):
            return []
        right = self.seq_len.keys() == {"data", "classes"} and min(self.seq_len.values()) >= 0
        expected = "seq_len: expected zero or a positive number for 'data' and for 'classes'"
        return [] if right else problem("out-of-range", f"{expected}, got {self.seq_len}")


@dataclass(frozen=True, kw_only=True)
class Task12AXDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "Task12AXDataset"`: a synthetic memory task."""

    num_seqs: int = key(REQUIRED, "number of sequences, each of 10 to 99 frames", positive)
    fixed_random_seed: int = key(1, "seed of the sequences, which are the same in every epoch", not_negative)


@dataclass(frozen=True)
class Kind:
    """A class of datasets.

    Attributes:
        keys: the dataclass of its keys. The keys `dataset` and `datasets` hold the datasets inside it.
        open: 'module:function' that opens it, given its config key (for messages), its keys, and the open datasets inside it by
            name; imported when a dataset is opened.
        order_from: the name of the dataset inside it whose order keys apply to the whole; None: there is none.
    """

    keys: type[DatasetKeys]
    open: str
    order_from: Callable[[Any], str | None] = lambda keys: None


KINDS: dict[str, Kind] = {
    "HDFDataset": Kind(HDFDatasetKeys, "hvdtrain.data.hdf.dataset:open_hdf_dataset"),
    "NextGenHDFDataset": Kind(NextGenHDFDatasetKeys, "hvdtrain.data.hdf.nextgen:open_next_gen"),
    "FilesDataset": Kind(FilesDatasetKeys, "hvdtrain.data.hdf.dataset:open_files_dataset"),
    "MetaDataset": Kind(MetaDatasetKeys, "hvdtrain.data.combine.meta:open_meta", lambda keys: keys.control),
    "CombinedDataset": Kind(CombinedDatasetKeys, "hvdtrain.data.combine.union:open_combined"),
    "ConcatDataset": Kind(ConcatDatasetKeys, "hvdtrain.data.combine.union:open_concat"),
    "MapDataset": Kind(MapDatasetKeys, "hvdtrain.data.combine.map:open_map", lambda keys: "dataset"),
    "Task12AXDataset": Kind(Task12AXDatasetKeys, "hvdtrain.data.formats.synthetic:open_task12ax"),
    "DummyDataset": Kind(DummyDatasetKeys, "hvdtrain.data.formats.synthetic:open_dummy"),
}
"""The classes of datasets, by the name that a dataset dict has as 'class'."""

ONE_BY_ONE = ("MapDataset", "FilesDataset")
"""Those of them that RETURNN does not have: what is inside a MapDataset may be read in an order of its own."""

IN_THE_MODEL = "stack the frames in the model, or in map_seq of a MapDataset"

RETURNN_ENTRIES: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "name": (None, ""),
    "estimated_num_seqs": (None, ""),
    "use_cache_manager": (None, ""),
    "unique_seq_tags": ((None, False), "leave repeated sequences out when the file is written"),
    "window": ((None, 1), IN_THE_MODEL),
    "context_window": ((None, 1), IN_THE_MODEL),
    "chunking": ((None, 0, "0"), "set the key chunking outside of the dict, which holds for the training data"),
    "min_chunk_size": ((None, 0), "set the key min_chunk_size outside of the dict, which holds for the training data"),
    "chunking_variance": ((None, 0), "chunks are of equal size"),
    "shuffle_frames_of_nseqs": ((None, 0), "shuffle the frames in map_seq of a MapDataset"),
    "seq_order_seq_lens_file": (
        (None,),
        "sequences are sorted by their own numbers of frames, or those of map_lengths of a MapDataset",
    ),
    "_num_shards": ((1,), "the ranks share the batches of every dataset"),
    "_shard_index": ((0,), "the ranks share the batches of every dataset"),
}
"""Entries that the dict of every dataset of RETURNN may have: the values that ask for nothing here (None: all of them), and what
to do instead of setting another one."""


def take_returnn_entries(where: str, options: dict[str, Any], own: Container[str]) -> list[Problem]:
    """Remove RETURNN's entries from the options of a dataset dict. Returns the problems with those that have a meaning.

    Args:
        where: prefix of option names in messages, such as 'train.'.
        own: the entries that the class of the dataset has itself.
    """
    problems = []
    for name in [name for name in options if name in RETURNN_ENTRIES and name not in own]:
        value = options.pop(name)
        nothing, instead = RETURNN_ENTRIES[name]
        members = list(value.values()) if isinstance(value, dict) else [value]
        if nothing is not None and any(member not in nothing for member in members):
            words = " or ".join(map(repr, nothing))
            problems += problem(
                "unsupported",
                f"{where}{name}: expected {words}, as hvdtrain does not have this key of RETURNN, got {value!r} ({instead})",
            )
    return problems
