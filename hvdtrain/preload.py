"""Taking parameters of other models over: which of ours comes from which of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.base import Shapes


@dataclass(frozen=True)
class Preload:
    """One entry of the key `preload_from_files`.

    Attributes:
        filename: the file; its code is never run, only tensors are read.
        prefix: our parameters whose names start with this are taken over; in the file they are without it.
        init_for_train: True: at the beginning of a training; 'always': whenever a training starts, over its own checkpoint;
            False: when not training.
        ignore_missing: ours that are not in the file stay as they are.
        ignore_params, ignore_params_prefixes: names, or beginnings of names, of ours that stay as they are.
        var_name_mapping: by our name the file's, both without the prefix, where they differ.
        checkpoint_key: under which entry of the file the parameters stand, if there is such an entry.
    """

    name: str
    filename: str
    prefix: str = ""
    init_for_train: bool | str = False
    ignore_missing: bool = False
    ignore_params: Sequence[str] = ()
    ignore_params_prefixes: Sequence[str] = ()
    var_name_mapping: Mapping[str, str] = field(default_factory=dict)
    checkpoint_key: str | None = "model"

    def is_due(self, training: bool, fresh: bool) -> bool:
        """Whether to load it: in a training or another task, that starts afresh or goes on from a checkpoint."""
        return self.init_for_train == "always" or (bool(self.init_for_train) and fresh) if training else not self.init_for_train

    def chosen(self, ours: Shapes, theirs: Shapes) -> dict[str, str]:
        """By our name, the file's name of what is taken over.

        Raises:
            CheckpointError: the file lacks some of ours, or has another shape for it.
        """
        found, problems = {}, []
        for name, shape in ours.items():
            short = name.removeprefix(self.prefix)
            ignored = name in self.ignore_params or name.startswith(tuple(self.ignore_params_prefixes))
            if not name.startswith(self.prefix) or ignored:
                continue
            other = self.var_name_mapping.get(short, self.var_name_mapping.get(name, short))
            if other not in theirs:
                if not self.ignore_missing:
                    problems.append(f"{name}: nothing called {other}")
            elif theirs[other] != shape:
                problems.append(f"{name} of shape {shape}: {other} of shape {theirs[other]}")
            else:
                found[name] = other
        if problems or not found:
            lacking = "\n  ".join(problems) if problems else f"none of its names ({', '.join(list(theirs)[:5])}, ...)"
            raise CheckpointError(
                f"preload_from_files.{self.name}: expected the model's parameters{f' {self.prefix}*' if self.prefix else ''} in "
                f"{self.filename}, got:\n  {lacking}"
            )
        return found


def parse_preloads(value: Mapping[str, Any]) -> list[Preload]:
    """The key `preload_from_files`: dicts by name. They come in the order to load them: where several give the same
    parameter, the alphabetically first wins, which is RETURNN's rule.

    Raises:
        ConfigError: all problems.
    """
    known = [member.name for member in fields(Preload) if member.name != "name"]
    problems, made = [], []
    for name in sorted(value, reverse=True):
        entry, where = value[name], f"preload_from_files.{name}"
        if not isinstance(entry, dict) or not isinstance(entry.get("filename"), str):
            problems.append(f"{where}: expected a dict with the entry 'filename', got {entry!r}")
            continue
        unknown = [key for key in entry if key not in known]
        problems += [f"{where}.{key}: expected one of {', '.join(known)}, got {key!r}" for key in unknown]
        if entry.get("init_for_train", False) not in (True, False, "always"):
            problems.append(f"{where}.init_for_train: expected True, False or 'always', got {entry['init_for_train']!r}")
        if not unknown:
            made.append(Preload(name=name, **entry))
    if problems:
        raise ConfigError(problems)
    return made
