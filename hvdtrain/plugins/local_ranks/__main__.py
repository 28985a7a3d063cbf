"""`python -m hvdtrain` for ranks that may be forked from a process with their imports."""

import sys

try:
    from pathlib import Path

    from hvdtrain.cli import main
    from hvdtrain.config.large_imports import LargeImports
    from hvdtrain.plugins.local_ranks.fork_server import serve

    LargeImports.install()
    serve()
    sys.argv[0] = str(Path(__file__).parents[2] / "__main__.py")
    status = main()
except KeyboardInterrupt:  # while something is imported
    status = 130
sys.exit(status)
