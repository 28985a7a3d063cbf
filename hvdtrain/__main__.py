"""`python -m hvdtrain`."""

import sys

try:
    from hvdtrain.cli import main

    status = main()
except KeyboardInterrupt:  # while hvdtrain itself is imported
    status = 130
sys.exit(status)
