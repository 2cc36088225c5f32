"""Attention in blocks of slots, up to the longest row: plain XLA, for every backend.

Nothing of size [T, S] exists, and no block past the longest row is read. Partial results are
merged by log-sum-exp, as in FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triforce_jax.attention import reference
from triforce_jax.typing import Array, Float, Int


def attend(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    lengths: Int[Array, "B"],
    *,
    block: int,
    mass_chunk: int = 0,
    mass_queries: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K C"] | None]:
    """See `attention.dispatch.attend`. S must be a multiple of `block`."""
    b, t, _, h = q.shape
    k, s = keys.shape[1], keys.shape[2]
    if s <= block:
        return reference.attend(
            q, keys, values, lengths, mass_chunk=mass_chunk, mass_queries=mass_queries
        )
    grouped = reference.group_queries(q, k)
    rows = grouped.shape[2]  # Q = G * T
    per_block = block // mass_chunk if mass_chunk else 0
    num_blocks = (jnp.max(lengths) + t + block - 1) // block

    def one_block(i, carry):
        top, total, acc, mass, tops = carry
        start = i * block
        key_block = jax.lax.dynamic_slice_in_dim(keys, start, block, axis=2)
        value_block = jax.lax.dynamic_slice_in_dim(values, start, block, axis=2)
        visible = reference.causal_visibility(lengths, t, start + jnp.arange(block))
        mask = jnp.tile(visible, (1, rows // t, 1))[:, None]  # [B, 1, Q, block]
        scores = reference.attention_scores(grouped, key_block)
        scores = jnp.where(mask, scores, -jnp.inf)
        # Slot 0 is visible to every query, so `top` is finite from the first block on.
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        scale = jnp.exp(top - new_top)
        total = total * scale + weights.sum(-1)
        acc = acc * scale[..., None] + reference.weighted_values(weights, value_block)
        if mass_chunk:
            part = weights.reshape(b, k, rows, per_block, mass_chunk).sum(-1)
            mass = jax.lax.dynamic_update_slice_in_dim(mass, part, i * per_block, axis=3)
            tops = jax.lax.dynamic_update_slice_in_dim(tops, new_top[..., None], i, axis=3)
        return new_top, total, acc, mass, tops

    init = (
        jnp.full((b, k, rows), -jnp.inf, jnp.float32),
        jnp.zeros((b, k, rows), jnp.float32),
        jnp.zeros((b, k, rows, h), jnp.float32),
        jnp.zeros((b, k, rows, s // mass_chunk if mass_chunk else 0), jnp.float32),
        jnp.full((b, k, rows, s // block if mass_chunk else 0), -jnp.inf, jnp.float32),
    )
    top, total, acc, mass, tops = jax.lax.fori_loop(0, num_blocks, one_block, init)
    out = reference.ungroup(acc / total[..., None], t).astype(q.dtype)
    if not mass_chunk:
        return out, None
    # Each block's sums were taken against the running maximum of that moment.
    rescale = jnp.exp(tops - top[..., None]) / total[..., None]
    mass = mass * jnp.repeat(rescale, per_block, axis=-1)
    counts = jnp.full_like(lengths, t) if mass_queries is None else mass_queries
    return out, reference.mean_over_queries(mass, t, counts)
