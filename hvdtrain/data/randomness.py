"""Random numbers: each stream is made from the config's seed and from what it is for, so that runs and resumed runs are equal.

Users' code draws from the process-wide generators of Python, numpy and PyTorch. Each step of a training seeds them, so they
belong to the thread that trains. Users' code that reads data must not draw from them meanwhile (combine/user_code.py): it would
change the numbers of the step, and get numbers that depend on the time.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy

from hvdtrain.data.process_generators import (
    OF_PYTHON_AND_NUMPY,
    generator_states,
    seed_generators,
    seedings_of,
    torch_generator,
)
from hvdtrain.data.types import Array

NOISE = 0x6E6F697365
"""The stream of the noise of an update. Dropout, which came first, has no name: (seed, rank, step)."""

OPTIMIZER = 0x73746570
"""The stream of the numbers that an optimizer draws."""

EVALUATION = 0x6576616C
"""The stream of a batch that is evaluated."""

ITEM = 0x6974656D
"""The stream of a sequence that the user's code reads."""

COLLATE = 0x636F6C6C617465
"""The stream of a function that makes a batch of items."""

EPOCH = 0x65706F6368
"""The stream of the config's functions that decide on an epoch, such as its order."""

CONFIG = 0x636F6E666967
"""The stream of a config's code, while it is read."""


def mix_seed(*parts: int) -> int:
    """Mix numbers such as (seed, rank, step) into a 32-bit seed."""
    return int(numpy.random.SeedSequence(parts).generate_state(1)[0])


def mix_seeds(count: int, *parts: int) -> Array:
    """Mix numbers into N different seeds; uint32 of shape (count,)."""
    return numpy.random.SeedSequence(parts).generate_state(count)


def noise_seeds(seed: int, rank: int | None, step: int) -> Array:
    """The seeds of one update's noise, the same after a resume; uint32 of shape (2,).

    Args:
        rank: None: the noise is the same on all ranks, like the gradients.
        step: the number of training steps done before the last step of this update.
    """
    return mix_seeds(2, seed, 0 if rank is None else 1 + rank, step, NOISE)


STEPS = 1024
"""The number of steps whose seeds are computed at once."""


class StepSeeds:
    """The same as `mix_seeds(count, *parts, step)` for step after step, in a fraction of the time.

    >>> seeds = StepSeeds(3, 42, 1)
    >>> [(seeds[step] == mix_seeds(3, 42, 1, step)).all().item() for step in (0, 1023, 5000, 7)]
    [True, True, True, True]
    """

    def __init__(self, count: int, *parts: int) -> None:
        self._count = count
        self._parts = parts
        self._first = -1
        self._seeds: Array = numpy.zeros((0, count), numpy.uint32)
        self._numbers: list[int] = []  # the first one of each step

    def __getitem__(self, step: int) -> Array:
        """uint32 of shape (count,)."""
        first = step - step % STEPS
        if first != self._first:
            self._first = first
            self._seeds = _mix_steps(self._count, self._parts, first)
            self._numbers = self._seeds[:, 0].tolist() if self._count else []
        seeds: Array = self._seeds[step - first]
        return seeds

    def number(self, step: int) -> int:
        """The first one, as a number.

        >>> seeds = StepSeeds(1, 42, 1)
        >>> [seeds.number(step) == mix_seed(42, 1, step) for step in (1023, 1024, 5)]
        [True, True, True]
        """
        row = step - self._first
        if not 0 <= row < STEPS or self._first < 0:
            self[step]
            row = step - self._first
        return self._numbers[row]


