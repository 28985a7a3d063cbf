"""Prints the names that the installed RETURNN reads from a config and hvdtrain does not: the table in plugins/returnn/names.py.

.venv/bin/python tools/returnn_keys.py
.venv/bin/python tools/returnn_keys.py --page > docs/returnn_keys.md   # all names, with the values that turn them off
"""

import ast
import importlib.metadata
import importlib.util
import itertools
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from hvdtrain.config.keys import Key
from hvdtrain.plugins.returnn.names import ALIASES, BY_VALUES, EPOCH_OF_MODEL, NO_OPS, UNSUPPORTED
from hvdtrain.plugins.returnn.values import DEFAULT, IGNORED_WITH_TORCH, OFF
from hvdtrain.settings import all_keys

METHODS = (
    "value|typed_value|opt_typed_value|bool|bool_or_other|is_true|int|float|list|int_pair|int_list|float_list|has|get_of_type"
)
READ = re.compile(rf"""config\w*(?:\(\w*\))?\.(?:{METHODS})\(\s*["'](\w+)["']|typed_dict(?:\[|\.get\()["'](\w+)["']""")

BY_THE_LAYER = {"extern_data", "model_outputs", "num_inputs", "num_outputs", *BY_VALUES}
"""Names that hvdtrain reads in configs that import returnn."""

OF_THE_FRONTEND = ("behavior_version", "rf_")
"""How names begin that concern nothing but `returnn.frontend`."""


def sources() -> list[Path]:
    """The files of the installed RETURNN."""
    spec = importlib.util.find_spec("returnn")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("returnn: expected it to be installed (pip install returnn)")
    return sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))


def names() -> list[str]:
    """All names, sorted."""
    found = {name for file in sources() for match in READ.findall(file.read_text(encoding="utf-8")) for name in match if name}
    found |= reads().keys()  # also names that are put together
    ours = {key.name for key in all_keys()} | set(ALIASES) | set(UNSUPPORTED) | BY_THE_LAYER
    return sorted(name for name in found - ours if not name.startswith(("_", *OF_THE_FRONTEND)))


def reads() -> dict[str, list[tuple[str, str]]]:
    """By name, how RETURNN reads it: the method of its config, and the default as in the source ('' where there is none)."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            if node.func.attr not in METHODS.split("|") or "config" not in ast.unparse(node.func.value).lower():
                continue
            defaults = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "default")]
            for name in texts(node.args[0]):
                if not name.startswith("_"):
                    found[name].add((node.func.attr, ast.unparse(defaults[0]) if defaults else ""))
    return {name: sorted(found[name]) for name in sorted(found)}


def texts(node: ast.expr) -> list[str]:
    """The values that an expression may have, if it consists of strings: of constants, f-strings, sums and conditions."""
    match node:
        case ast.Constant(value=str(value)):
            return [value]
        case ast.FormattedValue(value=value, format_spec=None):
            return texts(value)
        case ast.IfExp(body=body, orelse=otherwise):
            return texts(body) + texts(otherwise)
        case ast.JoinedStr(values=parts):
            return ["".join(some) for some in itertools.product(*map(texts, parts))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(some) for some in itertools.product(texts(left), texts(right))]
    return []


PAGE = """# The keys that RETURNN reads

Written by `tools/returnn_keys.py --page` from the sources of RETURNN {version}: every name that it reads from a config, the
defaults in its code, the values that mean off or default there and that hvdtrain takes in the same sense, and what hvdtrain
does with other values. To every key that is true or false, `True`, `1` and the strings `"true"`, `"yes"`, `"on"`, `"1"` are the
same, and so are their opposites; None is False there. The column *here* is about configs for PyTorch: those with a `network`
have more of these keys ([returnn.md](returnn.md#tensorflow-networks)). [returnn.md](returnn.md#keys) has the explanations,
[keys.md](keys.md) hvdtrain's keys.

| key | RETURNN's default | off or default | here |
|---|---|---|---|
"""

BOOLEAN = "None, False, 0, 'false', 'no', 'off', '0'"
NOTHING = "None, False, 0, '', [], {}, 'false', 'no', 'off', 'none'"


def page() -> str:
    """docs/returnn_keys.md."""
    keys = {key.name: key for key in all_keys()}
    rows = [_row(name, found, keys) for name, found in reads().items()]
    return PAGE.format(version=importlib.metadata.version("returnn")) + "\n".join(rows) + "\n"


def _row(name: str, found: list[tuple[str, str]], keys: dict[str, Key]) -> str:
    defaults = ", ".join(f"`{default}`" for default in dict.fromkeys(default for _, default in found if default))
    own = ALIASES.get(name, name)
    off, here = "", "no effect; the log lists it"
    if own in keys:
        values, meaning = OFF.get(own, ((), DEFAULT))
        off = ", ".join(repr(value) for value in values) or (BOOLEAN if keys[own].type is bool else "")
        stands_for = "" if meaning is DEFAULT or not meaning else f"; off means {meaning!r}"
        here = f"`{own}`; default {_short(keys[own].default) if not keys[own].required else 'none: it is required'}{stands_for}"
    elif name in EPOCH_OF_MODEL:
        here = f"in the task eval: `{EPOCH_OF_MODEL[name]}`; in others no effect"
    elif name in UNSUPPORTED:
        off = NOTHING + "".join(f", {value!r}" for value in NO_OPS.get(name, ()))
        here = "refused" + ("; no effect in a config for PyTorch" if name in IGNORED_WITH_TORCH else "")
    elif name in BY_THE_LAYER:
        here = "as in RETURNN"
    elif name.startswith(OF_THE_FRONTEND):
        here = "as in RETURNN, by its frontend"
    return f"| `{name}` | {defaults} | {f'`{off}`' if off else ''} | {here} |".replace("|  |", "| |")


def _short(value: Any) -> str:
    return f"`{value!r}`"


if __name__ == "__main__":
    print(page(), end="") if "--page" in sys.argv else print(textwrap.fill(" ".join(names()), 122))
