"""Lossless hierarchical speculative decoding (TriForce) for long-context Llama models in JAX."""
