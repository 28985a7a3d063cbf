"""The keys of the file that RETURNN's task search writes, of functions of epochs, and of NextGenHDFDataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdtrain.config.keys import REQUIRED, Section, key
from hvdtrain.data.keys import FileDatasetKeys


@dataclass(frozen=True, kw_only=True)
class SearchKeys(Section):
    """The file of the task search, as RETURNN writes it."""

    search_output_file: str | None = key(
        None, "task search: a file for the texts of an output, in the dataset's order; with .gz compressed; it must not exist yet"
    )
    search_output_file_format: Literal["txt", "py"] = key(
        "txt", "txt, a line for each sequence, or py, a dict from tags to texts; several hypotheses are a list of (score, text)"
    )
    search_output_layer: str | list[str] | None = key(
        None,
        "which output goes into search_output_file; None: 'output', 'hyps', 'hyp' or the only one; a list, for the format py: "
        "several, as dicts",
    )
    search_labels: Any = key(
        None,
        "the labels of the numbers in search_output_file: a list, the name of a data key that has labels, or a function "
        "{signature} that returns the text; None: those of the data key classes or targets, or the only one that has labels",
        signature="*, name, numbers, **_",
    )


@dataclass(frozen=True, kw_only=True)
class NextGenHDFDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "NextGenHDFDataset"`: HDF files with a dataset for every sequence."""

    opener: ClassVar[str] = "hvdtrain.plugins.returnn.nextgen:open_next_gen"

    input_stream_name: str = key(REQUIRED, "the stream that is the data key 'data'; the others have their own names")


@dataclass(frozen=True, kw_only=True)
class EpochFunctionKeys(Section):
    """Functions that are called before and after epochs, as in RETURNN."""

    epoch_start: Callable[..., Any] | str | None = key(
        None,
        "function {signature}, called before an epoch's training and evaluations",
        signature="*, epoch, step, model, dataset_name, **_",
    )
    epoch_end: Callable[..., Any] | str | None = key(
        None,
        "function {signature}, called after an epoch's training and evaluations",
        signature="*, epoch, step, model, dataset_name, **_",
    )
