"""The file of the task search, in RETURNN's formats: the text of every sequence's output, or its hypotheses with their scores."""

from __future__ import annotations

import gzip
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.references import as_function
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.forward.outputs import WriterMaker
from hvdtrain.plugins.returnn.keys import SearchKeys
from hvdtrain.plugins.returnn.sizes import is_size, size_name
from hvdtrain.settings import Settings

USUAL_NAMES = ("output", "hyps", "hyp")
"""The output that is written if `search_output_layer` names none: the first of these that is marked, or else the only one."""

USUAL_LABELS = ("classes", "targets")
"""The data keys whose labels are used if several have labels."""

LONG_DICT = 40
"""RETURNN writes an entry of a dict on a separate line from this number of characters on."""


def search_writer(settings: Settings) -> WriterMaker | None:
    """What makes the writer, if the task is search, and the file is wanted."""
    keys = settings.of(SearchKeys)
    return partial(SearchWriter, keys) if settings.run.task == "search" and keys.search_output_file is not None else None


class SearchWriter:
    """Takes the outputs of one sequence after the other. As a context manager, it writes the file, or leaves nothing.

    Args:
        streams: of the dataset, for the labels of its data keys.

    Raises:
        ConfigError: a list of outputs as text, or labels that are not there.
        DataError: the file exists.
    """

    def __init__(self, keys: SearchKeys, streams: Mapping[str, Stream]) -> None:
        if isinstance(keys.search_output_layer, list) and keys.search_output_file_format != "py":
            raise ConfigError.of(
                "conflict", "search_output_file_format: expected 'py' with a list of outputs (search_output_layer), got 'txt'"
            )
        self._path = Path(str(keys.search_output_file))
        if self._path.exists():
            raise DataError(f"{self._path}: expected a file that does not exist yet (search_output_file), got an existing one")
        self._unfinished = self._path.with_name(f"{self._path.name}.unfinished")
        self._wanted = keys.search_output_layer
        self._is_python = keys.search_output_file_format == "py"
        self._text_of_config = text_function(keys.search_labels)
        self._labels = _labels(keys.search_labels, streams)
        self._tags: set[str] = set()

    def __enter__(self) -> SearchWriter:
        with self._errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # The name of the finished file decides whether it is compressed.
            opened = gzip.open if self._path.name.endswith(".gz") else open
            self._file = opened(self._unfinished, "wt", encoding="utf-8")
            if self._is_python:
                self._file.write("{\n")
        return self

    def add(self, tag: str, outputs: Mapping[str, Array]) -> None:
        """Write a sequence. Raises: ConfigError, DataError."""
        entry = self.entry(outputs)
        if self._is_python and tag in self._tags:
            raise DataError(
                f"{self._path}: expected every tag once, as a dict has one value for it, got {tag!r} twice "
                "(search_output_file_format = 'txt' writes a line for each sequence)"
            )
        self._tags.add(tag)
        with numpy.printoptions(threshold=sys.maxsize), self._errors():
            if self._is_python:
                self._file.write(f"{tag!r}: {as_code(entry)},\n")
            else:
                self._file.write(f"{' '.join(str(entry).splitlines())}\n")

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            with self._errors():
                if self._is_python and failed is None:
                    self._file.write("}\n")
                self._file.close()
                if failed is None:
                    os.replace(self._unfinished, self._path)
        except DataError:
            if failed is None:  # otherwise the first error is the one to report
                raise
        finally:
            self._unfinished.unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises: DataError, where the system refuses to write."""
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._path}: expected to be able to write (search_output_file), got: {error.strerror}") from None

    def entry(self, outputs: Mapping[str, Array]) -> Any:
        """What is written of a sequence: a text, an array, a list of (score, text), or a dict. Raises: ConfigError, DataError."""
        if isinstance(self._wanted, list):
            return {name: self._entry(name, outputs) for name in self._wanted}
        return self._entry(self._wanted or _usual_name(outputs), outputs)

    def _entry(self, name: str, outputs: Mapping[str, Array]) -> Any:
        if name not in outputs:
            raise _unknown(name, outputs)
        hypotheses, sizes = _hypotheses(name, outputs)
        if hypotheses is None:
            return self._text(name, outputs[name])
        scores = _scores(name, outputs, len(hypotheses))
        texts = [self._text(name, hypothesis[:size]) for hypothesis, size in zip(hypotheses, sizes, strict=True)]
        return list(zip(scores, texts, strict=True))

    def _text(self, name: str, value: Array) -> Any:
        """Labels as RETURNN writes them, separated by spaces; texts and floats as they are."""
        if value.dtype.kind in "OUS":
            return " ".join(map(str, value.tolist())) if value.ndim else str(value.item())
        if value.dtype.kind not in "iu":
            return value
        text = self._text_of_config(name=name, numbers=value) if self._text_of_config is not None else None
        if text is not None:
            return str(text)
        if not self._labels:
            data_keys = "none of the data keys classes and targets, nor the only data key, has any"
            raise ConfigError.of(
                "missing", f"search_labels: expected labels for the numbers of the output {name!r}, got none: {data_keys}"
            )
        wrong = value[(value < 0) | (value >= len(self._labels))]
        if wrong.size:
            raise DataError(f"output {name!r}: expected numbers below {len(self._labels)} (the labels), got {wrong.flat[0]}")
        return " ".join(self._labels[number] for number in value.reshape(-1).tolist())


def as_code(value: Any) -> str:
    """RETURNN's text of a value, as Python code: lists have a line for each entry, dicts if they are long.

    >>> as_code([(-0.5, "a b"), (-2.0, "a")])
    "[\\n(-0.5, 'a b'),\\n(-2.0, 'a'),\\n]"
    >>> as_code((float("-inf"), "")), as_code({"b": "x", "a": "y"})
    ("(float('-inf'), '')", "{'a': 'y', 'b': 'x'}")
    """
    if isinstance(value, list):
        return "[\n" + "".join(f"{as_code(member)},\n" for member in value) + "]"
    if isinstance(value, tuple):
        return f"({', '.join(map(as_code, value))})"
    if isinstance(value, dict):
        lines = [f"{as_code(name)}: {as_code(member)}" for name, member in sorted(value.items())]
        is_long = sum(map(len, lines)) >= LONG_DICT
        return "{\n" + "".join(f"{line},\n" for line in lines) + "}" if is_long else "{" + ", ".join(lines) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _usual_name(outputs: Mapping[str, Array]) -> str:
    names = [name for name in outputs if not is_size(name)]
    usual = next((name for name in USUAL_NAMES if name in names), None)
    if usual is None and len(names) != 1:
        raise _unknown(None, outputs)
    return usual or names[0]


def _unknown(name: str | None, outputs: Mapping[str, Array]) -> ConfigError:
    marked = ", ".join(name for name in outputs if not is_size(name))
    return ConfigError.of(
        "unknown-value", f"search_output_layer: expected one of the outputs that forward_step marks ({marked}), got {name!r}"
    )


def _hypotheses(name: str, outputs: Mapping[str, Array]) -> tuple[Array | None, list[int]]:
    """The hypotheses of an output, shape (beam, labels), and their sizes; None if it is a single one."""
    value = outputs[name]
    if value.ndim != 2 or value.dtype.kind == "f":
        return None, []
    if size_name(name, 0) in outputs:  # the axis of the beam is the last one
        return value.T, outputs[size_name(name, 0)].tolist()
    sizes = outputs.get(size_name(name, 1))
    return value, [value.shape[1]] * len(value) if sizes is None else sizes.tolist()


def _scores(name: str, outputs: Mapping[str, Array], beam: int) -> list[float]:
    """The scores of the hypotheses, with the digits that their precision has."""
    names = (f"beam_scores_{name}", "beam_scores", "scores")
    scores = next((outputs[name] for name in names if name in outputs), None)
    if scores is None or scores.shape != (beam,):
        rule = f"expected scores of shape ({beam},) for the hypotheses in {name!r}, marked as {' or '.join(names)}"
        raise ConfigError.of(
            "missing", f"search_output_file: {rule}, got {'none' if scores is None else f'shape {scores.shape}'}"
        )
    return [float(str(score)) for score in scores]


def text_function(value: Any) -> Callable[..., Any] | None:
    function = as_function(value, "search_labels") if isinstance(value, str) and ":" in value else value
    return function if callable(function) else None


def _labels(value: Any, streams: Mapping[str, Stream]) -> Sequence[str]:
    """The labels that the config gives, or those of a data key. Raises: ConfigError."""
    if isinstance(value, (list, tuple)):
        return [str(label) for label in value]
    labelled = {name: stream.labels for name, stream in streams.items() if stream.labels}
    if isinstance(value, str) and ":" not in value:
        if value not in labelled:
            names = ", ".join(labelled) or "there is none"
            raise ConfigError.of("unknown-value", f"search_labels: expected a data key with labels ({names}), got {value!r}")
        return labelled[value]
    if len(labelled) == 1:
        return next(iter(labelled.values()))
    return next((labelled[name] for name in USUAL_LABELS if name in labelled), ())
