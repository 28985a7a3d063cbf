"""The key `preload_from_files`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.frameworks import FRAMEWORKS, backends_with
from hvdtrain.learner.model_format import is_safetensors, missing_package
from hvdtrain.plugins.preload.entries import Preload, parse_preloads
from hvdtrain.training.run_keys import RunKeys


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
        problems = [wrong for preload in preloads for wrong in _package_problems(preload)]
        run = sections.get(RunKeys)
        if run is not None and "constant parameters" not in FRAMEWORKS[run.backend].features:
            for preload in preloads:
                if preload.is_constant:
                    where = f"preload_from_files.{preload.name}.init_for_train"
                    wanted = f"backend = {backends_with('constant parameters')}"
                    problems += problem("needs-backend", f"{where}: expected {wanted} for 'always', got {run.backend!r}")
        return problems


def _package_problems(preload: Preload) -> list[Problem]:
    is_missing = preload.filename is not None and is_safetensors(preload.filename)
    return missing_package(f"preload_from_files.{preload.name}") if is_missing else []
