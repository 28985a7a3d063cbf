"""Further models for the config's functions, such as the teacher of a distillation."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.convert import signature_error
from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.config.plugins import Plugin
from hvdtrain.config.references import is_reference
from hvdtrain.errors import Problem, problem


@dataclass(frozen=True, kw_only=True)
class ExtraModelKeys(Section):
    """Models that are neither trained nor saved."""

    changes_results = True

    extra_models: dict[str, Any] = key(
        {},
        "further models for train_step and forward_step, such as the teacher of a distillation: for each name a dict of "
        "get_model and load, the file with its parameters; get_run_ctx().extra_models[NAME] is frozen, in evaluation mode, and "
        "not saved",
        needs="torch",
        instead="with TensorFlow, load it in get_model into a variable of the module, and make its layers not trainable",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems: list[Problem] = []
        for name, entry in self.extra_models.items():
            where = f"extra_models.{name}"
            if not isinstance(entry, dict) or entry.get("get_model") is None:
                problems += problem("wrong-type", f"{where}: expected a dict with the entry 'get_model', got {entry!r}")
                continue
            problems += [
                Problem.of("unknown-key", f"{where}.{name}: expected one of get_model, load, got {name!r}")
                for name in entry
                if name not in ("get_model", "load")
            ]
            get_model = entry["get_model"]
            load = entry.get("load")
            if not callable(get_model) and not is_reference(get_model):
                problems += problem("wrong-type", f"{where}.get_model: expected a function or 'module:name', got {get_model!r}")
            elif wrong := "" if isinstance(get_model, str) else signature_error(get_model, "*, epoch, step, device, **_"):
                problems += problem(
                    "wrong-signature", f"{where}.get_model: expected a function (*, epoch, step, device, **_), got {wrong}"
                )
            if load is not None and not isinstance(load, str):
                problems += problem("wrong-type", f"{where}.load: expected a model's file, got {load!r}")
        return problems


PLUGIN = Plugin(
    learner_extensions={"extra_models": f"{__name__}.models:with_extra_models"},
    keys={"extra_models": ExtraModelKeys},
)
