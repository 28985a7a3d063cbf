"""What wandb's offline mode wrote, read back: the files that `wandb sync` would send."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, RECORD = 7, 32768, 7
"""Bytes of the file's header, of a block, and of the header of a record or of a piece of one: LevelDB's log format."""


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file as wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, record = file.read_bytes(), HEADER, b""
    while at + RECORD <= len(content):
        if BLOCK - at % BLOCK < RECORD:  # no header fits into the rest of the block
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + RECORD : at + RECORD + length]
        at += RECORD + length
        if kind in (1, 4):  # whole, or its last piece
            yield Record.FromString(record)
            record = b""


def history(file: Path) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    rows = [one.history for one in records(file) if one.WhichOneof("record_type") == "history"]
    return [{entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in row.item} for row in rows]


def config(file: Path) -> dict[str, Any]:
    """The config of the run."""
    found: dict[str, Any] = {}
    for one in records(file):
        kind = one.WhichOneof("record_type")
        updates = one.run.config.update if kind == "run" else one.config.update if kind == "config" else []
        found |= {entry.key or "/".join(entry.nested_key): json.loads(entry.value_json) for entry in updates}
    return found
