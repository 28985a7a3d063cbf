"""Errors of RETURNN about a network as errors of the config: the layer, and the line of the config."""

from __future__ import annotations

import io
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.runtime import log

CREATING = re.compile(r"(?:TypeError|Exception) creating layer \S*?/?'([^']+)' of class (\w+)")
"""What RETURNN prints about a layer that it cannot create."""


@contextmanager
def building(texts: Mapping[str, str], description: Mapping[str, Any]) -> Iterator[None]:
    """Translate errors of RETURNN, while it builds a network, into ConfigError.

    Args:
        texts: the text of each config file, by its path.
        description: the dict of layers.
    """
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    except HvdtrainError:
        raise
    except Exception as error:  # RETURNN raises errors of many kinds, or an assert fails
        for line in printed.getvalue().splitlines():
            log.debug(line)
        raise _config_error(error, printed.getvalue(), texts, description) from error
    for line in printed.getvalue().splitlines():
        log.debug(line)


def _config_error(error: Exception, printed: str, texts: Mapping[str, str], description: Mapping[str, Any]) -> ConfigError:
    match = CREATING.search(printed)
    layer = getattr(error, "layer_name", None) or (match.group(1) if match else None) or _layer_in_traceback(error)
    reason = " ".join(str(error).split()) or "an assertion failed"
    kind = type(error).__name__
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if layer is None and any(Path(code.co_filename).name == "updater.py" and "optimizer" in code.co_name for code in frames):
        return ConfigError.of(
            "wrong-result",
            f"optimizer: expected one that RETURNN can build, got {kind}: {reason} (RETURNN cannot use today's classes of Keras, "
            "such as sgd and adamw; adam, nadam, momentum, rmsprop and gradientdescent are TensorFlow's or its own)",
        )
    where = "network" if layer is None else f"network: layer {layer!r}"
    if layer is not None:
        options = _options_of(layer, description)
        where += f" of class {options['class']!r}" if isinstance(options, Mapping) and "class" in options else ""
        where += _place(layer, texts)
    return ConfigError.of("wrong-result", f"{where}: expected a layer that RETURNN can build, got {kind}: {reason}")


def _layer_in_traceback(error: Exception) -> str | None:
    layer = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_locals.get("name")
        if frame.f_code.co_name in ("construct_layer", "_construct_layer", "add_layer") and isinstance(name, str):
            layer = name
    return layer


def _options_of(layer: str, description: Mapping[str, Any]) -> Any:
    """The options of a layer, whose name may be a path."""
    options: Any = description
    for name in layer.split("/"):
        inside = options.get("unit", options.get("subnetwork")) if options is not description else options
        options = inside.get(name) if isinstance(inside, Mapping) else None
        if not isinstance(options, Mapping):
            return None
    return options


def _place(layer: str, texts: Mapping[str, str]) -> str:
    """' (config.py, line 12)' where a layer's name is written as a key of a dict, or else anywhere; '' if it is not found."""
    name = re.escape(layer.rpartition("/")[2].removeprefix("data:"))
    definition = rf"""["']{name}["']\s*:|\[["']{name}["']\]\s*="""
    for pattern, (path, text) in product((definition, rf"""["']{name}["']"""), texts.items()):
        if match := re.search(pattern, text):
            return f" ({Path(path).name}, line {text[: match.start()].count(chr(10)) + 1})"
    return ""
