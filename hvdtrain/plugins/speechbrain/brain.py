"""A Brain as keys: its forward and objectives in train_step, its optimizer, and its hooks in a callback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speechbrain import Brain
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer
from hvdtrain.plugins.loaders.loader import SamplerBatches
from hvdtrain.plugins.other_trainer.trainer import overridden
from hvdtrain.plugins.speechbrain.optimizers import Optimizers
from hvdtrain.plugins.speechbrain.ranks import as_one_job
from hvdtrain.plugins.speechbrain.stages import Stages
from hvdtrain.plugins.speechbrain.states import load_from
from hvdtrain.plugins.speechbrain.statistics import Nothing
from hvdtrain.plugins.speechbrain.sums import Sums

KEY = "brain"
ENTRIES = ("class", "hparams", "overrides", "run_opts", "make", "datasets")

THEIR_LOOP = (
    "fit", "fit_batch", "_fit_train", "_fit_valid", "optimizers_step", "zero_grad", "update_average", "check_gradients",
    "check_loss_isfinite", "no_sync", "on_fit_start", "make_dataloader",
)  # fmt: skip
"""Methods of the loop, which is hvdtrain's. A class that has its own is refused."""

OPTIONS = {
    "debug": "++dry_run 1, or overfit_batches",
    "jit": "the key torch_compile",
    "jit_module_keys": "the key torch_compile",
    "compile": "the key torch_compile",
    "compile_module_keys": "the key torch_compile",
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
    maker = Maker(values[KEY], int(values.get("random_seed") or 42))
    brain = maker.first()
    hparams = vars(getattr(brain, "hparams", None) or Nothing())
    found = Stages(maker).keys()
    found["accum_grad_multiple_step"] = brain.grad_accumulation_factor
    has_groups = brain.remove_vector_weight_decay or type(brain).init_optimizers is not Brain.init_optimizers
    if values.get("gradient_clip_global_norm") is None and has_groups:
        maker.clips = True  # each optimizer's first group
    else:
        found["gradient_clip_global_norm"] = brain.max_grad_norm
    found |= {} if brain.precision == "fp32" else {"mixed_precision": {"bf16": "bfloat16", "fp16": "float16"}[brain.precision]}
    if brain.ckpt_interval_minutes > 0:
        found["save_interval_minutes"] = brain.ckpt_interval_minutes
    if brain.ckpt_interval_steps > 0:
        found["save_interval_steps"] = brain.ckpt_interval_steps
    if "seed" in hparams:
        found["random_seed"] = int(hparams["seed"])
    epochs = getattr(hparams.get("epoch_counter"), "limit", hparams.get("number_of_epochs"))
    found |= {} if epochs is None else {"num_epochs": int(epochs)}
    found |= _data(maker, hparams, str(values.get("task") or "train"))
    own = [name for name in ("train", "max_seqs", "max_seqs_total", "batch_size") if values.get(name) is not None]
    maker.has_their_batches = "train" in found and not own
    return found


class Maker:
    """Makes the Brain: once to see its options, and again only if a model is asked for again.

    Attributes:
        brain: the one whose model was asked for last.
        has_their_batches: whether the batches of an epoch are those of SpeechBrain.
        is_read: whether a checkpoint of SpeechBrain's was loaded.
        sums: those over the ranks within a step.
        clips: whether gradients are clipped by the groups of the optimizers.
    """

    has_their_batches = is_read = clips = False
    optimizers: Optimizers

    def __init__(self, given: Any, seed: int) -> None:
        self.given = dict(given) if isinstance(given, Mapping) else {"make": given}
        unknown = sorted(self.given.keys() - set(ENTRIES))
        if unknown or not ("make" in self.given or "class" in self.given):
            got = f"{unknown[0]!r}{did_you_mean(unknown[0], ENTRIES)}" if unknown else repr(given)
            raise ConfigError.of("wrong-type", f"{KEY}: expected a function, or a dict of {', '.join(ENTRIES)}, got {got}")
        self._seed = seed
        self.sums = Sums()
        self._parameters: list[torch.nn.Parameter] = []
        self._unused: Any = None
        self.brain: Any = None

    def first(self) -> Any:
        """The Brain whose model will be asked for first. Raises: ConfigError, if it has what hvdtrain cannot serve."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            self._unused = self._make()
        return self._unused

    @property
    def first_made(self) -> Any:
        """The Brain that was made last."""
        return self.brain if self._unused is None else self._unused

    def get_model(self, *, device: str, **_: Any) -> torch.nn.Module:
        """As the key get_model: all modules of the Brain."""
        self.brain, self._unused = self._unused or self.first(), None
        self.brain.device = device
        self.sums.of(self.brain.modules)
        return self.brain.modules  # type: ignore[no-any-return]

    def optimizer(self) -> AnyOptimizer:
        self.optimizers = Optimizers(self.brain)
        return self.optimizers.whole

    def change_gradients(self, **_: Any) -> None:
        if self.clips or type(self.brain).freeze_optimizers is not Brain.freeze_optimizers:
            self.optimizers.change_gradients(self.clips)

    def read(self, path: Path) -> dict[str, Any] | None:
        """As the key checkpoint_reader: a folder of the Checkpointer's. Raises: CheckpointError."""
        if not path.is_dir():
            return None
        found = load_from(path, self.brain)
        self.is_read = True
        if self.brain.optimizer is not None and (batches := found["batches"]) != 0:
            if batches is None or not self.has_their_batches or batches % self.brain.grad_accumulation_factor:
                where = "with no dataloader-TRAIN" if batches is None else f"after {batches} batches"
                raise CheckpointError(
                    f"{path}: expected a checkpoint from the end of an epoch, or its batches, got one from within an "
                    f"epoch, {where} (SpeechBrain's batches need the class's datasets and batch_size unchanged)"
                )
        return found

    def _make(self) -> Any:
        as_one_job(self.sums)
        brain = self.given["make"]() if "make" in self.given else self._of_class()
        if not isinstance(brain, Brain):
            raise ConfigError.of("wrong-result", f"{KEY}: expected a Brain, got a {type(brain).__name__}")
        if own := overridden(type(brain), Brain, THEIR_LOOP):
            raise ConfigError.of(
                "unsupported", f"{KEY}: expected a Brain with SpeechBrain's own {own[0]}, got that of {type(brain).__name__}"
            )
        if brain.eval_precision != brain.precision and brain.eval_precision != "fp32":
            raise ConfigError.of(
                "unsupported",
                f"{KEY}: expected eval_precision fp32 or that of training, {brain.precision}, got {brain.eval_precision}",
            )
        for name, instead in OPTIONS.items():
            if getattr(brain, name, None):
                raise ConfigError.of("unsupported", f"{KEY}: expected {instead}, got {name} = {getattr(brain, name)!r}")
        if any(one is other for one in brain.modules.parameters() for other in self._parameters):
            raise ConfigError.of(
                "wrong-result", f"{KEY}: expected modules that are made anew, got those that are trained already"
            )
        self._parameters = list(brain.modules.parameters())
        if brain.grad_accumulation_factor > 1 and type(brain).on_fit_batch_start is not Brain.on_fit_batch_start:
            raise ConfigError.of("unsupported", f"{KEY}: expected no grad_accumulation_factor with on_fit_batch_start, got both")
        return brain

    def _of_class(self) -> Any:
        hparams = self.given.get("hparams")
        if isinstance(hparams, (str, Path)):
            from hyperpyyaml import load_hyperpyyaml

            with Path(hparams).open(encoding="utf-8") as file:
                hparams = load_hyperpyyaml(file, self.given.get("overrides"))
        elif callable(hparams):
            hparams = hparams()
        else:
            raise ConfigError.of(
                "wrong-type", f"{KEY}.hparams: expected a hyperpyyaml file, or a function that makes them, got {hparams!r}"
            )
        hparams = dict(hparams)
        arguments = {name: hparams.get(name) for name in ("modules", "opt_class", "checkpointer")}
        return self.given["class"](hparams=hparams, run_opts=self.given.get("run_opts"), **arguments)


def _data(maker: Maker, hparams: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The keys of the datasets, if the dict has a function that makes them. Raises: ConfigError."""
    make = maker.given.get("datasets")
    if make is None:
        return {}
    datasets = make(dict(hparams))
    samplers: dict[str, Any] = {}
    if not isinstance(datasets, Mapping):
        several = list(datasets)
        batches = [each for each in several if isinstance(each, torch.utils.data.Sampler)]  # as recipes return them: train, valid
        samplers = dict(zip(STAGES, batches, strict=False))
        datasets = dict(zip(STAGES, (each for each in several if not isinstance(each, torch.utils.data.Sampler)), strict=False))
    found: dict[str, Any] = {}
    for stage, dataset in datasets.items():
        if stage not in STAGES:
            raise ConfigError.of("wrong-result", f"{KEY}.datasets: expected {', '.join(STAGES)}, got {stage!r}")
        options = _options(hparams, stage)
        key = STAGES[stage]
        if stage == "test" and task != "eval":
            continue  # as there, which evaluates it once, at the end
        usual = PaddedBatch if isinstance(dataset, DynamicItemDataset) else torch.utils.data.default_collate
        found[key] = {"class": partial(same, dataset), "collate": options.get("collate_fn") or usual}
        if stage == "train":
            found[key]["seq_ordering"] = Order(maker.first_made, dataset) if options.get("shuffle") else "default"
        sampler = options.get("batch_sampler") or samplers.get(stage)
        if sampler is not None:
            found[key]["seq_ordering"] = SamplerBatches(f"{KEY}, {stage}", Numberless(sampler), len(dataset))
            continue
        size = options.get("batch_size", hparams.get("batch_size", 1))
        limit = {"train": "max_seqs_train" if "valid" in samplers else "max_seqs", "valid": "max_seqs_dev"}.get(stage)
        found |= {} if limit is None else {limit: size}
    return found


def _options(hparams: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """The options of a stage's loader. Raises: ConfigError, if they choose batches in another way, or are not known."""
    names = [f"{stage}_{name}" for name in LOADERS] + list(LOADERS)
    name = next((name for name in names if name in hparams), None)
    if name is None:
        known = [f"{stage}_{name}" for stage in STAGES for name in LOADERS]
        loaders = [other for other, value in hparams.items() if "loader" in other and isinstance(value, Mapping)]
        if unknown := [other for other in loaders if other not in known]:
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
    """A dataset that is made already."""
    return dataset
