"""The key `preload_from_files`: which parameters of the model come from other models' files.

"Ours" are the model's parameters, "theirs" those of a file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import ALONE, REQUIRED, Section, Sections, key
from hvdtrain.config.references import as_function
from hvdtrain.errors import CheckpointError, ConfigError, Problem, problem
from hvdtrain.learner.frameworks import FRAMEWORKS, backends_with
from hvdtrain.learner.model_format import is_safetensors, missing_package
from hvdtrain.learner.preload import MakeMissing, PreloadNames, Shapes
from hvdtrain.training.run_keys import RunKeys


@dataclass(frozen=True, kw_only=True)
class PreloadKeys:
    """An entry of the key `preload_from_files`."""

    filename: str | None = key(
        REQUIRED,
        "the file; only tensors are read from it, no code is run; None: our parameters that start with the prefix or match the "
        "pattern may be missing from the files of the other entries",
    )
    prefix: str = key("", "load our parameters whose names start with this; in the file, the names do not have the prefix")
    pattern: str | None = key(None, "for an entry without a file: names with the wildcards * and ?")
    init_for_train: bool | Literal["always"] = key(
        False,
        "True: load at the beginning of a training; 'always': load at every start of every task, and keep these parameters "
        "constant: they are neither trained nor saved; False: load in all tasks except training",
    )
    ignore_missing: bool = key(
        False, "whether our parameters that are not in the file keep their values, instead of being an error"
    )
    ignore_params: list[str] = key([], "names of our parameters that keep their values")
    ignore_params_prefixes: list[str] = key([], "prefixes of such names")
    var_name_mapping: dict[str, str] = key({}, "maps our names to the file's where they differ; with or without the prefix")
    checkpoint_key: str | None = key("model", "the entry of the file that contains the parameters, if the file has it")
    custom_missing_load_func: Callable[..., Any] | str | None = key(
        None,
        "a function (*, name, shape, preload_model_state, **_) that returns the value of a parameter that is not in the file, or "
        "None; preload_model_state has the file's tensors by our names",
    )


@dataclass(frozen=True, kw_only=True)
class Preload(PreloadKeys):
    """An entry with its name."""

    name: str

    @property
    def is_constant(self) -> bool:
        """Whether the parameters keep the values of the file throughout training."""
        return self.init_for_train == "always"

    def is_due(self, training: bool, fresh: bool) -> bool:
        """Whether to load the file, once the model is built.

        Args:
            training: whether the task is training.
            fresh: whether it starts without a checkpoint.
        """
        return not self.is_constant and (bool(self.init_for_train) and fresh if training else not self.init_for_train)

    def choose(self, ours: Shapes, theirs: Shapes) -> PreloadNames:
        """Match the file's tensors with ours.

        Raises:
            CheckpointError: none of our parameters is in the file, or one has a different shape there.
        """
        renamed = self._rename(ours, theirs)
        sources = {name: renamed[name] for name in ours if name in renamed}
        problems = [
            f"{name} of shape {ours[name]}: {source} of shape {theirs[source]}"
            for name, source in sources.items()
            if theirs[source] != ours[name]
        ]
        if problems or not sources:
            raise self.error(problems or [f"none of its names ({', '.join(list(theirs)[:5])}, ...)"])
        return PreloadNames(sources, renamed)

    def missing(self, ours: Iterable[str], loaded: Iterable[str]) -> list[str]:
        """Our parameters that should have been in the file, but were not loaded."""
        missing = [] if self.ignore_missing else sorted(set(ours) - set(loaded))
        return [name for name in missing if name.startswith(self.prefix) and not self._is_ignored(name)]

    def keeps(self, name: str) -> bool:
        """Whether the entry says that a parameter which is in no file keeps its values."""
        is_of_entry = self.filename is not None and name.startswith(self.prefix)
        return self.allows_missing(name) or (is_of_entry and (self.ignore_missing or self._is_ignored(name)))

    def allows_missing(self, name: str) -> bool:
        """Whether this is an entry without a file that allows our parameter to be missing from the other files."""
        if self.filename is not None:
            return False
        return fnmatch.fnmatchcase(name, self.pattern) if self.pattern is not None else name.startswith(self.prefix)

    def maker(self) -> MakeMissing | None:
        """The function that makes values for our parameters that are not in the file, if any. Raises: ConfigError."""
        function = as_function(self.custom_missing_load_func, f"preload_from_files.{self.name}.custom_missing_load_func")
        if function is None:
            return None
        return lambda name, shape, state: function(name=name, shape=shape, preload_model_state=state)

    def error(self, problems: Sequence[str]) -> CheckpointError:
        names = f" {self.prefix}*" if self.prefix else ""
        lines = "\n  ".join(problems)
        return CheckpointError(
            f"preload_from_files.{self.name}: expected the model's parameters{names} in {self.filename}, got:\n  {lines}"
        )

    def _rename(self, ours: Shapes, theirs: Iterable[str]) -> dict[str, str]:
        """Map our names to the file's, without ignored parameters."""
        here = {self.prefix + name: name for name in theirs}
        for new, old in self.var_name_mapping.items():
            source = here.pop(old if old in here else self.prefix + old, None)
            target = new if new in ours else self.prefix + new
            here.pop(target, None)
            if source is not None:
                here[target] = source
        return {name: source for name, source in here.items() if not self._is_ignored(name)}

    def _is_ignored(self, name: str) -> bool:
        return name in self.ignore_params or name.startswith(tuple(self.ignore_params_prefixes))


