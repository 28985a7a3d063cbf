"""For tools that look for this file. What it installs is described in pyproject.toml."""

from setuptools import setup

setup()
