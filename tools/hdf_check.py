#!/usr/bin/env python3
"""Inspect HDF files: show their content, verify them and measure how fast they read; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.plugins.hdf_tools.check import main  # noqa: E402  # found through the line above

sys.exit(main())
