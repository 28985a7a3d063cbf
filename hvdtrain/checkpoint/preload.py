"""Taking parameters of other models over: which of ours comes from which of theirs."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.base import MakeMissing, PreloadFunction, PreloadNames, Shapes, as_function


@dataclass(frozen=True)
class Preload:
    """One entry of the key `preload_from_files`, with RETURNN's meaning.

    Attributes:
        filename: the file; its code is never run, only tensors are read. None: there is no file, and ours that begin with the
            prefix, or fit the pattern, may be missing from the other entries' files.
        prefix: our parameters whose names start with this are taken over; in the file they are without it.
        pattern: where there is no file: names with * and ?.
        init_for_train: True: at the beginning of a training; 'always': at every start of every task, and then they are constant:
            neither trained nor saved; False: when not training.
        ignore_missing: ours that are not in the file stay as they are.
        ignore_params, ignore_params_prefixes: names, or beginnings of names, of ours that stay as they are.
        var_name_mapping: by our name the file's, where they differ; with the prefix or without it.
        checkpoint_key: under which entry of the file the parameters stand, if there is such an entry.
        custom_missing_load_func: a function (*, name, shape, preload_model_state, **_) that returns the values of a parameter
            that is not in the file, or None; it gets what is in the file by the names it has here.
    """

    name: str
    filename: str | None
    prefix: str = ""
    pattern: str | None = None
    init_for_train: bool | str = False
    ignore_missing: bool = False
    ignore_params: Sequence[str] = ()
    ignore_params_prefixes: Sequence[str] = ()
    var_name_mapping: Mapping[str, str] = field(default_factory=dict)
    checkpoint_key: str | None = "model"
    custom_missing_load_func: Callable[..., Any] | str | None = None

    @property
    def is_constant(self) -> bool:
        """Whether its parameters are those of the file at all times."""
        return self.init_for_train == "always"

    def is_due(self, training: bool, fresh: bool) -> bool:
        """Whether to load it: in a training or another task, that starts afresh or goes on from a checkpoint."""
        return not self.is_constant and (bool(self.init_for_train) and fresh if training else not self.init_for_train)

    def choose(self, ours: Shapes, theirs: Shapes) -> PreloadNames:
        """Which tensors of the file belong to which of ours.

        Raises:
            CheckpointError: the file has nothing for us, or another shape for it.
        """
        renamed = self._renamed(ours, theirs)
        sources = {name: renamed[name] for name in ours if name in renamed}
        problems = [
            f"{name} of shape {ours[name]}: {other} of shape {theirs[other]}"
            for name, other in sources.items()
            if theirs[other] != ours[name]
        ]
        if problems or not sources:
            raise self.wrong(problems or [f"none of its names ({', '.join(list(theirs)[:5])}, ...)"])
        return PreloadNames(sources, renamed)

    def lacking(self, ours: Iterable[str], taken: Iterable[str]) -> list[str]:
        """Which of ours ought to have been in the file."""
        missing = [] if self.ignore_missing else sorted(set(ours) - set(taken))
        return [name for name in missing if name.startswith(self.prefix) and not self._is_ignored(name)]

    def excuses(self, name: str) -> bool:
        """Whether one of ours need not be in any file, as this entry without a file says."""
        if self.filename is not None:
            return False
        return fnmatch.fnmatchcase(name, self.pattern) if self.pattern is not None else name.startswith(self.prefix)

    def maker(self) -> MakeMissing | None:
        """What makes values for those of ours that are not in the file. Raises: ConfigError."""
        function = as_function(self.custom_missing_load_func, f"preload_from_files.{self.name}.custom_missing_load_func")
        if function is None:
            return None
        return lambda name, shape, state: function(name=name, shape=shape, preload_model_state=state)

    def wrong(self, problems: Sequence[str]) -> CheckpointError:
        """The error about the file."""
        whose = f" {self.prefix}*" if self.prefix else ""
        lines = "\n  ".join(problems)
        return CheckpointError(
            f"preload_from_files.{self.name}: expected the model's parameters{whose} in {self.filename}, got:\n  {lines}"
        )

    def _renamed(self, ours: Shapes, theirs: Iterable[str]) -> dict[str, str]:
        """The file's names by those that they have here, without what is to be ignored."""
        here = {self.prefix + name: name for name in theirs}
        for new, old in self.var_name_mapping.items():
            source = here.pop(old if old in here else self.prefix + old, None)
            target = new if new in ours else self.prefix + new
            here.pop(target, None)
            if source is not None:
                here[target] = source
        return {name: other for name, other in here.items() if not self._is_ignored(name)}

    def _is_ignored(self, name: str) -> bool:
        return name in self.ignore_params or name.startswith(tuple(self.ignore_params_prefixes))


def take_over(preloads: Sequence[Preload], load: PreloadFunction) -> list[str]:
    """Take parameters over from all the files, in this order; return their names.

    Args:
        load: a state's `preload`.

    Raises:
        CheckpointError: a file cannot be read, or lacks parameters that no other one has.
    """
    taken: set[str] = set()
    lacking: list[tuple[Preload, list[str]]] = []
    for one in preloads:
        if one.filename is not None:
            ours, own = load(Path(one.filename), one.checkpoint_key, one.choose, one.maker())
            taken.update(own)
            lacking.append((one, one.lacking(ours, own)))
    for one, names in lacking:
        problems = [name for name in names if name not in taken and not any(other.excuses(name) for other in preloads)]
        if problems:
            raise one.wrong([f"{name}: nothing for it" for name in problems])
    return sorted(taken)


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
        if not isinstance(entry, dict) or not isinstance(entry.get("filename", 0), (str, type(None))):
            problems.append(f"{where}: expected a dict with the entry 'filename', got {entry!r}")
            continue
        unknown = [key for key in entry if key not in known]
        problems += [f"{where}.{key}: expected one of {', '.join(known)}, got {key!r}" for key in unknown]
        if entry.get("init_for_train", False) not in (True, False, "always"):
            problems.append(f"{where}.init_for_train: expected True, False or 'always', got {entry['init_for_train']!r}")
        if entry["filename"] is None and entry.get("pattern") is None and not entry.get("prefix"):
            problems.append(f"{where}: expected a pattern or a prefix where filename is None, got neither")
        if entry["filename"] is not None and entry.get("pattern") is not None:
            problems.append(f"{where}.pattern: expected None beside a file, where prefix says which, got {entry['pattern']!r}")
        if not unknown:
            made.append(Preload(name=name, **entry))
    if problems:
        raise ConfigError(problems)
    return made
