"""Datasets made of others: joined, mapped, cached, read by workers."""
