"""Reports on a training in addition to the log: one per epoch for files and trackers, and an HTML page made from them."""
