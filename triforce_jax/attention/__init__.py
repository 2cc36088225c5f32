"""Attention over a KV buffer: one dispatch, several implementations, one definition."""
