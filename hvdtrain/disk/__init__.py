"""Files on a disk: writing them atomically."""
