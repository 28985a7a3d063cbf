"""A Brain as keys: its forward and objectives in train_step, its optimizer, and its hooks in a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Brain
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.loaders.loader import SamplerBatches
from hvdtrain.plugins.other_trainer.trainer import overridden
from hvdtrain.plugins.speechbrain.ranks import Sums, as_one_job
from hvdtrain.plugins.speechbrain.stages import Stages
from hvdtrain.plugins.speechbrain.states import hparams_of

KEY = "brain"
ENTRIES = ("class", "hparams", "overrides", "run_opts", "make", "datasets")

THEIR_LOOP = (
    "fit", "fit_batch", "_fit_train", "_fit_valid", "optimizers_step", "zero_grad", "update_average", "check_gradients",
    "check_loss_isfinite", "no_sync", "on_fit_start", "make_dataloader",
)  # fmt: skip
"""Methods of the loop, which is hvdtrain's. A class that has its own is refused."""

REFUSED = {
    "debug": "++dry_run 1, or overfit_batches",
    **dict.fromkeys(("jit", "jit_module_keys", "compile", "compile_module_keys"), "the key torch_compile"),
    "data_parallel_backend": "a process for each GPU",
    "optimizer_step_limit": "num_epochs, or partition_epoch",
    "profile_training": "the key profile_steps",
    "skip_nonfinite_grads": "the key num_allowed_consec_invalid_gradient_steps",
    "test_only": "++task eval",
}
"""Options of a run that have no effect here, and what there is instead."""

STAGES = {"train": "train", "valid": "dev", "test": "eval"}
"""The datasets, in the order in which a recipe's function returns them, and their keys here."""

LOADERS = ("dataloader_opts", "dataloader_options", "loader_kwargs", "dataloader_kwargs")
"""The names of a loader's options among hyperparameters: those of a stage (`train_dataloader_opts`), or of all."""

SERVED = (
    *("batch_size", "shuffle", "collate_fn", "batch_sampler"),
    *("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context", "generator"),
)
"""Options of a DataLoader that hvdtrain serves, or that change no batch."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `brain`. Raises: ConfigError."""
    maker = BrainMaker(values[KEY], int(values.get("random_seed") or 42))
    brain = maker.make()
    hparams = hparams_of(brain)
    stages = Stages(maker)
    keys = stages.keys()
    keys["accum_grad_multiple_step"] = brain.grad_accumulation_factor
    has_groups = brain.remove_vector_weight_decay or type(brain).init_optimizers is not Brain.init_optimizers
    if values.get("gradient_clip_global_norm") is None and has_groups:
        stages.clips = True
    else:
        keys["gradient_clip_global_norm"] = brain.max_grad_norm
    if brain.precision != "fp32":
        keys["mixed_precision"] = {"bf16": "bfloat16", "fp16": "float16"}[brain.precision]
    for unit in ("minutes", "steps"):
        if (interval := getattr(brain, f"ckpt_interval_{unit}")) > 0:
            keys[f"save_interval_{unit}"] = interval
    if "seed" in hparams:
        keys["random_seed"] = int(hparams["seed"])
    epochs = getattr(hparams.get("epoch_counter"), "limit", hparams.get("number_of_epochs"))
    if epochs is not None:
        keys["num_epochs"] = int(epochs)
    if (make := maker.entries.get("datasets")) is not None:
        keys |= _data(make, brain, hparams, str(values.get("task") or "train"))
    chooses_batches = any(values.get(name) is not None for name in ("train", "max_seqs", "max_seqs_total", "batch_size"))
    stages.has_their_batches = "train" in keys and not chooses_batches
    return keys


