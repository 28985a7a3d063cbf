#!/usr/bin/env python3
"""Look at HDF files: what is in them, are they sound, how fast do they read; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.hdf_tools.check import main  # noqa: E402  # the line above finds the checkout

sys.exit(main())
