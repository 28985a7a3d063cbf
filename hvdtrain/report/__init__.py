"""What training tells of itself beside its log: a report per epoch to files and trackers, and a page made of them."""
