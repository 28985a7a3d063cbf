"""The keys of chunks, and how they are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative
from hvdtrain.data.plan.batch_keys import BatchKeys, Limit
from hvdtrain.errors import Problem, problem

Tail = Literal["keep", "drop_short"]


@dataclass(frozen=True)
class Cut:
    """Size and step of chunks in frames, for every data key or by data key (data keys that are not named stay whole)."""

    size: int | Mapping[str, int]
    step: int | Mapping[str, int]

    def of(self, name: str) -> tuple[int, int] | None:
        """Size and step of a data key; None: it stays whole."""
        if isinstance(self.size, Mapping) or isinstance(self.step, Mapping):
            if not isinstance(self.size, Mapping) or not isinstance(self.step, Mapping) or name not in self.size:
                return None
            return self.size[name], self.step[name]
        return self.size, self.step


def parse(value: Any) -> Cut | None:
    """Parse the key `chunking`: '50:25', '50', 50, (50, 25), {'data': 50}, ({'data': 50}, {'data': 25}); None if it is off.

    Raises: ValueError.

    >>> parse("50:25"), parse({"data": 50}), parse("0")
    (Cut(size=50, step=25), Cut(size={'data': 50}, step={'data': 50}), None)
    """
    if isinstance(value, str):
        value = [int(part) for part in value.split(":")]
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if not 1 <= len(parts) <= 2:
        raise ValueError(value)
    size, step = parts[0], parts[-1] or parts[0]
    if not size:
        return None
    if isinstance(size, dict) and isinstance(step, dict):
        if size.keys() != step.keys() or not all(_is_positive(number) for number in (*size.values(), *step.values())):
            raise ValueError(value)
    elif not (_is_positive(size) and _is_positive(step)):
        raise ValueError(value)
    return Cut(size, step)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _parses(value: Any) -> bool:
    """Whether `parse` accepts a value of the key chunking."""
    try:
        parse(value)
    except (ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class ChunkKeys(Section):
    """How training sequences are cut into chunks. In evaluation they stay whole."""

    chunking: int | str | dict[str, Any] | tuple[Any, ...] | list[Any] | None = key(
        None,
        "cut training sequences into chunks of SIZE frames, one every STEP frames: 'SIZE:STEP', SIZE (the step is the size), or "
        "(SIZE, STEP), where both may be dicts by data key (data keys that are not named stay whole); 0 or None: off",
        Rule("'SIZE:STEP', SIZE, (SIZE, STEP), or dicts by data key for both, with positive integers", _parses),
    )
    min_chunk_size: int | dict[str, int] = key(
        0,
        "minimal number of frames of the last chunk of a sequence; chunking_tail determines what happens to shorter ones",
        not_negative,
    )
    chunking_tail: Tail = key(
        "keep",
        "'keep': stop when at most min_chunk_size frames are left, but always keep the first chunk of a sequence; "
        "'drop_short': drop chunks of less than min_chunk_size frames, and sequences without longer ones",
    )

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        found = []
        how = parse(self.chunking)
        batches = others.get(BatchKeys)
        if how is not None and batches is not None and batches.frame_batches:
            found += problem(
                "conflict",
                f"chunking: expected none with frame_batches, which cuts all frames at batch_size, got {self.chunking!r}",
            )
        by_key = self.min_chunk_size if isinstance(self.min_chunk_size, dict) else {}
        if any(least < 0 for least in by_key.values()):
            found += problem(
                "out-of-range",
                f"min_chunk_size: expected zero or a positive number for every data key, got {self.min_chunk_size}",
            )
        if how is not None and self.chunking_tail == "drop_short":
            for name in how.size if isinstance(how.size, Mapping) else by_key or ["data"]:
                size, least = how.of(name), limit_of(self.min_chunk_size, name)
                if size is not None and least > size[0]:
                    found += problem(
                        "conflict",
                        f"min_chunk_size: expected at most {size[0]}, the size of a chunk in chunking, got {least} "
                        "(with chunking_tail 'drop_short' no chunk would be left)",
                    )
        return found


def keys_of(keys: ChunkKeys) -> list[str]:
    """The data keys that the config names for chunks."""
    how = parse(keys.chunking)
    named = list(how.size) if how is not None and isinstance(how.size, Mapping) else []
    return named + [name for name in keys.min_chunk_size if name not in named] if isinstance(keys.min_chunk_size, dict) else named


def limit_of(limit: Limit, name: str) -> int:
    return (limit.get(name, 0) if isinstance(limit, Mapping) else limit) or 0
