"""Fingerprints: texts that differ if a source of data does, and that are the same in every process and run."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import stat
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy

from hvdtrain.data.files import A_COPY
from hvdtrain.data.types import Array, imported_class

SIMPLE = (int, float, complex, bool, bytes, type(None), type(...))

MEMBERS = (list, tuple, set, frozenset)

CONSTANTS = (str, *SIMPLE, dict, *MEMBERS, os.PathLike, SimpleNamespace)
"""Values of a module or a class that count if code uses them."""

LONG = 1000
"""Members of a list or dict from which on texts in it are no names of files, and characters of a text that is kept as it is."""

ENDS = 32 << 20
"""The bytes at both ends of a large array that count."""

Functions = (type(lambda: None), type(len), type(list.append), type("".join), type(object.__init__), type(object().__str__))


CACHED: Any = type(functools.cache(len))


def fingerprint_of(value: Any) -> str:
    """A text that differs if a value of a config does: it covers what objects are made of, the code of functions and classes with
    what it refers to, and the sizes and modification times of named files.

    >>> fingerprint_of({"b": (1, None), "a": len, "c": list.__getitem__, "d": {"y", "x"}})
    "{'a': builtins.len, 'b': [1, None], 'c': builtins.list.__getitem__, 'd': {'x', 'y'}}"
    """
    return _Walk().text(value)


def fingerprint_of_file(path: str) -> str:
    """A text that differs if a file does. The folder of a copy (another one on every host) does not count: the name of
    a copy has a digest of the original path.

    Raises:
        OSError: there is no such file.
    """
    about = os.stat(path)
    name = os.path.basename(path)
    return repr((name if A_COPY.match(name) else os.path.realpath(path), about.st_size, about.st_mtime_ns))


class _Walk:
    """One walk through a value. An object that contains itself, or comes again, is not entered again."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str]] = {}
        self._names_files = True

    def text(self, value: Any) -> str:
        if isinstance(value, SIMPLE):
            return repr(value)
        if isinstance(value, (str, os.PathLike)):
            with suppress(OSError, ValueError):
                about = os.stat(value) if self._names_files else None
                # A folder may be named as a data key is, such as 'data'.
                if about is not None and (stat.S_ISREG(about.st_mode) or os.sep in str(value)):
                    return f"{os.path.abspath(value)!r} ({about.st_size} bytes, {about.st_mtime_ns})"
            return repr(str(value))
        if id(value) not in self._texts:
            self._texts[id(value)] = value, "..."  # it contains itself
            outside = self._names_files
            self._names_files = outside and not (isinstance(value, (Mapping, *MEMBERS)) and len(value) > LONG)
            try:
                text = self._compound(value)
            except RecursionError:
                text = f"{type(value).__qualname__} {_without_addresses(value)}"
            self._names_files = outside
            if len(text) > LONG:
                text = f"{text[:60]}... {hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"
            self._texts[id(value)] = value, text
        return self._texts[id(value)][1]

    def _compound(self, value: Any) -> str:
        if isinstance(value, Mapping):
            texts = [(repr(key) if _is_plain(key) else self.text(key), key) for key in value]
            return "{" + ", ".join(f"{text}: {self.text(value[key])}" for text, key in sorted(texts, key=itemgetter(0))) + "}"
        if isinstance(value, (list, tuple)):
            if not self._names_files and _is_plain(value):
                return repr(value)
            return "[" + ", ".join(map(self.text, value)) + "]"
        if isinstance(value, (set, frozenset)):  # whose order differs from process to process
            return "{" + ", ".join(sorted(map(self.text, value))) + "}"
        if isinstance(value, functools.partial):
            return f"partial({self.text([value.func, value.args, value.keywords])})"
        if isinstance(value, CACHED):
            return self.text(value.__wrapped__)
        if isinstance(value, CodeType):
            return f"{value.co_code!r} {value.co_names} {self.text(value.co_consts)}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}{self._code_of_class(value)}"
        if inspect.ismethod(value):
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, Functions):
            owner = getattr(value, "__objclass__", type(value))  # a method of a built-in class has no __module__
            name = f"{getattr(value, '__module__', None) or owner.__module__}.{value.__qualname__}"
            code = getattr(value, "__code__", None)
            return name if code is None else f"{name} {self._code_text(value, code)}"
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype != object:
            return _array_text(numpy.asarray(value))
        if isinstance(value, imported_class("torch", "Tensor")):
            torch = sys.modules["torch"]
            with suppress(Exception):  # a quantized or sparse one, or one without values
                numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                return f"{value.dtype} {tuple(value.shape)} {_array_text(numbers)}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        """An object, by what would be pickled of it."""
        kind = type(value)
        if kind.__module__.partition(".")[0] == "pyarrow":  # its tables may be all of the data
            return f"{kind.__qualname__} {_without_addresses(value)[:LONG]} {getattr(value, 'nbytes', '')}"
        if isinstance(mark := getattr(value, "_fingerprint", None), str):  # that of the package `datasets`
            return f"{kind.__qualname__} {mark}"
        if kind.__module__.partition(".")[0] == "h5py":  # its datasets may be all of the data, too
            with suppress(AttributeError, ValueError):  # no group or dataset, or a closed one
                return f"{kind.__qualname__} {value.name} {_without_addresses(value)} {self.text(value.file.filename)}"
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # it cannot be pickled: a lock, an open file, or what its own methods refuse
            reduced = None
        if reduced is None:
            # A __repr__ that its class defines may show the order of a set.
            named = "" if isinstance(kind.__repr__, FunctionType) else _without_addresses(value)
            return f"{self.text(kind)} {named} {self.text(getattr(value, '__dict__', {}))}"
        contents = list(reduced[1:]) if isinstance(reduced, tuple) else [reduced]
        if kind.__module__.startswith("datasets.") and len(contents) > 1 and isinstance(contents[1], dict):
            contents[1] = {name: member for name, member in contents[1].items() if not name.endswith("hffs_cache")}  # by process
        for number in (2, 3):  # iterators over members; what follows may be a function
            if number < len(contents) and contents[number] is not None:
                contents[number] = list(contents[number])
        return f"{self.text(kind)} {self.text(contents)}"

    def _code_text(self, function: Any, code: CodeType) -> str:
        """The code of a function, its default arguments, and what it refers to outside."""
        cells = []
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is still empty
                cells.append(cell.cell_contents)
        outside = {}
        for name in _names_in(code):
            value = function.__globals__.get(name)
            is_here = getattr(value, "__module__", None) == function.__module__ and isinstance(value, (type, CACHED, *Functions))
            if is_here or (value is not None and isinstance(value, CONSTANTS)):
                outside[name] = value
        return self.text([code, function.__defaults__, function.__kwdefaults__, cells, outside])

    def _code_of_class(self, kind: type) -> str:
        """The methods and constants of a class and of those that it derives from, but for Python's own."""
        functions: dict[str, Any] = {}
        for each in kind.__mro__:
            if each.__module__ in ("builtins", "abc", "typing", "collections.abc"):
                continue
            # Classes of packages have constants that are no setting, such as the number of the process in fsspec's.
            is_installed = "-packages" in str(getattr(sys.modules.get(each.__module__), "__file__", ""))
            for name, member in vars(each).items():
                function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
                is_constant = isinstance(member, CONSTANTS) and not name.startswith("__") and not is_installed
                if is_constant or hasattr(function, "__code__") or isinstance(function, CACHED):
                    functions[f"{each.__qualname__}.{name}"] = function
        return f" {self.text(functions)}" if functions else ""


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, *SIMPLE)) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _names_in(code: CodeType) -> set[str]:
    """The names in code and in the functions within it."""
    return {*code.co_names}.union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _array_text(array: Array) -> str:
    rows = max(1, ENDS // max(1, array[:1].nbytes)) if array.ndim else None
    ends = [array] if array.nbytes <= 2 * ENDS else [array[:rows], array[-rows:]]  # type: ignore[operator]
    return repr((array.dtype.str, array.shape, [zlib.crc32(numpy.ascontiguousarray(end).data) for end in ends]))


def _without_addresses(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", repr(value))
