"""What the engine does beside steps: evaluating, forwarding, voting on stops, noting steps."""
