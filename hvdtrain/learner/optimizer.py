"""What optimizers have in common in all frameworks: changes to gradients before the update, classes, options and weight decay."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.learner.frameworks import FRAMEWORKS

if TYPE_CHECKING:
    from hvdtrain.learner.keys import LearnerKeys


def class_of(wanted: Any, classes: Mapping[str, type], key: str) -> Any:
    """A class, given as a class or by its name, in any case.

    Args:
        classes: those to choose from, by their names in lower case.
        key: that of the config, for the error message.

    Raises:
        ConfigError: there is no class with that name.

    >>> class_of("INT", {"int": int}, "number"), class_of(float, {"int": int}, "number")
    (<class 'int'>, <class 'float'>)
    """
    chosen = wanted if isinstance(wanted, type) else classes.get(str(wanted).lower())
    if chosen is None:
        hint = did_you_mean(str(wanted).lower(), classes)
        raise ConfigError.of("unknown-value", f"{key}: expected one of {', '.join(sorted(classes))}, got {wanted!r}{hint}")
    return chosen


class UpdateGradients(Protocol):
    """The reduced gradients of an update. A framework implements the changes, each to all gradients at once."""

    def add_noise(self, deviation: float) -> None:
        """Add normal noise, truncated at two standard deviations."""
        ...

    def divide(self, divisor: Any) -> None:
        """Divide every element by a number."""
        ...

    def clip(self, limit: float) -> None:
        """Clip every element to [-limit, limit]."""
        ...

    def clip_norm(self, limit: float) -> None:
        """Scale all gradients down so that their global norm is at most this."""
        ...


def change_gradients(keys: LearnerKeys, gradients: UpdateGradients) -> None:
    """Apply to an update's gradients, between the reduction and the optimizer, the changes that the keys ask for."""
    if keys.gradient_noise:
        gradients.add_noise(keys.gradient_noise)
    if keys.gradient_clip is not None:
        gradients.clip(keys.gradient_clip)
    if keys.gradient_clip_global_norm is not None:
        gradients.clip_norm(keys.gradient_clip_global_norm)


def changes_gradients(keys: LearnerKeys) -> bool:
    """Whether `change_gradients` has anything to do: it is tried."""
    tried: Any = _NoGradients()
    change_gradients(keys, tried)
    return bool(tried.asked_for)


class _NoGradients:
    """Has all operations, which do nothing, and notes their names."""

    def __init__(self) -> None:
        self.asked_for: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        self.asked_for.append(name)
        return lambda *_: None


SET_IN_UPDATES = ("self", "params", "lr", "learning_rate")
STRICT = frozenset(name for framework in FRAMEWORKS.values() for name in framework.distributions)
"""The packages whose classes accept only the options they name, even if their signature ends in **kwargs."""


def option_problems(optimizer: type, options: Mapping[str, Any], where: str, more_names: Collection[str] = ()) -> list[Problem]:
    """Problems with options that a class does not accept. A third-party class with **kwargs is not checked.

    Args:
        where: the prefix of an option's name: 'optimizer.'
        more_names: further allowed ones.
    """
    option_names = _option_names(optimizer)
    if option_names is None:
        return []
    problems = []
    for name, value in options.items():
        if name not in option_names and name not in more_names:
            hint = did_you_mean(name, [*option_names, *more_names])
            problems += problem(
                "unknown-key",
                f"{where}{name}: expected options of {optimizer.__name__}: {', '.join(option_names)}, "
                f"got {name} = {value!r}{hint}",
            )
    return problems


def construct(optimizer: type, options: Mapping[str, Any], where: str, *parameters: Any, **rate: float) -> Any:
    """An optimizer of a class. Raises: ConfigError, if it does not accept the options.

    Args:
        where: as in `option_problems`.
    """
    if problems := option_problems(optimizer, options, where):
        raise ConfigError(problems)
    try:
        return optimizer(*parameters, **rate, **options)
    except (TypeError, ValueError) as error:
        name = where.removesuffix(".")
        kind = optimizer.__name__
        raise ConfigError.of("unknown-key", f"{name}: expected options of {kind}, got {options}: {error}") from None


def _option_names(optimizer: type) -> list[str] | None:
    """The keyword arguments of the constructors of a class and its bases; None: any."""
    names: list[str] = []
    for base in optimizer.__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        names += [param.name for param in parameters if param.kind not in (param.VAR_KEYWORD, param.VAR_POSITIONAL)]
        if not any(param.kind is param.VAR_KEYWORD for param in parameters):
            break
    else:
        if optimizer.__module__.partition(".")[0] not in STRICT:
            return None
    return [name for name in dict.fromkeys(names) if name not in SET_IN_UPDATES]


