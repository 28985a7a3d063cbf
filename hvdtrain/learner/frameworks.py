"""The frameworks that a config can choose with `backend`. A new one is a folder, and a line in the table or in that of a
plug-in.

The folder has `learner.py` with `build_learner(keys, gradient_exchange, options)`, `tensors.py` with `zeros`, `size`, `wait_for`
and `preserve_state`, and `inspect.py` with `profiler(on_gpu)`. If devices and threads have to be chosen before the first
computation, `learner.py` also has `prepare(device, local_rank, threads)`. Where `get_model` is a function, `model_file.py` has
`read_progress(path)`, which returns the plain values in a model's file; for averages of checkpoints, it has `read_model(path)`,
`write_model(path, model, progress, model_format)`, `widen`, `narrow` and `place_of` (`learner/averaging.py`). A
folder is imported on first use, as importing a framework takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from hvdtrain.comm.base import SMALL_BUCKET
from hvdtrain.config.absent import import_part
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import ConfigError
from hvdtrain.learner.epoch_scores import SCORING, Scoring
from hvdtrain.learner.precision import FLOAT32, Precision

if TYPE_CHECKING:
    from hvdtrain.learner.base import Learner, Profiler
    from hvdtrain.learner.contents import BackgroundSaver
    from hvdtrain.learner.keys import LearnerKeys
    from hvdtrain.learner.preload import PreloadFunction
    from hvdtrain.learner.reducer import GradientExchange

Feature = Literal[
    "torch.distributed",
    "constant parameters",
    "computed compression",
    "elastic Horovod",
    "short chunks dropped",
    "trees of tensors",
    "learner extensions",
]
"""Capabilities of some frameworks that do not correspond to a single key: torch.distributed is also used with `ngpu`; constant
parameters are entries of `preload_from_files` with init_for_train = 'always'; computed compression means the values of
`horovod_compression` other than 16-bit types; elastic Horovod is horovodrun with --min-np; short chunks are
dropped by default, as by RETURNN's engine for the framework; trees of tensors are the batches of `collate`; learner extensions
are those of plug-ins. A key of a single framework declares `needs` instead."""


NEW = 1, 0
"""The epoch and the step of a new model."""

Extend = Callable[[Any], None]
"""Changes what a learner is built from, an `Assembly` of PyTorch's. Raises: ConfigError."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Everything a learner is built from, except the config's `LearnerKeys`.

    Attributes:
        local_rank: this rank's number on its host, which selects its GPU.
        threads: the number of compute threads.
        seed: the training's seed; random numbers follow from it, the rank and the step.
        precision: the type that the model computes in.
        bucket_bytes: the size of a message with gradients, given whether they are on a GPU.
        constants: loads constant parameters, which are neither trained nor saved, with the given function; returns their names.
        model_format: the format of the model's file: the framework's suffix, or "safetensors".
        position: the epoch and the step that get_model is called with.
        extensions: add to PyTorch's learner what the keys of plug-ins ask for.
        scoring: computes the scores of a dataset.
    """

    rank: int
    local_rank: int
    threads: int
    seed: int
    precision: Precision = FLOAT32
    bucket_bytes: Callable[[bool], int] = lambda on_gpu: SMALL_BUCKET
    constants: Callable[[PreloadFunction], list[str]] | None = None
    model_format: str = ""
    position: tuple[int, int] = NEW
    extensions: Sequence[Extend] = ()
    scoring: Scoring = SCORING


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        package: the folder with its code.
        suffix: of checkpoint files, without a dot.
        distributions: the packages whose versions are logged.
        features: its optional capabilities.
        has_prepare: whether `learner.py` has a `prepare`.
        header: its name in the header of a safetensors file.
        library: the Python package that computes, and Horovod's binding for it; '': the one of the framework's name.
        model_suffix: the suffix of the model's file, if it differs.
        model_parts: patterns of the suffixes of more files that belong to a model.
        model_marker: the suffix of one of them, which accompanies every model written here. A model without it is another
             program's; training continues from such a model with a new optimizer. None: not without an optimizer's file.
        imports: the modules with which a process can be forked that has imported them; empty: it cannot be forked.
    """

    package: str
    suffix: str
    distributions: tuple[str, ...] = ()
    features: frozenset[Feature] = frozenset()
    has_prepare: bool = False
    header: str = ""
    library: str = ""
    model_suffix: str | None = None
    model_parts: tuple[str, ...] = ()
    model_marker: str | None = None
    imports: tuple[str, ...] = ()

    def prepare(self, device: str | None, local_rank: int, threads: int) -> None:
        """Choose the device and the number of threads, before the framework computes anything. Raises: ConfigError."""
        if self.has_prepare:
            self._module("learner").prepare(device, local_rank, threads)

    def preserve_state(self) -> AbstractContextManager[None]:
        """Restore the framework's global state after the `with` block, in which a program runs jobs in its process."""
        preserve: Callable[[], AbstractContextManager[None]] = self._module("tensors").preserve_state
        return preserve()

    def build(self, keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> Learner:
        """Build the config's model and optimizer. Raises: ConfigError."""
        build_learner: Callable[[LearnerKeys, GradientExchange, BuildOptions], Learner] = self._module("learner").build_learner
        return build_learner(keys, gradient_exchange, options)

    def profiler(self, on_gpu: bool) -> Profiler:
        """A profiler of this process's steps."""
        profiler: Callable[[bool], Profiler] = self._module("inspect").profiler
        return profiler(on_gpu)

    @property
    def model_files(self) -> ModuleType:
        """The module that reads and writes models, and converts their tensors to wide arrays and back."""
        return self._module("model_file")

    @property
    def read_progress(self) -> Callable[[Path], dict[str, Any]] | None:
        """Returns the plain values in a model's file; None: no get_model is called with them."""
        return getattr(self.model_files, "read_progress", None)

    @property
    def tensors(self) -> ModuleType:
        """The module whose `zeros(count, local_rank)`, `size(tensor)` and `wait_for(tensor)` make and measure tensors."""
        return self._module("tensors")

    def _module(self, name: str) -> ModuleType:
        return import_part(f"{self.package}.{name}")


SAVERS: Registry[Callable[[bool], BackgroundSaver]] = Registry("savers")
"""By the value of the key `backend`, opens one, given whether this process may be forked now."""

FRAMEWORKS: Registry[Framework] = Registry(
    "backends",
    {
        "torch": Framework(
            "hvdtrain.learner.torch",
            "pt",
            ("torch",),
            frozenset(get_args(Feature)),
            header="pt",
            imports=("hvdtrain.learner.torch.learner", "hvdtrain.comm.torch_dist"),
        ),
    },
)
"""By the value of the key `backend`."""


def library_of(backend: str) -> str:
    """The Python package that computes for a framework; Horovod's binding has the same name."""
    return FRAMEWORKS[backend].library or backend


def gpu_of(wanted: str | None, count: int, local_rank: int) -> int | None:
    """The number of a rank's GPU by the key `device`; None: it computes on the CPU. Raises: ConfigError.

    Args:
        count: the number of GPUs on this host.
    """
    if wanted == "cpu" or (wanted is None and not count):
        return None
    name, _, number = (wanted or "cuda").partition(":")
    if name not in ("cuda", "gpu") or (number and not number.isdigit()):
        raise ConfigError.of("unknown-value", f"device: expected cpu, cuda or cuda:N, got {wanted!r}")
    if not count or (number and int(number) >= count):
        raise ConfigError.of("unavailable", f"device: expected a CUDA device for {wanted!r}, got {count or 'none'} on this host")
    return int(number) if number else local_rank % count


def backends_with(feature: Feature) -> str:
    """The values of `backend` whose frameworks have a feature, for messages."""
    return " or ".join(repr(name) for name, framework in FRAMEWORKS.items() if feature in framework.features)
