"""The classes of datasets that a config can name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import REQUIRED, key
from hvdtrain.data.combine.many_files import FilesDatasetKeys, open_files
from hvdtrain.data.combine.map import MapDatasetKeys, open_map
from hvdtrain.data.combine.meta import MetaDatasetKeys, open_meta
from hvdtrain.data.combine.union import CombinedDatasetKeys, ConcatDatasetKeys, open_combined, open_concat
from hvdtrain.data.formats.synthetic import DummyDatasetKeys, Task12AXDatasetKeys, open_dummy, open_task12ax
from hvdtrain.data.types import Dataset, External

OWN = {
    "FolderDataset": "hvdtrain.data.formats.folder:FolderDataset",
    "HuggingFaceDataset": "hvdtrain.data.formats.hugging_face:HuggingFaceDataset",
    "ReturnnDataset": "hvdtrain.data.formats.returnn_source:ReturnnDataset",
}
"""Sources to convert, whose lengths are not known beforehand; the dict's other entries are their arguments."""

BY_RETURNN = tuple(
    "AnythingDataset BlissDataset ChunkShuffleDataset ClusteringDataset ConcatSeqsDataset ConfusionNetworkDataset "
    "CopyTaskDataset DummyDatasetMultipleDataKeys DummyDatasetMultipleSequenceLength DummyGenericDataset Enwik8Corpus "
    "ExternSprintDataset LibriSpeechCorpus LmDataset MapDatasetWrapper MegatronDataset MultiEpochDataset NemoSpeechDataset "
    "NltkTimitDataset NumpyDumpDataset OggZipDataset RawWavDataset SiameseHDFDataset SprintCacheDataset StaticDataset "
    "StereoHdfDataset TaskEpisodicCopyDataset TaskNumberBaseConvertDataset TaskVariableAssignmentDataset "
    "TaskXmlModelingDataset TextDictDataset TimitDataset TranslationDataset TranslationFactorsDataset VariableDataset".split()
)
"""Datasets of RETURNN that there is no counterpart of: RETURNN itself reads them, for hvdtrain dump."""


@dataclass(frozen=True, kw_only=True)
class HDFDatasetKeys:
    """Keys of a dataset dict with `"class": "HDFDataset"`."""

    files: str | list[str] = key(REQUIRED, "the HDF file, or a list of files that are read as one dataset")
    allow_external: bool = key(
        False,
        "follow external links, external storage and virtual datasets, by which a file makes the trainer read other files; "
        "such files are not copied to cache_dir",
    )


@dataclass(frozen=True, kw_only=True)
class NextGenHDFDatasetKeys:
    """Keys of a dataset dict with `"class": "NextGenHDFDataset"`: HDF files with a dataset for every sequence."""

    files: str | list[str] = key(REQUIRED, "the HDF file, or a list of files that are read as one dataset")
    input_stream_name: str = key(REQUIRED, "the stream that is the data key 'data'; the others have their own names")

    def problems(self) -> list[str]:
        """What is wrong with the keys."""
        return [] if self.files else ["files: expected at least one file, got none"]


@dataclass(frozen=True)
class Kind:
    """A class of datasets.

    Attributes:
        keys: the section of its keys. The keys `dataset` and `datasets` hold datasets, in which it is composed.
        open: from the config key it stands under (for messages), its keys and the open datasets inside it, by name.
        order_from: the name of the dataset inside it whose order keys hold for the whole one; None: there is none.
    """

    keys: type
    open: Callable[[str, Any, Mapping[str, Dataset]], Dataset]
    order_from: Callable[[Any], str | None] = lambda keys: None


def _open_hdf(where: str, keys: HDFDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    from hvdtrain.data.hdf.dataset import open_hdf  # here, as `--help` has no time for h5py

    external: External = "follow" if keys.allow_external else "refuse"
    return open_hdf([keys.files] if isinstance(keys.files, str) else keys.files, external)


def _open_files(where: str, keys: FilesDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    from hvdtrain.data.hdf.dataset import open_hdf

    return open_files(where, keys, lambda path: open_hdf([path]))


def _open_next_gen(where: str, keys: NextGenHDFDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    from hvdtrain.data.hdf.nextgen import open_next_gen

    return open_next_gen(where, [keys.files] if isinstance(keys.files, str) else keys.files, keys.input_stream_name)


KINDS: dict[str, Kind] = {
    "HDFDataset": Kind(HDFDatasetKeys, _open_hdf),
    "NextGenHDFDataset": Kind(NextGenHDFDatasetKeys, _open_next_gen),
    "FilesDataset": Kind(FilesDatasetKeys, _open_files),
    "MetaDataset": Kind(MetaDatasetKeys, open_meta, lambda keys: keys.control),
    "CombinedDataset": Kind(CombinedDatasetKeys, open_combined),
    "ConcatDataset": Kind(ConcatDatasetKeys, open_concat),
    "MapDataset": Kind(MapDatasetKeys, open_map, lambda keys: "dataset"),
    "Task12AXDataset": Kind(Task12AXDatasetKeys, open_task12ax),
    "DummyDataset": Kind(DummyDatasetKeys, open_dummy),
}
"""The classes of datasets by the name that a dataset dict gives as 'class'."""

INSTEAD = {"PostprocessingDataset": "MapDataset", "DistributeFilesDataset": "FilesDataset", "MultiProcDataset": "MapDataset"}
"""Classes of RETURNN for which there is one of another name, with other keys."""
