#!/usr/bin/env python3
"""hvdtrain under the name and with the arguments of RETURNN's rnn.py: this folder can be given to job managers as RETURNN's root.

Exit status: 0 once the training, or another task, is complete; any other number if it is not (docs/returnn.md).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from hvdtrain.cli import main  # noqa: E402  # found through the line above


def transport() -> list[str]:
    """Keys that depend on the launcher: i6_core sets use_horovod for each, but torchrun's processes use torch.distributed."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    return ["++use_horovod", "False"]


if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], *transport()]))
