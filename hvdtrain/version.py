"""The version, in a file that imports nothing: pyproject.toml and `--version` read it."""

__version__ = "1.1.0"
