"""What the engine does apart from training steps: evaluating, forwarding, voting on stops, recording steps."""
