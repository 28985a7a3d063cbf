"""The keys of chunks, and how they are parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, parsed_by
from hvdtrain.data.plan.batch_keys import BatchKeys, Limit
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.training.run_keys import RunKeys

Tail = Literal["keep", "drop_short"]

FRAMES_END = 2**31
"""Numbers of frames are below this: the lengths of sequences are int32."""


@dataclass(frozen=True)
class ChunkSize:
    """Size and step of chunks in frames, for every data key or by data key (data keys that are not named stay whole)."""

    size: int | Mapping[str, int]
    step: int | Mapping[str, int]

    def size_and_step(self, name: str) -> tuple[int, int] | None:
        """Size and step of a data key; None: it stays whole."""
        if isinstance(self.size, Mapping) or isinstance(self.step, Mapping):
            if not isinstance(self.size, Mapping) or not isinstance(self.step, Mapping) or name not in self.size:
                return None
            return self.size[name], self.step[name]
        return self.size, self.step


def parse(value: Any) -> ChunkSize | None:
    """Parse the key `chunking`: '50:25', '50', 50, (50, 25), {'data': 50}, ({'data': 50}, {'data': 25}); None if it is off.

    Raises: ValueError.

    >>> parse("50:25"), parse({"data": 50}), parse("0")
    (ChunkSize(size=50, step=25), ChunkSize(size={'data': 50}, step={'data': 50}), None)
    """
    if isinstance(value, str):
        value = [int(number) for number in value.split(":")]
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not 1 <= len(values) <= 2:
        raise ValueError(value)
    size = values[0]
    step = values[-1] or size
    if not size:
        return None
    if isinstance(size, dict) and isinstance(step, dict):
        if size.keys() != step.keys() or not all(_is_positive(number) for number in (*size.values(), *step.values())):
            raise ValueError(value)
    elif not (_is_positive(size) and _is_positive(step)):
        raise ValueError(value)
    return ChunkSize(size, step)


@dataclass(frozen=True)
class Context:
    """The frames that are added before and after every sequence or chunk, by data key."""

    before: Mapping[str, int]
    after: Mapping[str, int]

    def frames(self, name: str) -> tuple[int, int]:
        """The frames before and after, of a data key."""
        return self.before.get(name, 0), self.after.get(name, 0)


def parse_context(value: Any) -> Context | None:
    """Parse the key `context_window`: 5, {'data': 5}, or frames before and after, ({'data': 2}, {'data': 2}); None: it is off.

    Raises: ValueError.

    >>> parse_context(4), parse_context(({"data": 2}, {}))
    (Context(before={'data': 1}, after={'data': 2}), Context(before={'data': 2}, after={}))
    """
    if isinstance(value, (list, tuple)):
        before, after = value
    else:
        by_key = value if isinstance(value, Mapping) else {"data": 1 if value is None else value}
        if not all(_is_positive(frames) for frames in by_key.values()):
            raise ValueError(value)
        before = {name: (frames - 1) // 2 for name, frames in by_key.items()}
        after = {name: frames // 2 for name, frames in by_key.items()}
    numbers = [*before.values(), *after.values()]
    if not all(_is_count(frames) for frames in numbers):
        raise ValueError(value)
    return Context(before, after) if any(numbers) else None


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < FRAMES_END


@dataclass(frozen=True, kw_only=True)
class ChunkKeys(Section):
    """How training sequences are cut into chunks. In evaluation they stay whole."""

    changes_results = True
    varies = True

    chunking: int | str | dict[str, Any] | tuple[Any, ...] | list[Any] | None = key(
        None,
        "cut training sequences into chunks of SIZE frames, one every STEP frames: 'SIZE:STEP', SIZE (the step is the size), or "
        "(SIZE, STEP), where both may be dicts by data key (data keys that are not named stay whole); 0 or None: off",
        Rule(
            "'SIZE:STEP', SIZE, (SIZE, STEP), or dicts by data key for both, with positive integers below 2**31", parsed_by(parse)
        ),
    )
    min_chunk_size: int | dict[str, int] = key(
        0,
        "minimal number of frames of the last chunk of a sequence; chunking_tail determines what happens to shorter ones",
        not_negative,
    )
    chunking_tail: Tail | None = key(
        None,
        "'keep': stop when at most min_chunk_size frames are left, but always keep the first chunk of a sequence; "
        "'drop_short': drop chunks of less than min_chunk_size frames, and sequences without longer ones; "
        "None: as RETURNN does, 'drop_short' with PyTorch, 'keep' with TensorFlow",
    )
    context_window: int | dict[str, int] | tuple[Any, ...] | list[Any] | None = key(
        None,
        "add context to every sequence and every chunk, also in evaluation: with N, N - 1 frames of the data key 'data', half of "
        "them on each side, taken from the sequence, and zeros beyond its ends; or a dict of N by data key; or two dicts of the "
        "numbers of frames before and after; 1 or None: off",
        Rule(
            "a positive integer below 2**31, a dict of them by data key, or two dicts of the frames before and after",
            parsed_by(parse_context),
        ),
    )

    def resolved(self, sections: Sections) -> Self:
        run = sections.get(RunKeys)
        if run is None or self.chunking_tail is not None:
            return self
        # Without a minimum, both rules are the same.
        drops = "short chunks dropped" in FRAMEWORKS[run.backend].features and bool(self.min_chunk_size)
        return replace(self, chunking_tail="drop_short" if drops else "keep")

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems = []
        how = parse(self.chunking)
        batches = sections.get(BatchKeys)
        has_frame_batches = batches is not None and batches.frame_batches
        if how is not None and has_frame_batches:
            problems += problem(
                "conflict",
                f"chunking: expected none with frame_batches, which cuts all frames at batch_size, got {self.chunking!r}",
            )
        if parse_context(self.context_window) is not None and has_frame_batches:
            problems += problem(
                "conflict",
                f"context_window: expected none with frame_batches, which have no sequences to put it around, got "
                f"{self.context_window!r}",
            )
        by_key = self.min_chunk_size if isinstance(self.min_chunk_size, dict) else {}
        if any(least < 0 for least in by_key.values()):
            problems += problem(
                "out-of-range",
                f"min_chunk_size: expected zero or a positive number for every data key, got {self.min_chunk_size}",
            )
        if how is not None and self.chunking_tail == "drop_short":
            for name in how.size if isinstance(how.size, Mapping) else by_key or ["data"]:
                size = how.size_and_step(name)
                least = limit_of(self.min_chunk_size, name)
                if size is not None and least > size[0]:
                    problems += problem(
                        "conflict",
                        f"min_chunk_size: expected at most {size[0]}, the size of a chunk in chunking, got {least} "
                        "(with chunking_tail 'drop_short' no chunk would be left)",
                    )
        return problems


def keys_of(keys: ChunkKeys) -> list[str]:
    """The data keys that the config names for chunks."""
    how = parse(keys.chunking)
    named = list(how.size) if how is not None and isinstance(how.size, Mapping) else []
    return named + [name for name in keys.min_chunk_size if name not in named] if isinstance(keys.min_chunk_size, dict) else named


def limit_of(limit: Limit, name: str) -> int:
    """The limit for a data key; 0: none."""
    return (limit.get(name, 0) if isinstance(limit, Mapping) else limit) or 0
