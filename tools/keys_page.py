#!/usr/bin/env python3
"""Print docs/keys.md: the reference page of all config keys, made from their declarations."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.config.check import describe  # noqa: E402  # the line above finds the checkout
from hvdtrain.config.keys import declared  # noqa: E402
from hvdtrain.returnn_layer.names import ALIASES, UNSUPPORTED  # noqa: E402
from hvdtrain.settings import DATASET_SECTIONS, DICTS, SECTIONS  # noqa: E402


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# Config keys",
        "",
        "Made by `make docs` from the declarations in the code. `python -m hvdtrain --help` prints the same.",
    ]
    for section in SECTIONS:
        lines += _table(section)
    for name, section in DICTS.items():
        lines += ["", f"# Entries of the dict {name}"] + _table(section)
    lines += [
        "",
        "# Keys of a dataset dict",
        "",
        "Inside `train`, `dev`, `eval` and the dicts in `eval_datasets`, beside `class`.",
    ]
    for section in DATASET_SECTIONS:
        lines += _table(section)
    lines += ["", "# Other names", ""]
    lines += [f"- `{other}`: `{name}`" for other, name in ALIASES.items()]
    lines += ["", "# Keys of RETURNN that are refused, as ignoring them would change the training", ""]
    lines += [f"- `{name}`" + (f": {instead}" if instead != "none" else "") for name, instead in UNSUPPORTED.items()]
    return "\n".join(lines) + "\n"


def _table(section: type) -> list[str]:
    rows = [f"| `{key.name}` | {key.doc} | {describe(key)} |" for key in declared(section)]
    return [
        "",
        f"## {(section.__doc__ or '').splitlines()[0].rstrip('.')}",
        "",
        "| key | meaning | value |",
        "|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    print(page(), end="")
