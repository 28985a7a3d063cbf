"""The keys that determine what a training computes, as a checkpoint notes them, and what is said where they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hvdtrain.config.keys import declared

WITHOUT_EFFECT_ON_RESULTS = frozenset(
    ("device", "torch_compile", "checkpoint_modules", "deterministic", "use_horovod", "torch_distributed", "horovod_timeline")
) | {"learning_rate_file"}
"""Keys of the sections below that change how, and not what, a training computes."""

BY_THE_OPTIMIZER = frozenset(("optimizer",))
"""What is compared with the optimizer's state, where functions of the config are covered, too."""

EFFECTS = {
    "random_seed": "the random numbers of the next steps (dropout, noise) are others; the initial weights are not drawn again",
    "num_epochs": "a schedule that ends with the last epoch is stretched: the rates go on from another place of its curve",
    "ema_decay": "the moving average goes on, or begins with the present weights",
}
"""By key, what its change does, where that goes without saying for no user."""

RATE_IS_KEPT = "no effect: an epoch goes on with the rate of the one before (learning_rates = {EPOCH: RATE} changes it)"


def key_texts(sections: Iterable[tuple[str, object]]) -> dict[str, str]:
    """By name, the values of all keys of some sections as text. Functions are left out: two of them cannot be compared.

    Args:
        sections: each with the beginning of its keys' names, such as 'train.'.
    """
    skipped = WITHOUT_EFFECT_ON_RESULTS | BY_THE_OPTIMIZER
    found = {
        f"{prefix}{each.name}": as_text(getattr(section, each.field))
        for prefix, section in sections
        for each in declared(type(section))
        if each.name not in skipped
    }
    return {name: text for name, text in found.items() if text is not None}


def as_text(value: Any) -> str | None:
    """A key's value; None: it has a function, or another object that cannot be compared."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        parts = {str(name): as_text(part) for name, part in value.items()}
        return (
            None if None in parts.values() else "{" + ", ".join(f"{name}: {part}" for name, part in sorted(parts.items())) + "}"
        )
    if isinstance(value, (list, tuple)):
        several = [as_text(part) for part in value]
        return None if None in several else f"[{', '.join(map(str, several))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


def changed_key_lines(before: Mapping[str, str], now: Mapping[str, str], has_history: bool) -> Iterator[str]:
    """A line about each key that has another value than when a checkpoint was written.

    Args:
        before: of the checkpoint; empty: it is of a release that did not note them.
        has_history: whether an epoch was finished before.

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
