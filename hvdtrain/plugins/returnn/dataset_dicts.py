"""Datasets' dicts that are written for RETURNN: it reads those of classes that only it has; entries of others are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.config.keys import declared_keys
from hvdtrain.data.kinds import KINDS, Adapter
from hvdtrain.data.sources import class_name, inner_datasets
from hvdtrain.errors import Problem, problem

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

MULTI_PROC = "MultiProcDataset"
"""The dataset of RETURNN that reads the one inside it by several processes, in whose place ours do."""

ONE_BY_ONE = ("MapDataset", "FilesDataset", "MixingDataset")
"""The kinds that RETURNN does not have, and whose inner datasets RETURNN may therefore read in its own order."""

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

NONE_IN_RETURNN = ("partition_epoch", "repeat_epoch", "random_seed_offset")
"""Keys of the order for whose default None stands in RETURNN's configs."""


def adapt(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """As of `Adapter`."""
    if not isinstance(value, dict):
        return value, []
    if class_name(value) == MULTI_PROC and isinstance(value.get("dataset"), dict):
        return adapt(name, _inner(value), defaults)
    if is_for_returnn(value):  # the defaults of train are keys of the config; RETURNN must not get the others
        return {"class": "ReturnnDataset", "dataset": {**(defaults if name == "train" else {}), **value}}, []
    kind = KINDS.get(class_name(value) or "HDFDataset") if "class" not in value or class_name(value) else None
    value = {entry: given for entry, given in value.items() if given is not None or entry not in NONE_IN_RETURNN}
    declared = [] if kind is None else [key.name for key in declared_keys(kind)]
    return (value, []) if kind is None else _without_entries(f"{name}.", value, declared)


def is_for_returnn(value: Any) -> bool:
    """Whether a dataset, or one inside it, has a class that only RETURNN has: RETURNN then reads all of it."""
    if not isinstance(value, dict) or (kind := class_name(value)) == "ReturnnDataset":
        return False
    if kind in BY_RETURNN or (kind == "HuggingFaceDataset" and "dataset_opts" in value):  # ours has no such entry
        return True
    return kind not in ONE_BY_ONE and any(is_for_returnn(child) for _, child in inner_datasets(value).values())


def inner_of_multi_proc(options: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset inside a MultiProcDataset of RETURNN, with the keys that it passes on to it."""
    outer = ("class", "dataset", "num_workers", "buffer_size", "sharding_method")
    return {**{name: value for name, value in options.items() if name not in outer}, **options["dataset"]}


def _inner(options: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset inside RETURNN's MultiProcDataset, with its processes replaced by ours: for reading, or of a MapDataset."""
    inner = inner_of_multi_proc(options)
    if is_for_returnn(inner) and options.get("num_workers", 1) != 1:
        return {"class": "ReturnnDataset", "dataset": inner, "num_workers": options["num_workers"]}
    if inner.get("class") == "MapDataset":
        inner.setdefault("num_workers", options.get("num_workers", 0))
    return inner


def _without_entries(where: str, options: Mapping[str, Any], declared: list[str]) -> tuple[dict[str, Any], list[Problem]]:
    """A dict without RETURNN's entries that its class does not have; the problems with those that have a meaning."""
    remaining = dict(options)
    problems: list[Problem] = []
    for name in [name for name in remaining if name in RETURNN_ENTRIES and name not in declared]:
        value = remaining.pop(name)
        nothing, instead = RETURNN_ENTRIES[name]
        members = list(value.values()) if isinstance(value, dict) else [value]
        if nothing is not None and any(member not in nothing for member in members):
            words = " or ".join(map(repr, nothing))
            problems += problem(
                "unsupported",
                f"{where}{name}: expected {words}, as hvdtrain does not have this key of RETURNN, got {value!r} ({instead})",
            )
    return remaining, problems


DICTS = Adapter(adapt, (*BY_RETURNN, MULTI_PROC))
