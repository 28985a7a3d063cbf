#!/usr/bin/env python3
"""`hvdtrain dump` with the arguments of RETURNN's tools/hdf_dump.py, which replaces an existing file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent.parent))

from hvdtrain.plugins.hdf_tools.dump import main  # noqa: E402  # found through the line above

if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--overwrite"]))
