"""hvdtrain's own plug-ins, one folder each: the rest of the package works without them, and none needs another."""
