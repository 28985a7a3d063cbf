"""Older ways to describe the data: `num_inputs` and `num_outputs`, and pairs instead of dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        extern_data[name] = entry_of(size if isinstance(size, (list, tuple)) else (size, 1))
        if name != "data":
            extern_data[name]["available_for_inference"] = False
    if "data" not in extern_data and values.get("num_inputs") is not None:
        extern_data["data"] = entry_of((values["num_inputs"], 1 if values.get("sparse_input") else 2))
    return extern_data


def entry_of(size: Sequence[Any]) -> dict[str, Any]:
    """An entry of `extern_data` for a size and a number of axes (1, if it is left out): labels have one.

    >>> entry_of((9001, 1)), entry_of([40, 2]), entry_of((3, 3))
    ({'dim': 9001, 'sparse': True}, {'dim': 40}, {'dim': 3, 'shape': (None, None, 3)})
    """
    dim, ndim = (*size, 1)[:2]
    if ndim == 1:
        return {"dim": dim, "sparse": True}
    return {"dim": dim} if ndim == 2 else {"dim": dim, "shape": (*[None] * (ndim - 1), dim)}


def with_entries(extern_data: Any) -> Any:
    """`extern_data` with dicts instead of pairs."""
    if not isinstance(extern_data, Mapping):
        return extern_data
    return {name: entry_of(entry) if isinstance(entry, (list, tuple)) else entry for name, entry in extern_data.items()}
