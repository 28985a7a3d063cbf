"""The frameworks that a config can choose with `backend`. A new one is a folder beside this file and a line in the table.

The folder has `learner.py` with `build_learner(keys, gradient_exchange, options)`, `tensors.py` with `zeros`, `size`, `wait_for`
and `preserved`, and `inspect.py` with `profiler(on_gpu)`. If devices and threads have to be chosen before anything is computed,
`learner.py` has `prepare(device, local_rank, threads)`, too. A folder is imported when it is used, as importing a framework
takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from hvdtrain.comm.base import SMALL_BUCKET, Communicator
from hvdtrain.errors import LaunchError
from hvdtrain.learner.precision import FLOAT32, Precision

if TYPE_CHECKING:
    from hvdtrain.learner.base import Learner, LearnerKeys, Profiler
    from hvdtrain.learner.preload import PreloadFunction
    from hvdtrain.learner.reducer import GradientExchange

Feature = Literal["torch.distributed", "constant parameters", "powersgd", "elastic Horovod"]
"""What only some frameworks can do and no single key asks for: torch.distributed is also used with `ngpu`; constant parameters
are entries of `preload_from_files` with init_for_train = 'always'; powersgd is a value of `horovod_compression`; elastic Horovod
is horovodrun with --min-np. A key of one framework declares `needs` instead."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What a learner is built from besides the config's `LearnerKeys`.

    Attributes:
        local_rank: this rank's number on its host, which says which GPU is its own.
        threads: the number of threads to compute with.
        seed: the training's; random numbers follow from it, the rank and the step.
        precision: the type that the model computes in.
        batch_norm: the ranks that BatchNorm's statistics are taken over, on a channel of their own; None: each rank by itself.
        sharded: the ranks that the optimizer's state is divided among; None: each rank has all of it.
        bucket_bytes: how large a message with gradients should be, by whether they are on a GPU.
        constants: takes parameters that are neither trained nor saved from files, with the function it gets; returns their names.
        model_format: of the model's file: the framework's suffix, or "safetensors".
    """

    rank: int
    local_rank: int
    threads: int
    seed: int
    precision: Precision = FLOAT32
    batch_norm: Communicator | None = None
    sharded: Communicator | None = None
    bucket_bytes: Callable[[bool], int] = lambda on_gpu: SMALL_BUCKET
    constants: Callable[[PreloadFunction], list[str]] | None = None
    model_format: str = ""


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        package: the folder with its code.
        suffix: of checkpoint files, without a dot.
        distributions: the packages of which the log of a run names the version.
        features: what it can do that others may not.
        prepares: whether it has a `prepare`.
    """

    package: str
    suffix: str
    distributions: tuple[str, ...] = ()
    features: frozenset[Feature] = frozenset()
    prepares: bool = False

    def prepare(self, device: str | None, local_rank: int, threads: int) -> None:
        """Choose device and number of threads, before the framework computes anything. Raises: ConfigError."""
        if self.prepares:
            self._module("learner").prepare(device, local_rank, threads)

    def preserved(self) -> AbstractContextManager[None]:
        """Around jobs in a program's process: what they change of the framework's own state is afterwards as before."""
        made: Callable[[], AbstractContextManager[None]] = self._module("tensors").preserved
        return made()

    def build(self, keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> Learner:
        """Build the config's model and optimizer. Raises: ConfigError."""
        build_learner: Callable[[LearnerKeys, GradientExchange, BuildOptions], Learner] = self._module("learner").build_learner
        return build_learner(keys, gradient_exchange, options)

    def profiler(self, on_gpu: bool) -> Profiler:
        """A profiler of this process's steps."""
        made: Callable[[bool], Profiler] = self._module("inspect").profiler
        return made(on_gpu)

    @property
    def tensors(self) -> ModuleType:
        """The module whose `zeros(count, local_rank)`, `size(tensor)` and `wait_for(tensor)` make and measure tensors."""
        return self._module("tensors")

    def _module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")


FRAMEWORKS: dict[str, Framework] = {
    "torch": Framework(
        "hvdtrain.learner.torch",
        "pt",
        ("torch",),
        frozenset({"torch.distributed", "constant parameters", "powersgd", "elastic Horovod"}),
    ),
    "tensorflow": Framework("hvdtrain.learner.tensorflow", "npz", ("tensorflow", "tensorflow-cpu", "keras"), prepares=True),
}
"""By the value of the key `backend`."""


def check_elastic(backend: str) -> None:
    """Raises: LaunchError: ranks of the framework cannot go on under Horovod's elastic driver."""
    if "elastic Horovod" not in FRAMEWORKS[backend].features:
        raise LaunchError(
            f"horovodrun --min-np: expected backend {backends_with('elastic Horovod')}, got {backend!r}, whose ranks start too "
            "late for Horovod to connect them again in all cases (leave --min-np and --host-discovery-script out; the same "
            "command goes on after a failure)"
        ).on_all_ranks()


def backends_with(feature: Feature) -> str:
    """The values of `backend` whose frameworks have a feature, for messages."""
    return " or ".join(repr(name) for name, framework in FRAMEWORKS.items() if feature in framework.features)
