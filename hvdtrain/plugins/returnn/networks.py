"""Configs with RETURNN's `network` or `get_network`: which they are, and what of them hvdtrain's keys mean."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hvdtrain.config.overrides import OVERRIDING
from hvdtrain.config.source import Source
from hvdtrain.errors import problem
from hvdtrain.plugins.returnn.imports import WatchedImports
from hvdtrain.plugins.returnn.names import is_no_op
from hvdtrain.plugins.returnn.older import older_extern_data, with_entries

BACKEND = "tensorflow-net-dict"
"""The value of `backend`, in RETURNN as here."""

OF_THE_ENGINE = {
    "enforce_min_len1": "give empty sequences a frame in the data",
    "eval_use_train_flag": "none",
    "reset_updater_vars_mod_step": "start with fresh_optimizer",
    "train_in_eval": "none",
    "truncation": "chunking cuts sequences",
}
"""Keys that change what RETURNN's TensorFlow engine computes, or what earlier engines did, and that are refused, with what to do
instead."""


@dataclass(frozen=True)
class NetworkSource:
    """A config with a network, as the value of the key `get_model`.

    Attributes:
        values: the config's names as RETURNN's functions see them.
        texts: the text of each config file, by its path.
    """

    values: Mapping[str, Any]
    texts: Mapping[str, str]

    def __call__(self, *, epoch: int, step: int, device: str, **_: Any) -> Any:
        """The signature of `get_model`; the learner builds the network itself."""
        return self.values.get("network")


def no_train_step(*, model: Any, extern_data: Any, **_: Any) -> None:
    """The value of the key `train_step`: the network defines the losses."""


def uses_network(values: Mapping[str, Any]) -> bool:
    """Whether a config's model is a network of RETURNN.

    >>> uses_network({"network": {"output": {"class": "softmax"}}}), uses_network({"network": {}, "backend": "torch"})
    (True, False)
    """
    has_network = any(name in values and not is_no_op(name, values[name]) for name in ("network", "get_network"))
    backend = values.get("backend")
    return values.get("get_model") is None and (backend == BACKEND or (has_network and backend is None))


def with_network(source: Source, imports: WatchedImports) -> Source:
    """The config with the network as its model."""
    imports.begin()
    values = dict(source.values)
    origins = dict(source.origins)
    seen = {name: _parse(value, origins.get(name)) for name, value in values.items()}
    imports.set_config(seen)
    problems = list(source.problems)
    if all(is_no_op(name, values.get(name)) for name in ("network", "get_network")):
        problems += problem("missing", f"network: expected a dict of layers with backend = {BACKEND!r}, got none")
    for name, advice in OF_THE_ENGINE.items():
        if not is_no_op(name, seen.get(name)) and (name, seen[name]) != ("truncation", -1):
            problems += problem("unsupported", f"{name}: a key of RETURNN that is not supported, in {origins[name]} ({advice})")
    values.pop("dynamic_learning_rate", None)  # it computes with tensors of the network's graph: RETURNN's updater calls it
    origin = origins.get("network", origins.get("get_network", ""))
    keys = {"backend": BACKEND, "get_model": NetworkSource(seen, source.texts), "train_step": no_train_step}
    keys["optimizer"] = optimizer_of(seen)
    data_given = values.get("extern_data")
    if (extern_data := older_extern_data(seen) if data_given is None else with_entries(data_given)) is not None:
        keys["extern_data"] = extern_data
    if values.get("learning_rate") is None and values.get("learning_rates") is None:
        keys["learning_rate"] = 1.0  # RETURNN's default
    warnings = list(source.warnings)
    if values.get("batch_size") is None and values.get("max_seqs") is None:
        keys["batch_size"] = 1
        warnings.append("batch_size: the config has neither batch_size nor max_seqs, so a batch has one frame, as in RETURNN")
    if seen.get("search_output_file") and values.get("search_labels") is None:
        keys["search_labels"] = partial(label_text, seen)
    if seen.get("learning_rate_control") or seen.get("use_last_best_model"):
        keys["learning_rate_control_error_measure"] = measures_of(seen.get("learning_rate_control_error_measure"))
    cleanup = seen.get("cleanup_old_models")
    if isinstance(cleanup, Mapping) and isinstance(cleanup.get("ignore_score_keys"), (list, tuple, set)):
        keys["cleanup_old_models"] = {**cleanup, "ignore_score_keys": list(map(our_name, cleanup["ignore_score_keys"]))}
    for name in keys:
        origins.setdefault(name, origin)
    return replace(
        source, values=values | keys, origins=origins, problems=tuple(problems), warnings=tuple(warnings), is_foreign=True
    )


def optimizer_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer that RETURNN makes from the key `optimizer` or its older keys, as a dict, for the log and for checkpoints.

    >>> optimizer_of({"nadam": True, "optimizer_epsilon": 1e-8}), optimizer_of({"momentum": 0.9})
    ({'class': 'nadam', 'epsilon': 1e-08}, {'class': 'momentum', 'momentum': 0.9})
    """
    optimizer = values.get("optimizer")
    if optimizer:
        return dict(optimizer) if isinstance(optimizer, Mapping) and "class" in optimizer else {"class": optimizer}
    options = {"epsilon": values["optimizer_epsilon"]} if values.get("optimizer_epsilon") else {}
    for name in ("adam", "nadam", "adadelta", "adagrad", "rmsprop"):
        if values.get(name):
            decay = {"decay": values[name]} if isinstance(values[name], float) else {}
            return {"class": name, **decay, **options}
    if values.get("momentum"):
        return {"class": "momentum", "momentum": values["momentum"]}
    return {"class": "sgd"}


