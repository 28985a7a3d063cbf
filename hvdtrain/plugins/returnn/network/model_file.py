"""Files with a network: a checkpoint of TensorFlow under RETURNN's names, and hvdtrain's progress next to it.

A model `PREFIX` consists of PREFIX.data-00000-of-00001, PREFIX.meta, PREFIX.progress and PREFIX.index, which is put into place
last: the model exists once it does. The optimizer's and the ranks' files are those of the other TensorFlow framework.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.contents import FileFormat
from hvdtrain.learner.model_format import unreadable_error
from hvdtrain.plugins.tensorflow.model_file import file_format

PROGRESS = ".progress"


@dataclass(frozen=True)
class StoredNetwork:
    """A network in files.

    Attributes:
        prefix: of TensorFlow's files.
        epoch: in which it was trained; None: unknown.
    """

    prefix: str
    epoch: int | None


def read_arrays(file: Path) -> dict[str, Array]:
    """The variables in a checkpoint of TensorFlow, given its prefix or one of its files. Raises: CheckpointError."""
    try:
        reader = tf.train.load_checkpoint(prefix_of(file))
        return {name: numpy.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, ValueError) as error:
        raise unreadable_error(file, error) from None


def prefix_of(file: Path) -> str:
    """The prefix of TensorFlow's files, given it or one of them."""
    return re.sub(r"\.(index|meta|progress|data-\d{5}-of-\d{5})$", "", str(file.absolute()))


def _write_model(meta: Callable[[], bytes], path: Path, arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    """Write a network's variables and the progress. The index is written to `path`, whose name ends with an additional suffix.
    Raises: OSError, RuntimeError, if the disk is full."""
    name = re.sub(r"\.index\.\w+$", "", path.name)
    folder = path.with_name(f"{name}.bundle{path.suffix}")  # recognized as unfinished by its suffix
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        bundle = str(folder / "bundle")
        names = sorted(arrays)
        try:
            tf.raw_ops.SaveV2(
                prefix=bundle,
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                tensors=[tf.constant(arrays[name]) for name in names],
            )
        except tf.errors.OpError as error:
            raise OSError(str(error).splitlines()[0]) from error
        (folder / "progress").write_text(json.dumps(progress), encoding="utf-8")
        (folder / "meta").write_bytes(meta())
        _move(folder / "meta", path.with_name(f"{name}.meta"))
        [data] = folder.glob("bundle.data-*")
        _move(data, path.with_name(f"{name}{data.name.removeprefix('bundle')}"))
        _move(folder / "progress", path.with_name(f"{name}{PROGRESS}"))
        os.replace(f"{bundle}.index", path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Move a file that has reached the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


def _read_model(file: Path) -> dict[str, Any]:
    """The progress, and under "model" where the network is. Raises: CheckpointError."""
    prefix = prefix_of(file)
    progress_file = Path(f"{prefix}{PROGRESS}")
    try:
        reader = tf.train.load_checkpoint(prefix)
        step = int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else 0
        if progress_file.exists():
            progress = json.loads(progress_file.read_text(encoding="utf-8"))
        else:  # RETURNN's
            number = re.search(r"\.(\d+)$", prefix)
            progress = {"epoch": int(number.group(1)) if number else 0, "step": step}
        if not isinstance(progress, dict):
            raise ValueError(f"{progress_file.name} is not a dict")
    except (tf.errors.OpError, OSError, ValueError) as error:
        raise unreadable_error(file, error) from None
    return {**progress, "model": {"stored": StoredNetwork(prefix, progress.get("epoch") or None)}}


def network_format(meta: Callable[[], bytes]) -> FileFormat:
    """The files of networks.

    Args:
        meta: returns the present network's graph.
    """
    return replace(file_format("npz"), write_model=partial(_write_model, meta), read_model=_read_model)
