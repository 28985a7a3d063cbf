"""Config files, command-line overrides and the checking of keys. Knows no key of its own."""
