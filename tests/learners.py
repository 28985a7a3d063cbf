"""A learner by itself, without a training around it, batches for it, and keys of a tiny training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from launching import faults

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.types import Batch, Padded
from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import FRAMEWORKS, BuildOptions, Extend
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.epoch_scores.functions import EpochScores
from hvdtrain.runtime.timer import Timer
from hvdtrain.settings import read_settings


def learner_of(
    get_model: Callable[..., Any],
    train_step: Callable[..., None],
    comm: Communicator | None = None,
    *,
    gradients: GradientExchange | None = None,
    framework: str = "torch",
    options: dict[str, Any] | None = None,
    **keys: Any,
) -> Any:
    """On one rank, or on one of several that are threads (`thread_ranks.py`); with SGD, unless the keys say otherwise.

    Args:
        options: those of `BuildOptions`, besides the rank that is the communicator's; and `sharded` and `batch_norm`: the ranks
            that share an optimizer, and the statistics of BatchNorms.
        keys: of the learner and of plug-ins.
    """
    comm = comm or SingleCommunicator()
    names = {field.name for field in fields(LearnerKeys)}
    of_learner = {name: value for name, value in keys.items() if name in names}
    given = LearnerKeys(get_model=get_model, train_step=train_step, **{"optimizer": {"class": "sgd"}, **of_learner})
    chosen = {"rank": comm.rank, "local_rank": 0, "threads": 1, "seed": 1, **(options or {})}
    with_extensions = {"extensions": _extensions(keys, comm, chosen)} if framework == "torch" else {}
    made = BuildOptions(**chosen, **with_extensions, scoring=EpochScores(keys.get("epoch_scores", {})))
    learner = FRAMEWORKS[framework].build(given, gradients or GradientExchange(comm, Timer()), made)
    learner.scoring = made.scoring
    return learner


def _extensions(keys: Mapping[str, Any], comm: Communicator, options: dict[str, Any]) -> list[Extend]:
    """What plug-ins add by keys, and by options, which are removed."""
    from hvdtrain.plugins.compute.extension import extend
    from hvdtrain.plugins.compute.keys import ComputeKeys
    from hvdtrain.plugins.sharded.optimizer import shard
    from hvdtrain.start_up.job import LEARNER_EXTENSIONS

    made = [extension for make in LEARNER_EXTENSIONS.values() if (extension := make(Given(keys), comm)) is not None]  # type: ignore[arg-type]
    if (sharing := options.pop("sharded", None)) is not None:
        made.append(partial(shard, sharing))
    if (sharing := options.pop("batch_norm", None)) is not None:
        made.append(partial(extend, ComputeKeys(), sharing))
    return made


class Given:
    """Stands for settings, in which plug-ins look up their keys."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = keys

    def of(self, section: Any) -> Any:
        return section(**{field.name: self._keys[field.name] for field in fields(section) if field.name in self._keys})


def batch_of(values: Any, lengths: Sequence[int] | None = None, **more: Any) -> Batch:
    """A batch of sequences of these lengths, by default of all frames."""
    made = numpy.full(len(values), values.shape[1], numpy.int32) if lengths is None else numpy.array(lengths, numpy.int32)
    return Batch({"data": Padded(values, made)}, numpy.arange(len(values)), **more)


FRAMES = numpy.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]], numpy.float32)
BATCH = batch_of(FRAMES, [2, 1])
"""Two sequences of two features, of two frames and of one."""


def tiny(folder: Path, classes: int) -> dict[str, Any]:
    """The keys of a training of a fraction of a second, on sequences of so many classes, but for its functions."""
    rng = numpy.random.default_rng(1)
    sequences = [rng.integers(0, classes, rng.integers(2, 9)) for _ in range(60)]
    keys = {"max_seqs": 5, "num_epochs": 2, "learning_rate": 0.01, "num_threads": 1, "model": str(folder / "model")}
    return {"train": sequences[20:], "dev": sequences[:20], **keys}


CONFIG = """\
train, model, batch_size, learning_rate = "train.hdf", "exp/model", 1, 0.1
get_model = train_step = lambda **_: None
"""


def problems(folder: Path, text: str, **overrides: str) -> list[str]:
    """What is wrong with a config of these lines and those that every config has: each problem as of `faults`."""
    (folder / "config.py").write_text(CONFIG + text)
    try:
        read_settings([folder / "config.py"], overrides)
    except ConfigError as error:
        return faults(error.problems)
    return []
