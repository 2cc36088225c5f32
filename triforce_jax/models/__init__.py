"""Flax NNX models."""
