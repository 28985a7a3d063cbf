"""Prints the names that the installed RETURNN reads from a config and hvdtrain does not: the table in returnn_layer/names.py.

.venv/bin/python tools/returnn_keys.py
"""

import importlib.util
import re
import textwrap
from pathlib import Path

from hvdtrain.returnn_layer.names import ALIASES, UNSUPPORTED
from hvdtrain.settings import all_keys

METHODS = (
    "value|typed_value|opt_typed_value|bool|bool_or_other|is_true|int|float|list|int_pair|int_list|float_list|has|get_of_type"
)
READ = re.compile(rf"""config\w*(?:\(\w*\))?\.(?:{METHODS})\(\s*["'](\w+)["']|typed_dict(?:\[|\.get\()["'](\w+)["']""")

BY_THE_LAYER = {"extern_data", "model_outputs", "num_inputs", "num_outputs"}
"""Names that hvdtrain reads in configs that import returnn."""

OF_THE_FRONTEND = ("behavior_version", "rf_")
"""How names begin that concern nothing but `returnn.frontend`."""


def names() -> list[str]:
    """All names, sorted."""
    spec = importlib.util.find_spec("returnn")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("returnn: expected it to be installed (pip install returnn)")
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    found = {name for file in files for match in READ.findall(file.read_text(encoding="utf-8")) for name in match if name}
    ours = {key.name for key in all_keys()} | set(ALIASES) | set(UNSUPPORTED) | BY_THE_LAYER
    return sorted(name for name in found - ours if not name.startswith(("_", *OF_THE_FRONTEND)))


if __name__ == "__main__":
    print(textwrap.fill(" ".join(names()), 126))