class BrainMaker:
    """Makes the Brain: once to see its options, and again only if a model is asked for again.

    Attributes:
        brain: the last one.
        is_unused: whether its model was not asked for yet.
    """

    def __init__(self, value: Any, seed: int) -> None:
        self.entries = dict(value) if isinstance(value, Mapping) else {"make": value}
        unknown = sorted(self.entries.keys() - set(ENTRIES))
        if unknown or not ("make" in self.entries or "class" in self.entries):
            got = f"{unknown[0]!r}{did_you_mean(unknown[0], ENTRIES)}" if unknown else repr(value)
            raise ConfigError.of("wrong-type", f"{KEY}: expected a function, or a dict of {', '.join(ENTRIES)}, got {got}")
        self._seed = seed
        self._parameters: list[torch.nn.Parameter] = []
        self.sums = Sums()
        self.brain: Any = None
        self.is_unused = False

    def make(self) -> Any:
        """Raises: ConfigError, if the Brain has what hvdtrain cannot serve."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            as_one_job(self.sums)
            self.brain = self.entries["make"]() if "make" in self.entries else self._of_class()
        self._check(self.brain)
        self._parameters = list(self.brain.modules.parameters())
        self.is_unused = True
        return self.brain

    def _check(self, brain: Any) -> None:
        if not isinstance(brain, Brain):
            raise ConfigError.of("wrong-result", f"{KEY}: expected a Brain, got a {type(brain).__name__}")
        if methods := overridden(type(brain), Brain, THEIR_LOOP):
            raise ConfigError.of(
                "unsupported", f"{KEY}: expected a Brain with SpeechBrain's own {methods[0]}, got that of {type(brain).__name__}"
            )
        if brain.eval_precision != brain.precision and brain.eval_precision != "fp32":
            raise ConfigError.of(
                "unsupported",
                f"{KEY}: expected eval_precision fp32 or that of training, {brain.precision}, got {brain.eval_precision}",
            )
        for name, instead in REFUSED.items():
            if getattr(brain, name, None):
                raise ConfigError.of("unsupported", f"{KEY}: expected {instead}, got {name} = {getattr(brain, name)!r}")
        if set(map(id, self._parameters)).intersection(map(id, brain.modules.parameters())):
            raise ConfigError.of(
                "wrong-result", f"{KEY}: expected modules that are made anew, got those that are trained already"
            )
        if brain.grad_accumulation_factor > 1 and type(brain).on_fit_batch_start is not Brain.on_fit_batch_start:
            raise ConfigError.of("unsupported", f"{KEY}: expected no grad_accumulation_factor with on_fit_batch_start, got both")

    def _of_class(self) -> Any:
        hparams = self.entries.get("hparams")
        if isinstance(hparams, (str, Path)):
            from hyperpyyaml import load_hyperpyyaml

            with Path(hparams).open(encoding="utf-8") as file:
                hparams = load_hyperpyyaml(file, self.entries.get("overrides"))
        elif callable(hparams):
            hparams = hparams()
        else:
            raise ConfigError.of(
                "wrong-type", f"{KEY}.hparams: expected a hyperpyyaml file, or a function that makes them, got {hparams!r}"
            )
        hparams = dict(hparams)
        arguments = {name: hparams.get(name) for name in ("modules", "opt_class", "checkpointer")}
        return self.entries["class"](hparams=hparams, run_opts=self.entries.get("run_opts"), **arguments)


def _data(make: Callable[..., Any], brain: Any, hparams: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The keys of the datasets, which a function makes. Raises: ConfigError."""
    datasets = make(dict(hparams))
    samplers: dict[str, Any] = {}
    if not isinstance(datasets, Mapping):  # as recipes return them: train, valid, and then samplers of batches
        by_kind: dict[bool, list[Any]] = {False: [], True: []}
        for dataset_or_sampler in datasets:
            by_kind[isinstance(dataset_or_sampler, torch.utils.data.Sampler)].append(dataset_or_sampler)
        datasets, samplers = (dict(zip(STAGES, by_kind[is_sampler], strict=False)) for is_sampler in (False, True))
    keys: dict[str, Any] = {}
    for stage, dataset in datasets.items():
        if stage not in STAGES:
            raise ConfigError.of("wrong-result", f"{KEY}.datasets: expected {', '.join(STAGES)}, got {stage!r}")
        options = _options(hparams, stage)
        if stage == "test" and task != "eval":
            continue  # as there, which evaluates it once, at the end
        usual = PaddedBatch if isinstance(dataset, DynamicItemDataset) else torch.utils.data.default_collate
        entries = {"class": partial(same, dataset), "collate": options.get("collate_fn") or usual}
        keys[STAGES[stage]] = entries
        if stage == "train":
            entries["seq_ordering"] = Order(brain, dataset) if options.get("shuffle") else "default"
        sampler = options.get("batch_sampler") or samplers.get(stage)
        if sampler is not None:
            entries["seq_ordering"] = SamplerBatches(f"{KEY}, {stage}", Numberless(sampler), len(dataset))
            continue
        limit = {"train": "max_seqs_train" if "valid" in samplers else "max_seqs", "valid": "max_seqs_dev"}.get(stage)
        if limit is not None:
            keys[limit] = options.get("batch_size", hparams.get("batch_size", 1))
    return keys


def _options(hparams: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """The options of a stage's loader. Raises: ConfigError, if they choose batches in another way, or are not known."""
    names = [f"{stage}_{name}" for name in LOADERS] + list(LOADERS)
    name = next((name for name in names if name in hparams), None)
    if name is None:
        of_stages = [f"{stage}_{name}" for stage in STAGES for name in LOADERS]
        loaders = [hparam for hparam, value in hparams.items() if "loader" in hparam and isinstance(value, Mapping)]
        if unknown := [loader for loader in loaders if loader not in of_stages]:
            raise ConfigError.of(
                "unknown-key", f"{KEY}.hparams: expected the options of loaders as {names[0]}, or {LOADERS[1]}, got {unknown[0]}"
            )
        return {}
    options = dict(hparams[name] or {})
    for option, value in options.items():
        if option not in SERVED and value not in (None, False):
            raise ConfigError.of("unsupported", f"{KEY}: expected batches by batch_size or max_seqs, got {option} in {name}")
    return options


class Numberless:
    """A sampler whose `set_epoch` is not called: SpeechBrain calls it on several processes only."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter(self.sampler)


class Order:
    """The key seq_ordering: the order of the Brain's own sampler."""

    def __init__(self, brain: Any, dataset: Any) -> None:
        self._sampler = brain._train_loader_specifics(dataset, {"shuffle": True})["sampler"]

    def __call__(self, *, epoch: int, **_: Any) -> Any:
        self._sampler.set_epoch(epoch)
        return torch.tensor(list(self._sampler)).numpy()


def same(dataset: Any) -> Any:
    return dataset
