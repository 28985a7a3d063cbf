"""Config files, command-line overrides and the checking of keys. This package declares no keys itself."""