def _mix_steps(count: int, parts: tuple[int, ...], first: int) -> Array:
    """`mix_seeds(count, *parts, step)` for `STEPS` steps; uint32 of shape (STEPS, count). Numpy's SeedSequence, whose algorithm
    is fixed, with arrays in place of numbers."""
    words = [numpy.full(STEPS, word, numpy.uint32) for number in parts for word in _words(number)]
    words.append(numpy.arange(first, first + STEPS, dtype=numpy.uint32))
    constant = 0x43B0D7E5

    def hashed(values: Any, factor: int = 0x931E8875) -> Any:
        nonlocal constant
        values = values ^ numpy.uint32(constant)
        constant = constant * factor & 0xFFFFFFFF
        values = values * numpy.uint32(constant)
        return values ^ values >> numpy.uint32(16)

    def mixed(first: Any, second: Any) -> Any:
        values = numpy.uint32(0xCA01F9DD) * first - numpy.uint32(0x4973F715) * second
        return values ^ values >> numpy.uint32(16)

    zeros = [numpy.zeros(STEPS, numpy.uint32)] * 4
    pool = [hashed(values) for values in (words + zeros)[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for values in words[4:]:
        pool = [mixed(word, hashed(values)) for word in pool]
    constant = 0x8B51F9DD
    return numpy.stack([hashed(pool[number % 4], 0x58F38DED) for number in range(count)], axis=1)


def _words(number: int) -> list[int]:
    """The 32-bit words of a number, the lowest first; at least one."""
    return [number & 0xFFFFFFFF, *(_words(number >> 32) if number >> 32 else [])]


@contextmanager
def seeded_config(seed: int, on_draw: Callable[[], object]) -> Iterator[None]:
    """Seed these generators for a config that is read within the `with` block, also if it is the one that imports PyTorch.

    Args:
        on_draw: called at the end if the config has drawn from them.
    """
    seed = mix_seed(seed, CONFIG)
    seed_generators(seed)
    before = generator_states()[:OF_PYTHON_AND_NUMPY]
    finder = _SeededTorch(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
        if generator_states()[:OF_PYTHON_AND_NUMPY] != before or _torch_has_drawn(seed):
            on_draw()
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def _torch_has_drawn(seed: int) -> bool:
    generator = torch_generator()
    if generator is None:
        return False
    now = generator.get_state()
    seeded = generator.manual_seed(seed).get_state()  # not of a new generator: PyTorch's compiler would have to be imported first
    generator.set_state(now)
    return bool(now.ne(seeded).any())


class _SeededTorch(MetaPathFinder):
    """Seeds PyTorch's generator when PyTorch is imported: it begins with a random seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)  # the others find it
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(self._execute, loader.exec_module)  # of this loader only, which loads nothing else
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        module.default_generator.manual_seed(self._seed)


@contextmanager
def own_numbers(*parts: int) -> Iterator[None]:
    """Within the `with` block, the generators are seeded with a number mixed from the parts; then they are as before."""
    before = random.getstate()
    of_numpy = numpy.random.get_state()
    generator = torch_generator()
    of_torch = None if generator is None else generator.get_state()
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    for seeding in seedings_of(generator):  # whoever looks need not know of it, as it is undone
        seeding(mix_seed(*parts))
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(of_numpy)
        if generator is not None:
            generator.set_state(of_torch)
        elif (imported := torch_generator()) is not None:
            imported.seed()  # a random one, as PyTorch begins with


class Alone:
    """Whether a thread that reads data has the generators for itself, because the thread that trains waits for that data.

    Attributes:
        has_them: whether the generators are only this process's readers': it was started to read.
    """

    def __init__(self) -> None:
        self.has_them = False
        self._is_waiting = threading.Event()
        self._turn = 0

    @contextmanager
    def while_waiting(self) -> Iterator[None]:
        """Around a wait of the thread that trains."""
        self._turn += 1
        self._is_waiting.set()
        try:
            yield
        finally:
            self._is_waiting.clear()
            self._turn += 1

    def turn(self) -> int | None:
        """Identifies the wait that goes on; None: the thread that trains does not wait. The main thread is alone."""
        if threading.current_thread() is threading.main_thread():
            return -1
        turn = self._turn
        return turn if self._is_waiting.is_set() else None

    def wait(self, seconds: float) -> None:
        """Return when the thread that trains waits, or after some seconds."""
        self._is_waiting.wait(seconds)


ALONE = Alone()
"""Of this process."""
