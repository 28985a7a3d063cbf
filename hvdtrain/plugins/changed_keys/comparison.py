"""The keys that determine the results of a training, as stored in a checkpoint, and the log lines about changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.config.keys import declared_keys
from hvdtrain.config.value_text import as_text
from hvdtrain.runtime import log

if TYPE_CHECKING:
    from hvdtrain.checkpoint.progress import Progress
    from hvdtrain.settings import Settings

WITHOUT_EFFECT_ON_RESULTS = frozenset(
    ("device", "torch_compile", "checkpoint_modules", "deterministic", "use_horovod", "torch_distributed", "horovod_timeline")
)
"""Keys of the sections below that do not affect the results of a training."""

COMPARED_ELSEWHERE = frozenset(("optimizer",))
"""Keys that are compared when the optimizer's state is loaded, which also covers functions of the config."""

EFFECTS = {
    "random_seed": "later steps use different random numbers (dropout, noise); the initial weights are not drawn again",
    "num_epochs": "a schedule that ends with the last epoch is stretched, so the rates jump to another point of its curve",
    "ema_decay": "the moving average continues, or begins with the current weights",
}
"""By key, the effect of a change that is not obvious."""

RATE_IS_KEPT = "no effect: an epoch uses the rate of the previous one (learning_rates = {EPOCH: RATE} changes it)"


class ChangedKeys(CheckpointHooks):
    """Logs the keys whose values have changed since a training stopped, and records the current ones for the next checkpoints."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def restored(self, progress: Progress) -> None:
        keys = result_keys(self._settings)
        for line in changed_key_lines(progress.keys, keys, has_history=bool(progress.history)):
            log.info(line)
        progress.keys = keys


def result_keys(settings: Settings) -> dict[str, str]:
    """By name, as text, the keys that determine the results of a training."""
    core = (settings.batch, settings.learner, settings.precision, settings.accumulation, settings.schedule, settings.reduce)
    sections = [*core, *(section for section in settings.of_plugins if section.changes_results)]
    texts = key_texts([*(("", section) for section in sections), ("train.", settings.train.order)])
    texts["random_seed"] = str(settings.run.random_seed)
    if any(section.changes_with(settings.run.num_epochs) for section in sections):
        texts["num_epochs"] = str(settings.run.num_epochs)
    return texts


def key_texts(sections: Iterable[tuple[str, object]]) -> dict[str, str]:
    """By name, the values of all keys of some sections as text, except functions, which cannot be compared.

    Args:
        sections: each with the prefix of its keys' names, such as 'train.'.
    """
    skipped = WITHOUT_EFFECT_ON_RESULTS | COMPARED_ELSEWHERE
    texts = {
        f"{prefix}{key.name}": as_text(getattr(section, key.field))
        for prefix, section in sections
        for key in declared_keys(type(section))
        if key.name not in skipped
    }
    return {name: text for name, text in texts.items() if text is not None}


def changed_key_lines(before: Mapping[str, str], now: Mapping[str, str], has_history: bool) -> Iterator[str]:
    """A line about each key whose value differs from that in a checkpoint.

    Args:
        before: the checkpoint's values; empty: it is from a release that did not store them.
        has_history: whether an epoch has finished.

    >>> list(changed_key_lines({"gradient_clip": "1.0"}, {"gradient_clip": "2.0"}, has_history=True))
    ['gradient_clip: 2.0 from here on, 1.0 in the checkpoint']
    """
    for name, text in now.items():
        was = before.get(name, text)
        if was == text:
            continue
        if name == "learning_rate" and has_history and now.get("learning_rates") == "None":
            yield f"{name}: {text}, {was} in the checkpoint: {RATE_IS_KEPT}"
            continue
        effect = EFFECTS.get(name)
        yield f"{name}: {text} from here on, {was} in the checkpoint" + (f": {effect}" if effect else "")
