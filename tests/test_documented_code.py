"""The code in the documents is right. Complete examples are also run, by the tests of their subjects (tests/documented.py)."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy
import pytest
from documented import Block, blocks_of
from launching import ROOT

import hvdtrain
from hvdtrain.config.foreign import ALIASES
from hvdtrain.errors import ConfigError
from hvdtrain.settings import all_keys, read_settings

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LANGUAGES = {"bash", "console", "json", "python", "text", "toml", "yaml"}
KEYS = {name for key in all_keys() for name in key.names} | set(ALIASES)
OF_EXAMPLES = {"corpus", "hidden", "max"}
"""Words after ++ that are names of an example's config, or the beginning of a key."""


OF_FILES = {"cookbook.md"}
"""Pages whose code is parts of files, which tests run and compare with the page."""


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_block_of_code_has_a_language_and_its_syntax(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert len(blocks) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence that does not begin or end a block"
    assert indented(text) == [], "code in a block without a fence: no language"
    for block in blocks:
        assert block.language in LANGUAGES, f"line {block.line}: {block.language}"
        if block.language == "python" and document.name not in OF_FILES:
            ast.parse(block.code.rstrip("\n") + ("\n    pass" if block.code.rstrip().endswith(":") else ""))
        if block.language == "toml":
            tomllib.loads(block.code)
        if block.language in ("bash", "console"):
            names = set(re.findall(r"(?<!\S)\+\+([A-Za-z_]\w*)", block.code))
            mistakes = set(re.findall(r"^ *(\w+): unknown key", block.code, re.MULTILINE))
            assert names <= KEYS | OF_EXAMPLES | mistakes, f"line {block.line}: {names - KEYS - OF_EXAMPLES}"
    shell = "\n".join(block.code for block in blocks if block.language == "bash")
    checked = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def indented(text: str) -> list[str]:
    """Lines that are code because they are indented."""
    outside = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found, item = [], 0
    for before, line in zip(["", *outside.splitlines()], outside.splitlines(), strict=False):
        begin = re.match(r" *(?:[-*]|\d+\.) ", line)
        if begin or (line.strip() and not line.startswith(" ")):
            item = len(begin[0]) if begin else 0
        elif line.strip() and not before.strip() and len(line) - len(line.lstrip()) >= item + 4:
            found.append(line)
    return found


def test_examples_of_keys_are_configs_without_mistakes() -> None:
    """Those that can be read by themselves, such as `mixed_precision = "bfloat16"`."""
    checked = 0
    for document in DOCUMENTS:
        if document.name in {
            "python_api.md",
            *OF_FILES,
        }:  # tests/plugins/programs/test_api.py runs the first
            continue
        for block in blocks_of(document.read_text(encoding="utf-8")):
            values = keys_in(block) if block.language == "python" else {}
            if values:
                assert problems_of(values) == [], f"{name_of(document)}, line {block.line}"
                checked += 1
    assert checked > 60


def keys_in(block: Block) -> dict[str, Any]:
    """The keys that an example sets; none if it refers to what is not in it."""
    tree = ast.parse(block.code.rstrip("\n") + ("\n    pass" if block.code.rstrip().endswith(":") else ""))
    kinds = (ast.Assign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    if not all(isinstance(node, kinds) for node in tree.body) or re.search("import (datasets|lhotse)", block.code):
        return {}
    values: dict[str, Any] = {"hvdtrain": hvdtrain, "numpy": numpy, "__name__": "example"}
    try:
        exec(compile(tree, "example", "exec"), values)
    except (NameError, ImportError):
        return {}
    return {name: value for name, value in values.items() if name in KEYS}


def problems_of(values: dict[str, Any]) -> list[str]:
    """What is wrong with a config that has these keys, and what an example takes for granted."""

    def function(**_: Any) -> None: ...

    minimal = {
        "train": "train.hdf",
        "dev": "dev.hdf",
        "model": "exp/model",
        "learning_rate": 0.1,
        "max_seqs": 8,
        "cache_dir": "a",
    }
    if "max_seqs_total" in values:
        del minimal["max_seqs"]
    found: list[str] = []
    minimal["cache_dir"] = "cache"
    for granted in ({}, {"backend": "tensorflow"}, {"horovod_reduce_type": "param"}, {"seq_ordering": "random"}):
        try:
            read_settings([minimal | {"get_model": function, "train_step": function} | granted | values], {})
        except ConfigError as error:
            found.append(str(error))
        else:
            return []
    return found[:1]
