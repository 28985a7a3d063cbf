"""Where a training's records are (scores.jsonl, best.json, ends.jsonl and so on): in the folder of its models, or, if the records
there are those of a training with another prefix of model files, in a folder below that."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

STARTS = "starts.jsonl"

SUFFIX = ".records"


def records_of(prefix: Path) -> Path:
    """The folder with the records of the training whose model files have a prefix (the key `model`)."""
    folder = prefix.with_name(prefix.name + SUFFIX)
    return folder if folder.is_dir() or _owner(prefix) not in (None, prefix.name) else prefix.parent


def claim_records(prefix: Path, is_alone: bool) -> None:
    """Called by a training that has the lock of its models: from now on, other trainings write elsewhere.

    Args:
        is_alone: whether no other training in the folder has a lock.

    Raises:
        OSError
    """
    records = records_of(prefix)
    is_first = records == prefix.parent and not (records / STARTS).exists()
    if is_first and not is_alone:  # which of the two is first, neither can know
        records = prefix.with_name(prefix.name + SUFFIX)
    records.mkdir(parents=True, exist_ok=True)


def models_of(records: Path) -> Path:
    """The folder of the models that records are about."""
    return records.parent if records.name.endswith(SUFFIX) else records


def prefix_of(file: Path) -> Path:
    """The prefix of a checkpoint's file.

    >>> prefix_of(Path("exp/model.003.step-20.opt.pt")).name, prefix_of(Path("exp/net.v2.pretrain.001.meta")).name
    ('model', 'net.v2')
    """
    return file.with_name(re.sub(r"(\.pretrain)?\.\d+(\.step-\d+)?(\.opt)?\.\w+$", "", file.name))


def _owner(prefix: Path) -> str | None:
    """The prefix of the model files that the records in a folder are about; None: unknown, or no training has begun there.

    Releases in which trainings shared their records wrote all starts into one file: the first one keeps it.
    """
    folder = prefix.parent
    with suppress(OSError, ValueError, KeyError, TypeError, SyntaxError), (folder / STARTS).open(encoding="utf-8") as file:
        return Path(literal_eval(json.loads(file.readline())["settings"]["model"][0])).name
    owners = {prefix_of(path).name for path in folder.glob("*.opt.*")} if (folder / "scores.jsonl").exists() else set()
    return None if prefix.name in owners else min(owners, default=None)
