#!/usr/bin/env python3
"""Convert a dataset to an HDF file; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.plugins.hdf_tools.dump import main  # noqa: E402  # found through the line above

sys.exit(main())
