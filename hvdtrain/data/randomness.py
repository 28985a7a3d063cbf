"""Random numbers: each stream is made from the config's seed and from what it is for, so that runs and resumed runs are equal.

Users' code draws from the process-wide generators of Python, numpy and PyTorch. Each step of a training seeds them, so they
belong to the thread that trains. Users' code that reads data must not draw from them meanwhile (combine/user_code.py): it would
change the numbers of the step, and get numbers that depend on the time.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy

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
        place = step - self._first
        if not 0 <= place < STEPS or self._first < 0:
            self[step]
            place = step - self._first
        return self._numbers[place]


def _mix_steps(count: int, parts: tuple[int, ...], first: int) -> Array:
    """`mix_seeds(count, *parts, step)` for `STEPS` steps; uint32 of shape (STEPS, count). Numpy's SeedSequence, whose algorithm
    is fixed, with arrays in place of numbers."""
    words = [numpy.full(STEPS, word, numpy.uint32) for part in parts for word in _words(part)]
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
        for place in range(4):
            if source != place:
                pool[place] = mixed(pool[place], hashed(pool[source]))
    for values in words[4:]:
        pool = [mixed(word, hashed(values)) for word in pool]
    constant = 0x8B51F9DD
    return numpy.stack([hashed(pool[number % 4], 0x58F38DED) for number in range(count)], axis=1)


def _words(number: int) -> list[int]:
    """The 32-bit words of a number, the lowest first; at least one."""
    return [number & 0xFFFFFFFF, *(_words(number >> 32) if number >> 32 else [])]


SEED_RANDOM = super(random.Random, random._inst).seed
"""What `random.seed` does with a number, and with `gauss_next`; the checks around it take a quarter of the time."""


def seed_generators(seed: int) -> None:
    """Seed the process-wide generators of Python, numpy and, where it is imported, PyTorch (that of CPUs)."""
    SEED_RANDOM(seed)
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    numpy.random.seed(seed)
    if (generator := _torch_generator()) is not None:
        generator.manual_seed(seed)


@contextmanager
def seeded_config(seed: int, on_draw: Callable[[], object]) -> Iterator[None]:
    """Seed these generators for a config that is read within the `with` block, also if it is the one that imports PyTorch.

    Args:
        on_draw: called at the end if the config has drawn from them.
    """
    seed = mix_seed(seed, CONFIG)
    seed_generators(seed)
    before = _python_state(), _numpy_state()
    finder = _SeededTorch(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
        if (_python_state(), _numpy_state()) != before or _torch_has_drawn(seed):
            on_draw()
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def _torch_has_drawn(seed: int) -> bool:
    """Whether somebody has drawn from PyTorch's generator since it was seeded."""
    generator = _torch_generator()
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


def generator_states() -> tuple[Any, ...]:
    """The states of these generators; two are equal if nothing was drawn in between.

    >>> before = generator_states()
    >>> before == generator_states(), random.random() < 1, before == generator_states()
    (True, True, False)
    """
    generator = _torch_generator()
    of_torch = None if generator is None else _torch_state(generator)
    return _python_state(), _numpy_state(), of_torch


@contextmanager
def own_numbers(*parts: int) -> Iterator[None]:
    """Within the `with` block, the generators are seeded with a number mixed from the parts; then they are as before."""
    before = random.getstate()
    of_numpy = numpy.random.get_state()
    generator = _torch_generator()
    of_torch = None if generator is None else generator.get_state()
    seed_generators(mix_seed(*parts))
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(of_numpy)
        if generator is not None:
            generator.set_state(of_torch)
        elif (imported := _torch_generator()) is not None:
            imported.seed()  # a random one, as PyTorch begins with


def _torch_generator() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _python_state() -> Any:
    """The words and the position of Python's Mersenne Twister, and the second number of the last pair that it has normalized.
    `getstate` would make a tuple of 625 numbers, which takes fifty times as long."""
    memory = _python_memory()
    return random.getstate() if memory is None else (memory.raw, random._inst.gauss_next)  # type: ignore[attr-defined]


@cache
def _python_memory() -> Any:
    """Where they are; None: not where CPython has them."""
    if sys.implementation.name != "cpython":
        return None
    memory = (ctypes.c_char * (625 * 4)).from_address(id(random._inst) + object.__basicsize__)
    *words, position = random.getstate()[1]
    return memory if memory.raw == numpy.array([position, *words], numpy.uint32).tobytes() else None


def _numpy_state() -> bytes:
    """The words of numpy's Mersenne Twister and its position among them, and the second number of the last pair that it has
    normalized. `get_state` would take a hundred times as long."""
    bits = numpy.random.get_bit_generator()  # type: ignore[attr-defined]  # not in numpy's stubs
    place = _place_in_numpy()
    if not isinstance(bits, numpy.random.MT19937) or place is None:
        return pickle.dumps(numpy.random.get_state(legacy=False))
    second = ctypes.string_at(id(numpy.random.mtrand._rand) + place, SECOND)
    return ctypes.string_at(bits.ctypes.state_address, 625 * 4) + second


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
    place = memory.find(struct.pack("q", state["has_gauss"]) + struct.pack("d", state["gauss"]))
    return place if place > 0 else None


WORDS = 624 * 4
"""The bytes of a Mersenne Twister's words."""

AROUND = 24
"""The bytes before and after them in a generator of PyTorch's, with its position, and the second numbers of pairs."""


def _torch_state(generator: Any) -> bytes:
    """The state of PyTorch's generator. `get_state` would let the thread that trains take Python's lock for a moment each time:
    for small batches, waking it took a seventh of the step."""
    place = _place_in_torch()
    if place is None:
        state: bytes = generator.get_state().numpy().tobytes()
        return state
    return ctypes.string_at(_address(generator) + place - AROUND, WORDS + 2 * AROUND)


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
    place = ctypes.string_at(_address(tried), 256).find(words[:64])
    if place < AROUND or ctypes.string_at(_address(tried) + place, WORDS) != words:
        return None
    seen = set()
    for dtype in (torch.float32, torch.float64):
        for draw in (torch.rand, torch.randn, torch.randn):  # the last one takes the second number of a pair
            seen.add(ctypes.string_at(_address(tried) + place - AROUND, WORDS + 2 * AROUND))
            draw(1, generator=tried, dtype=dtype)
    return place if len(seen) == 6 else None


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
