"""The classes of datasets that a config can name, and where they are implemented."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.config.absent import absent
from hvdtrain.config.keys import key
from hvdtrain.config.plugins import Registry
from hvdtrain.data.combine.keys import (
    CombinedDatasetKeys,
    ConcatDatasetKeys,
    FilesDatasetKeys,
    MixingDatasetKeys,
)
from hvdtrain.data.dataset import SequenceSource
from hvdtrain.data.keys import DatasetKeys, FileDatasetKeys
from hvdtrain.data.remote import is_remote
from hvdtrain.errors import ConfigError, Problem, problem

SOURCES: Registry[type] = Registry("sources")
"""Sources whose lengths are not known in advance; the other entries of the dict are their arguments."""


def iterable_source(where: str, iterable: Any) -> SequenceSource:
    """An iterable as a source of sequences. Raises: ConfigError, if the plug-in that reads iterables is missing."""
    if "IterableDataset" not in SOURCES:
        raise ConfigError.of(
            "unknown-value",
            f"{where}: expected data with __len__ and __getitem__, got an iterable{absent('IterableDataset')}",
        )
    source: SequenceSource = SOURCES["IterableDataset"](iterable)
    return source


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

    opener: ClassVar[str] = "hvdtrain.data.hdf.dataset:open_hdf_dataset"

    allow_external: bool = key(
        False,
        "follow external links, external storage and virtual datasets, by which a file makes the trainer read other files; "
        "such files are not copied to cache_dir",
    )

    def files_to_copy(self) -> tuple[str, ...]:
        # Paths to other files are relative to the file that contains them, so a copy would not find them.
        return () if self.allow_external else self.data_files()

    def problems(self) -> list[Problem]:
        remote = [path for path in self.data_files() if is_remote(path)] if self.allow_external else []
        return super().problems() + [
            Problem.of(
                "conflict", f"allow_external: expected False for remote files, which are copied alone, got True with {path}"
            )
            for path in remote[:1]
        ]


KINDS: Registry[type[DatasetKeys]] = Registry(
    "datasets",
    {
        "HDFDataset": HDFDatasetKeys,
        "FilesDataset": FilesDatasetKeys,
        "CombinedDataset": CombinedDatasetKeys,
        "ConcatDataset": ConcatDatasetKeys,
        "MixingDataset": MixingDatasetKeys,
    },
)
"""The keys of each kind of dataset, with its opener, by the name that a dataset dict has as 'class'."""

ONE_BY_ONE = ("MapDataset", "FilesDataset", "MixingDataset")
"""The kinds that RETURNN does not have, and whose inner datasets RETURNN may therefore read in its own order."""


def inner_of_multi_proc(options: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset inside a MultiProcDataset of RETURNN, with the keys that it passes on to it."""
    outer = ("class", "dataset", "num_workers", "buffer_size", "sharding_method")
    return {**{name: value for name, value in options.items() if name not in outer}, **options["dataset"]}


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
"""Entries that every dataset dict of RETURNN may have: the values that can be ignored here (None: all of them), and what to do
instead of setting another one."""


def take_returnn_entries(where: str, options: dict[str, Any], known: Container[str]) -> list[Problem]:
    """Remove RETURNN's entries from the options of a dataset dict. Returns the problems with those that have a meaning.

    Args:
        where: prefix of option names in messages, such as 'train.'.
        own: the entries that the class of the dataset has itself.
    """
    problems = []
    for name in [name for name in options if name in RETURNN_ENTRIES and name not in known]:
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
