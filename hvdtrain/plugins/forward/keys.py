"""The keys of the tasks forward and search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key


@dataclass(frozen=True, kw_only=True)
class ForwardKeys(Section):
    """Where the outputs of the tasks forward and search go: into a file, to a callback, or both."""

    output_file: str | None = key(None, "an HDF file for the outputs that forward_step marks; it must not exist yet")
    forward_callback: Any = key(
        None,
        "an object, or a function or class that makes one, with the methods init(*, model), process_seq(*, seq_tag, outputs) "
        "and finish(); called on rank 0, sequence by sequence in the dataset's order; in JSON 'module:name'",
    )
