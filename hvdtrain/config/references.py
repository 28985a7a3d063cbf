"""Python objects that a config names in a string: `package.module:name` or `folder/file.py:name`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hvdtrain.config.absent import import_part
from hvdtrain.errors import ConfigError


def is_reference(value: object) -> bool:
    """Whether a value is a reference.

    >>> is_reference("my_corpus:Words"), is_reference("demos/g2p/words.py:Words"), is_reference("a.hdf,b.hdf")
    (True, True, False)
    """
    if not isinstance(value, str) or value.count(":") != 1:
        return False
    module, name = value.split(":")
    return name.isidentifier() and (module.endswith(".py") or all(package.isidentifier() for package in module.split(".")))


def resolve(reference: str) -> Any:
    """Import the module or file and return the object. Raises: ImportError, whose message names the reference; ConfigError."""
    module_name, name = reference.split(":")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name)
            if not path.exists():
                raise ImportError(f"no such file {module_name}")
            specification = importlib.util.spec_from_file_location(path.stem, path)
            if specification is None or specification.loader is None:
                raise ImportError(f"{module_name} cannot be loaded as Python")
            module = importlib.util.module_from_spec(specification)
            sys.modules.setdefault(path.stem, module)
            specification.loader.exec_module(module)
        else:
            module = import_part(module_name)
    except ConfigError:
        raise
    except Exception as error:
        is_file = isinstance(error, ModuleNotFoundError) and error.name == module_name and Path(f"{module_name}.py").exists()
        hint = f" (did you mean {module_name}.py:{name}?)" if is_file else ""
        raise ImportError(f"{reference}: {type(error).__name__}: {error}{hint}") from error
    if not hasattr(module, name):
        raise ImportError(f"{reference}: expected a name {name!r} in {module_name}, got none")
    return getattr(module, name)


def as_function(value: Any, name: str) -> Any:
    """The function that a key holds, or that it names as 'module:name'. Raises: ConfigError."""
    if not isinstance(value, str):
        return value
    if not is_reference(value):
        raise ConfigError.of("wrong-type", f"{name}: expected a function or its name as 'module:name', got {value!r}")
    try:
        return resolve(value)
    except ImportError as error:
        raise ConfigError.of("cannot-import", f"{name}: expected a function that can be imported, got {error}") from error
