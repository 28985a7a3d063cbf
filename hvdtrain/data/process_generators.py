"""The process-wide generators of Python, numpy and PyTorch: seeding them, comparing their states, and noticing who draws."""

from __future__ import annotations

import ctypes
import operator
import pickle
import random
import struct
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy

SEED_RANDOM = super(random.Random, random._inst).seed
"""What `random.seed` does with a number, and with `gauss_next`; the checks around it take a quarter of the time."""


def seed_generators(seed: int) -> None:
    """Seed the process-wide generators of Python, numpy and, where it is imported, PyTorch (that of CPUs)."""
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    seedings = seedings_of(torch_generator())
    copies, are_of_c = _copies() if _looks else ((), False)
    if not are_of_c:
        for seeding in seedings:
            seeding(seed)
        return
    calls: list[Callable[[], Any]] = [*copies, *(partial(seeding, seed) for seeding in seedings), *copies]
    # In one call, within which no other thread runs, as all that it calls is C: no draw comes between a copy and a seeding.
    results = tuple(map(operator.call, calls))
    for look in tuple(_looks):
        look.note_seeding(results[: len(copies)], results[-len(copies) :])


@cache
def seedings_of(of_torch: Any) -> tuple[Callable[[int], object], ...]:
    return (SEED_RANDOM, numpy.random.seed, *(() if of_torch is None else (of_torch.manual_seed,)))


class Look:
    """Whether anybody draws from the process-wide generators within a `with` block. `seed_generators`, which a step calls
    meanwhile, is no draw.

    >>> with Look() as look:
    ...     seed_generators(7)
    ...     look.has_drawn(), random.random() < 1, look.has_drawn(), seed_generators(7), look.has_drawn()
    (False, True, True, None, True)
    """

    def __enter__(self) -> Look:
        self._has_drawn = False
        self._states = generator_states()
        _looks.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _looks.discard(self)

    def has_drawn(self) -> bool:
        return self._has_drawn or generator_states() != self._states

    def note_seeding(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        """Take over the states after a seeding. A look that begins or ends between it and this call takes it for a draw, but none
        takes a draw for a seeding."""
        self._has_drawn = self._has_drawn or before != self._states
        self._states = after


_looks: set[Look] = set()
"""Those that are open, of all threads."""


def generator_states() -> tuple[Any, ...]:
    """The states of these generators; two are equal if nothing was drawn in between.

    >>> before = generator_states()
    >>> before == generator_states(), random.random() < 1, before == generator_states()
    (True, True, False)
    """
    return tuple(copy() for copy in _copies()[0])


OF_PYTHON_AND_NUMPY = 4
"""How many of these states do not depend on whether PyTorch is imported."""


def torch_generator() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _copies() -> tuple[tuple[Callable[[], Any], ...], bool]:
    """Functions that copy the states, and whether all of them are C's: no other thread runs while they do."""
    return _copies_of(numpy.random.get_bit_generator(), torch_generator())  # type: ignore[attr-defined]  # not in numpy's stubs


@cache
def _copies_of(of_numpy: Any, of_torch: Any) -> tuple[tuple[Callable[[], Any], ...], bool]:
    memories = [_python_memory(), *_numpy_memories(of_numpy), *([] if of_torch is None else [_torch_memory(of_torch)])]
    in_numpy = lambda: pickle.dumps(numpy.random.get_state(legacy=False))  # noqa: E731
    elsewhere = (random.getstate, in_numpy, in_numpy, lambda: of_torch.get_state().numpy().tobytes())
    copies = [copy if memory is None else partial(bytes, memory) for memory, copy in zip(memories, elsewhere, strict=False)]
    copies.insert(1, partial(getattr, random._inst, "gauss_next"))  # the second number of the last pair that it has normalized
    return tuple(copies), None not in memories


@cache
def _python_memory() -> Any:
    """The words and the position of Python's Mersenne Twister; None: they are not where CPython has them. `getstate` would make a
    tuple of 625 numbers, which takes fifty times as long."""
    if sys.implementation.name != "cpython":
        return None
    memory = (ctypes.c_char * (625 * 4)).from_address(id(random._inst) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return memory if memory.raw == numpy.array([position, *words], numpy.uint32).tobytes() else None


def _numpy_memories(bits: Any) -> list[Any]:
    """The same of numpy's, and the second number of the last pair that it has normalized; None: it has another kind, or they are
    elsewhere. `get_state` would take a hundred times as long."""
    offset = _place_in_numpy()
    if not isinstance(bits, numpy.random.MT19937) or offset is None:
        return [None, None]
    second = (ctypes.c_char * SECOND).from_address(id(numpy.random.mtrand._rand) + offset)
    return [(ctypes.c_char * (625 * 4)).from_address(bits.ctypes.state_address), second]


SECOND = 16
"""The bytes of the second number of a pair in a generator of numpy's, after those that say whether there is one."""


@cache
def _place_in_numpy() -> int | None:
    """Where they are; None: not where numpy has them."""
    if sys.implementation.name != "cpython":
        return None
    tried = numpy.random.RandomState(1)
    tried.normal()
    state: Any = tried.get_state(legacy=False)
    memory = ctypes.string_at(id(tried), type(tried).__basicsize__)
    offset = memory.find(struct.pack("q", state["has_gauss"]) + struct.pack("d", state["gauss"]))
    return offset if offset > 0 else None


WORDS = 624 * 4
"""The bytes of a Mersenne Twister's words."""

AROUND = 24
"""The bytes before and after them in a generator of PyTorch's, with its position, and the second numbers of pairs."""


def _torch_memory(generator: Any) -> Any:
    """The same of PyTorch's; None: it is not where it is in today's versions. `get_state` would let the thread that trains take
    Python's lock for a moment each time: for small batches, waking it took a seventh of the step."""
    offset = _place_in_torch()
    if offset is None:
        return None
    return (ctypes.c_char * (WORDS + 2 * AROUND)).from_address(_address(generator) + offset - AROUND)


def _address(generator: Any) -> int:
    """Where the C++ object of a generator is."""
    return ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value or 0


@cache
def _place_in_torch() -> int | None:
    """Where the words are in PyTorch's generators, tried with one: with all kinds of draws, these bytes change; None: not where
    they are in today's versions."""
    if sys.implementation.name != "cpython":
        return None
    torch = sys.modules["torch"]
    try:
        tried = torch.Generator()
    except RuntimeError:  # before all of PyTorch is imported
        return None
    tried.manual_seed(1)
    words = numpy.frombuffer(tried.get_state().numpy().tobytes()[AROUND:], numpy.uint64, 624).astype(numpy.uint32).tobytes()
    offset = ctypes.string_at(_address(tried), 256).find(words[:64])
    if offset < AROUND or ctypes.string_at(_address(tried) + offset, WORDS) != words:
        return None
    seen = set()
    for dtype in (torch.float32, torch.float64):
        for draw in (torch.rand, torch.randn, torch.randn):  # the last one takes the second number of a pair
            seen.add(ctypes.string_at(_address(tried) + offset - AROUND, WORDS + 2 * AROUND))
            draw(1, generator=tried, dtype=dtype)
    return offset if len(seen) == 6 else None