def option_texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options of an optimizer as texts for a checkpoint. Values that no text identifies (functions, tensors) are left out.

    >>> option_texts({"betas": [0.9, 0.95], "amsgrad": True, "rule": len})
    {'betas': '(0.9, 0.95)', 'amsgrad': 'True'}
    """
    texts = {name: _option_text(value) for name, value in options.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _option_text(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        texts = [_option_text(entry) for entry in value]
        return None if None in texts else f"({', '.join(map(str, texts))})"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
    return repr(value) if value is None or isinstance(value, (bool, str)) else None


def changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """By name, a line about each option whose text differs from that in the checkpoint.

    >>> changed_options({"eps": "1e-08", "lr": "1"}, {"eps": "0.001"})
    {'eps': 'optimizer.eps: 0.001 from here on, 1e-08 in the checkpoint'}
    """
    return {
        name: f"optimizer.{name}: {text} from here on, {before[name]} in the checkpoint"
        for name, text in now.items()
        if before.get(name, text) != text
    }


BLACKLIST = "weight_decay_modules_blacklist"
INCLUDE = "weight_decay_custom_include_check"


@dataclass(frozen=True)
class DecayRule:
    """Which parameters decay: all but biases and those of certain module classes, unless the config's function decides.

    Attributes:
        classes: parameters of modules of these classes and their subclasses do not decay.
        names: the same, by class name.
        include: function (*, module, rf_module, full_param_name, param) that returns whether a parameter decays; with None, the
            other rules decide.
        biases: a regular expression for the names of biases.
    """

    classes: tuple[type, ...]
    names: frozenset[str] = frozenset()
    include: Callable[..., bool | None] | None = None
    biases: str = r"bias$|(^|\.)bias_(ih|hh|k|v)[^.]*$"  # also nn.LSTM's bias_ih_l0 and bias_hh_l1_reverse

    def decays(self, module: Any, full_name: str, parameter: Any) -> bool:
        """Whether a module's parameter decays. Raises: ConfigError, if the config's function returns neither a bool nor None."""
        rf_module = wrapped_rf_module(module)
        chosen = self.include and self.include(module=module, rf_module=rf_module, full_param_name=full_name, param=parameter)
        if chosen is not None and not isinstance(chosen, bool):
            raise ConfigError.of(
                "wrong-result", f"optimizer.{INCLUDE}: expected it to return True, False or None, got {chosen!r} for {full_name}"
            )
        if chosen is not None:
            return chosen
        is_exempt = any(
            isinstance(layer, self.classes) or not self.names.isdisjoint(class_names(layer)) for layer in (module, rf_module)
        )
        return not is_exempt and not re.search(self.biases, full_name)


def wrapped_rf_module(module: Any) -> Any | None:
    """The RETURNN frontend module that a module wraps; None: it wraps none."""
    return getattr(module, "rf_module", None)


def frontend_class_names() -> set[str]:
    """The names of the classes of RETURNN's frontend, if a config has imported it: lists of classes may name some that are not in
    the model."""
    frontend = sys.modules.get("returnn.frontend")
    return {name for name, value in vars(frontend).items() if isinstance(value, type)} if frontend is not None else set()


def class_names(module: Any) -> set[str]:
    """The names of a module's class and its base classes."""
    return {kind.__name__ for kind in type(module).__mro__}


def take_decay_rule(
    options: dict[str, Any], usual: DecayRule, layer_names: Iterable[str], where: str = "optimizer."
) -> DecayRule:
    """Remove the options about weight decay from an optimizer's options, and return their rule; `usual` if there are none.

    Args:
        layer_names: those of all classes. A name may include its module (`torch.nn.LayerNorm`).
        where: the prefix of an option's name.

    Raises:
        ConfigError: there is no such class, a value has the wrong type, or nothing decays.
    """
    blacklist, include = options.pop(BLACKLIST, None), options.pop(INCLUDE, None)
    problems = []
    if not options.get("weight_decay") and (blacklist, include) != (None, None):
        problems += problem("missing", f"{where}weight_decay: expected a positive number with {BLACKLIST} or {INCLUDE}, got none")
    if include is not None and not callable(include):
        problems += problem(
            "wrong-type", f"{where}{INCLUDE}: expected a function (*, module, full_param_name, param, **_), got {include!r}"
        )
    if blacklist is not None and not isinstance(blacklist, (list, tuple)):
        problems += problem("wrong-type", f"{where}{BLACKLIST}: expected a list of classes or their names, got {blacklist!r}")
    names = set(layer_names)
    wanted = list(blacklist) if isinstance(blacklist, (list, tuple)) else []
    for layer in wanted:
        if not isinstance(layer, type) and (not isinstance(layer, str) or _last(layer) not in names):
            hint = did_you_mean(_last(str(layer)), names)
            problems += problem(
                "unknown-value", f"{where}{BLACKLIST}: expected the framework's classes or the model's, got {layer!r}{hint}"
            )
    if problems:
        raise ConfigError(problems)
    if blacklist is None:
        return DecayRule(usual.classes, usual.names, include, usual.biases)
    classes = tuple(layer for layer in wanted if isinstance(layer, type))
    return DecayRule(classes, frozenset(_last(layer) for layer in wanted if isinstance(layer, str)), include, usual.biases)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
