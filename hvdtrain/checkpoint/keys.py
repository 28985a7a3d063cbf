"""The keys of checkpoints: which model to start from, when to save, what to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.config.absent import absent
from hvdtrain.config.convert import signature_error
from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, positive
from hvdtrain.config.references import is_reference
from hvdtrain.data.remote import can_be_mirror, url_problems
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.model_format import SAFETENSORS, is_safetensors, missing_package


@dataclass(frozen=True, kw_only=True)
class StartKeys(Section):
    """Which model to start from. Unless start_epoch is set, a training with checkpoints continues from the newest one."""

    start_epoch: int | Literal["auto"] = key(
        "auto",
        "the first epoch: training continues from the checkpoint of the epoch before; 1: start anew and replace existing files",
        positive,
    )
    load: str | None = key(
        None,
        "a model file, with or without its suffix, or with load_epoch the prefix of its name: the model to evaluate; a training "
        "without a checkpoint continues after its epoch",
    )
    load_epoch: int | Literal["best"] | None = key(
        None,
        "the epoch of `load` (or that its file counts as), or of `model`; 'best': the best one that has a model, by best.json",
        positive,
    )
    checkpoint_reader: Any = key(
        None,
        "a function of the path in `load` or `import_model_train_epoch1`, which may be a folder, for checkpoints of other "
        "programs; it returns a dict of 'model', the tensors by name, and, if known, 'epoch', 'step', 'batches' (how many of "
        "the next epoch are done, on all ranks together) and 'optimizer' (a function that returns a dict with its state as "
        "'optimizer'); or None for hvdtrain's",
    )
    import_model_train_epoch1: str | None = key(
        None,
        "a model file with the initial parameters, for a training without a checkpoint, which starts at epoch 1 and goes on with "
        "the file's steps",
    )
    fresh_optimizer: bool = key(
        False,
        "continue from a checkpoint with new optimizer state, for instance after the optimizer was changed; with ema_decay, from "
        "the averaged weights. Give it on the command line, once: in the config, it holds for every start",
    )
    load_model_post_hooks: list[Any] | tuple[Any, ...] | None = key(
        None,
        "functions (*, model, **_) that every rank calls with the model once it is built and loaded, at every "
        "start of a training, an evaluation or forward; they may change values, but not which parameters are trained",
        needs="torch",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        if not (self.checkpoint_reader is None or callable(self.checkpoint_reader) or is_reference(self.checkpoint_reader)):
            return problem(
                "wrong-type", f"checkpoint_reader: expected a function or 'module:name', got {self.checkpoint_reader!r}"
            )
        for number, hook in enumerate(self.load_model_post_hooks or ()):
            if not callable(hook) and not is_reference(hook):
                return problem(
                    "wrong-type", f"load_model_post_hooks[{number}]: expected a function or 'module:name', got {hook!r}"
                )
            if wrong := "" if isinstance(hook, str) else signature_error(hook, "*, model, **_"):
                return problem(
                    "wrong-signature", f"load_model_post_hooks[{number}]: expected a function (*, model, **_), got {wrong}"
                )
        files = {"load": self.load, "import_model_train_epoch1": self.import_model_train_epoch1}
        needing = [name for name, file in files.items() if file is not None and is_safetensors(file)]
        if missing := [problem for name in needing for problem in missing_package(name)]:
            return missing
        launch = sections.get(LaunchKeys)
        return self.restart_problems() if launch is not None and launch.max_restarts else []

    def restart_problems(self) -> list[Problem]:
        """Problems with keys that apply to every start, if a launcher may restart the job."""
        repeated = {
            "start_epoch": self.start_epoch if self.start_epoch != "auto" else None,
            "load_epoch": self.load_epoch if self.load is None else None,
            "fresh_optimizer": self.fresh_optimizer or None,
        }
        return [
            Problem.of(
                "conflict",
                f"{name}: expected its default where ranks may be restarted, got {value!r}: every restart would apply it again "
                "(train without restarts until there is a checkpoint, then leave it out)",
            )
            for name, value in repeated.items()
            if value is not None
        ]


@dataclass(frozen=True, kw_only=True)
class SavingKeys(Section):
    """When checkpoints are written, and which are kept."""

    save_interval: int = key(1, "save after every N epochs, and after the last one", positive)
    save_interval_steps: int | None = key(None, "also save within an epoch, after every N steps of the whole training", positive)
    save_interval_minutes: float | Literal["auto"] | None = key(
        None,
        "also save within an epoch, when the last checkpoint is N minutes old; 15 is a good value on a cluster; 'auto': as often "
        "as loses least, by the measured time of saving and the failures so far",
        positive,
    )

    save_in_background: bool = key(
        False, "continue training while rank 0 writes a copy of the model and the optimizer, which takes as much memory again"
    )
    checkpoint_mirror: str | None = key(
        None,
        "URL of a folder on object storage, such as s3://bucket/exp/g2p: every checkpoint is copied there once it is written, "
        "and a training that has no newer one on disk continues from there; needs the extra remote",
        Rule("the URL of a folder on object storage, such as s3://bucket/exp/g2p", can_be_mirror),
    )
    checkpoint_format: Literal["pt", "npz", "safetensors"] | None = key(
        None,
        "the format of the model's file: 'safetensors', which many programs read and which contains no code (needs the extra "
        "safetensors); None: 'pt' with PyTorch, 'npz' with TensorFlow. Other files of a checkpoint are in the framework's own",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems = missing_package("checkpoint_format") if self.checkpoint_format == SAFETENSORS else []
        if self.save_interval_minutes == "auto" and (hint := absent("goodput")):
            problems += problem("unsupported", f"save_interval_minutes: expected a number of minutes, got 'auto'{hint}")
        return problems + (url_problems("checkpoint_mirror", [self.checkpoint_mirror]) if self.checkpoint_mirror else [])