def parse_preloads(value: Mapping[str, Any]) -> list[Preload]:
    """Parse the key `preload_from_files`, a dict of dicts, into the order in which to load the files.

    If several files have the same parameter, the entry whose name is alphabetically first is loaded last and takes precedence.

    Raises:
        ConfigError: with all problems.
    """
    problems: list[Problem] = []
    preloads = []
    for name in sorted(value, reverse=True):
        entry = value[name]
        where = f"preload_from_files.{name}"
        if not isinstance(entry, dict):
            problems += problem("wrong-type", f"{where}: expected a dict with the entry 'filename', got {entry!r}")
            continue
        may_be_none = ("filename", "checkpoint_key")  # recipes write None for what they leave out
        options = {
            option: sorted(setting) if isinstance(setting, set) else setting
            for option, setting in entry.items()
            if setting is not None or option in may_be_none
        }
        keys, wrong = build(PreloadKeys, options, f"{where}.", {})
        problems += [*wrong, *unknown_options(f"{where}.", options, PreloadKeys, "preload_from_files")]
        if keys is None:
            continue
        if keys.filename is None and keys.pattern is None and not keys.prefix:
            problems += problem("missing", f"{where}: expected a pattern or a prefix if filename is None, got neither")
        if keys.filename is not None and keys.pattern is not None:
            problems += problem(
                "conflict", f"{where}.pattern: expected None if there is a filename, got {keys.pattern!r} (use prefix)"
            )
        preloads.append(Preload(name=name, **vars(keys)))
    if problems:
        raise ConfigError(problems)
    return preloads


@dataclass(frozen=True, kw_only=True)
class PreloadFilesKeys(Section):
    """Parameters from other models."""

    preload_from_files: dict[str, Any] = key(
        {},
        "parameters to load from other models: for each name a dict of filename, prefix, init_for_train, ignore_missing, "
        "ignore_params, ignore_params_prefixes, var_name_mapping, checkpoint_key, pattern, custom_missing_load_func "
        "(docs/resuming.md)",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        try:
            preloads = parse_preloads(self.preload_from_files)
        except ConfigError as error:
            return error.problems
        problems: list[Problem] = []
        for preload in preloads:
            if preload.filename is not None and is_safetensors(preload.filename):
                problems += missing_package(f"preload_from_files.{preload.name}")
        run = sections.get(RunKeys)
        if run is not None and "constant parameters" not in FRAMEWORKS[run.backend].features:
            for preload in preloads:
                if preload.is_constant:
                    where = f"preload_from_files.{preload.name}.init_for_train"
                    wanted = f"backend = {backends_with('constant parameters')}"
                    problems += problem("needs-backend", f"{where}: expected {wanted} for 'always', got {run.backend!r}")
        return problems
