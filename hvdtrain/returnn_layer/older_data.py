"""The older keys about the data: `num_inputs` and `num_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def older_extern_data(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """`num_inputs` and `num_outputs` as `extern_data`; None if the config has neither."""
    outputs = values.get("num_outputs")
    if outputs is None and values.get("num_inputs") is None:
        return None
    sizes = dict(outputs) if isinstance(outputs, Mapping) else {"classes": outputs} if outputs is not None else {}
    extern_data = {}
    for name, size in sizes.items():
        if isinstance(size, Mapping):
            extern_data[name] = dict(size)
            continue
        dim, ndim = (*size, 1)[:2] if isinstance(size, (list, tuple)) else (size, 1)
        extern_data[name] = {"dim": dim, "sparse": True} if ndim == 1 else {"dim": dim}
        if name != "data":
            extern_data[name]["available_for_inference"] = False
    if "data" not in extern_data and values.get("num_inputs") is not None:
        extern_data["data"] = {"dim": values["num_inputs"]}
    return extern_data
