"""What is read of a file before there is a model."""

import json
from pathlib import Path
from typing import Any


def read_progress(path: Path) -> dict[str, Any]:
    """The plain values in a model's file."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name != "model"}