def label_text(values: Mapping[str, Any], *, name: str, numbers: Any) -> str | None:
    """The text of a layer's output by the vocabulary of its target in `extern_data`; None: that has none."""
    from returnn.datasets.util.vocabulary import Vocabulary  # here, as RETURNN may be missing

    network = values.get("network")
    extern_data = values.get("extern_data")
    options = network.get(name, {}) if isinstance(network, Mapping) else {}
    target = options.get("target") or values.get("target", "classes")
    entry = extern_data.get(target) if isinstance(extern_data, Mapping) else None
    vocab = entry.get("vocab", getattr(entry.get("sparse_dim"), "vocab", None)) if isinstance(entry, Mapping) else None
    vocabulary = Vocabulary.create_vocab(**vocab) if isinstance(vocab, Mapping) else vocab
    return None if vocabulary is None else str(vocabulary.get_seq_labels(numbers))


USUAL_MEASURES = ("dev_score", "dev_score_output", "dev_score_output/output", "dev_score_output/output_prob")
"""The scores of which RETURNN's learning-rate control uses the first that exists, after those that the config names."""


def measures_of(measures: Any) -> list[str]:
    """The scores by their names here, of which learning-rate control uses the first that exists.

    >>> measures_of("dev_error")[:3], measures_of("dev_loss_error_other")[0]
    (['dev_loss_error', 'dev_loss_error_output', 'dev_loss_score'], 'dev_loss_error_other')
    """
    named = [measures] if isinstance(measures, str) else list(measures or ())
    wanted = [name for measure in named for name in (measure, f"{measure}_output")] + [*USUAL_MEASURES]
    return list(dict.fromkeys(map(our_name, wanted)))


def our_name(score: str) -> str:
    """The name of a network's score here, given that or RETURNN's.

    >>> our_name("dev_score"), our_name("train_error_output/output_prob"), our_name("dev_loss_score_other")
    ('dev_loss_score', 'train_loss_error_output/output_prob', 'dev_loss_score_other')
    """
    return re.sub(r"^(.+?)_(?:loss_)?(score|error)(_.*)?$", r"\1_loss_\2\3", score)


def _parse(value: Any, origin: str | None) -> Any:
    """A value as RETURNN sees it: text of the command line may be any value of Python."""
    if origin not in OVERRIDING or not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value
