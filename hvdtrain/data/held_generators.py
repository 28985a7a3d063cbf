"""Generators of random numbers that the user's code holds, such as `self.rng = numpy.random.default_rng(1)`."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy

from hvdtrain.data.process_generators import generator_states, seed_generators
from hvdtrain.data.randomness import mix_seed
from hvdtrain.data.types import imported_class

MOST_OBJECTS = 1000
"""How many objects are looked at, those nearest first: the items themselves may be millions."""

MOST_ENTRIES = 64
"""How many entries of a list, tuple or dict are looked at."""


class Generators:
    """The process-wide ones, and those that an object reaches by attributes, and by variables that its functions use.

    >>> class Items:
    ...     def __init__(self): self.rng = numpy.random.default_rng(1)
    >>> items = Items()
    >>> generators = Generators(items)
    >>> before = generators.states()
    >>> generators.states() == before, items.rng.random() < 1, generators.states() == before
    (True, True, False)
    """

    def __init__(self, root: Any) -> None:
        self._held = [each for each in _reachable(root) if _is_generator(each)]

    def states(self) -> tuple[Any, ...]:
        """Two are equal if nothing was drawn in between."""
        return (*generator_states(), *self.held_states())

    def held_states(self) -> tuple[bytes, ...]:
        """The same without the process-wide ones."""
        return tuple(_bytes(_state(each)) for each in self._held)

    def seed(self, seed: int) -> None:
        """Seed the process-wide ones with this number, and each other with one that is made of it and its place."""
        seed_generators(seed)
        for place, each in enumerate(self._held):
            number = mix_seed(seed, place)
            if isinstance(each, numpy.random.Generator):
                each.bit_generator.state = type(each.bit_generator)(number).state
            elif isinstance(each, (random.Random, numpy.random.RandomState)):
                each.seed(number)
            else:
                each.manual_seed(number)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """After the `with` block, those that the object holds are as before."""
        before = [_state(each) for each in self._held]
        try:
            yield
        finally:
            for each, state in zip(self._held, before, strict=True):
                if isinstance(each, numpy.random.Generator):
                    each.bit_generator.state = state
                elif isinstance(each, random.Random):
                    each.setstate(state)
                else:
                    each.set_state(state)


def _is_generator(value: Any) -> bool:
    """Whether it is one, and not process-wide."""
    if isinstance(value, numpy.random.Generator):
        return True
    if isinstance(value, numpy.random.RandomState):
        return value is not numpy.random.mtrand._rand
    if isinstance(value, random.Random):
        return value is not random._inst and not isinstance(value, random.SystemRandom)
    if not isinstance(value, imported_class("torch", "Generator")):
        return False
    return value is not sys.modules["torch"].default_generator and value.device.type == "cpu"


def _state(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _bytes(state: Any) -> bytes:
    return pickle.dumps(state if isinstance(state, (dict, tuple)) else state.numpy())  # a tensor takes long to pickle


def _reachable(root: Any) -> Iterator[Any]:
    """The object and what it refers to, the nearest first."""
    waiting = deque([root])
    seen = {id(root): root}
    methods: dict[type, list[FunctionType]] = {}
    while waiting:
        value = waiting.popleft()
        yield value
        for inner in _inside(value, methods):
            if len(seen) < MOST_OBJECTS and id(inner) not in seen and not isinstance(inner, (str, int, float, type, ModuleType)):
                seen[id(inner)] = inner
                waiting.append(inner)


def _inside(value: Any, methods: dict[type, list[FunctionType]]) -> list[Any]:
    """What an object refers to. `methods`: by class, those that are known."""
    if isinstance(value, FunctionType):
        if (value.__module__ or "").partition(".")[0] in sys.stdlib_module_names:
            return []  # `tempfile` has one, too
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        return [*_contents(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__globals__[name] for name in names)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    # By their own methods: those of a class that derives from them are the user's.
    if isinstance(value, dict):
        return list(islice(dict.values(value), MOST_ENTRIES))
    if isinstance(value, list):
        return list(islice(list.__iter__(value), MOST_ENTRIES))
    if isinstance(value, tuple):
        return list(islice(tuple.__iter__(value), MOST_ENTRIES))
    kind = type(value)
    if kind not in methods:
        kinds = [each for each in kind.__mro__ if not each.__module__.startswith("hvdtrain.")]
        methods[kind] = [each for kind in kinds for each in vars(kind).values() if isinstance(each, FunctionType)]
    attributes = getattr(value, "__dict__", None)
    return [*(attributes.values() if isinstance(attributes, dict) else ()), *methods[kind]]


def _contents(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        with suppress(ValueError):  # empty: its variable is not set yet
            yield cell.cell_contents
