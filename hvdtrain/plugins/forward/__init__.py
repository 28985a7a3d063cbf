"""The tasks forward and search: a trained model's outputs, sequence by sequence, go into files or to a callback."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class ForwardKeys(Section):
    """Where the outputs of the tasks forward and search go: into a file, to a callback, or both."""

    output_file: str | None = key(None, "an HDF file for the outputs that forward_step marks; it must not exist yet")
    forward_callback: Any = key(
        None,
        "an object, or a function or class that makes one, with the methods init(*, model), process_seq(*, seq_tag, outputs) "
        "and finish(); called on rank 0, sequence by sequence in the dataset's order; in JSON 'module:name'",
    )


PLUGIN = Plugin(
    tasks=dict.fromkeys(("forward", "search"), f"{__name__}.task:forward_all"),
    keys={"forward": ForwardKeys},
    needs={"hdf_tools": "output_file"},
)
