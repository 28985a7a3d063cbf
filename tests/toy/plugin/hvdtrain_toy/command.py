"""A command."""


def main(arguments: list[str]) -> int:
    """Print a greeting; return the exit status."""
    print(f"hello {' '.join(arguments)}")
    return 0
