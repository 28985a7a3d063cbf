"""The learning rate of an epoch (`rates`), scores, and stopping."""
