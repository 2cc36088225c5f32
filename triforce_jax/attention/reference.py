"""The definition of attention over a KV buffer: plain jnp, everything materialised."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triforce_jax.models.llama import matmul_precision
from triforce_jax.typing import Array, Bool, Float, Int


def causal_visibility(
    lengths: Int[Array, "B"], num_queries: int, slots: Int[Array, "S"]
) -> Bool[Array, "B T S"]:
    """Query t, written at slot lengths + t, sees the valid part, itself and those before it."""
    last = lengths[:, None] + jnp.arange(num_queries)[None, :]
    return slots[None, None, :] <= last[:, :, None]


def group_queries(q: Float[Array, "B T N H"], num_kv_heads: int) -> Float[Array, "B K Q H"]:
    """Scales the queries and lays those of one KV head together, `Q = G * T`, G major."""
    b, t, n, h = q.shape
    g = n // num_kv_heads
    q = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype)
    q = q.reshape(b, t, num_kv_heads, g, h).transpose(0, 2, 3, 1, 4)
    return q.reshape(b, num_kv_heads, g * t, h)


def ungroup(out: Float[Array, "B K Q H"], num_queries: int) -> Float[Array, "B T N H"]:
    """Undoes the layout of `group_queries`."""
    b, k, q, h = out.shape
    out = out.reshape(b, k, q // num_queries, num_queries, h).transpose(0, 3, 1, 2, 4)
    return out.reshape(b, num_queries, k * (q // num_queries), h)


def attention_scores(
    q: Float[Array, "B K Q H"], keys: Float[Array, "B K S H"]
) -> Float[Array, "B K Q S"]:
    """Scaled scores in float32."""
    return jnp.einsum(
        "bkqh,bksh->bkqs",
        q,
        keys,
        precision=matmul_precision(keys.dtype),
        preferred_element_type=jnp.float32,
    )


def weighted_values(
    weights: Float[Array, "B K Q S"], values: Float[Array, "B K S H"]
) -> Float[Array, "B K Q H"]:
    """Sum of values, accumulated in float32."""
    return jnp.einsum(
        "bkqs,bksh->bkqh",
        weights.astype(values.dtype),
        values,
        precision=matmul_precision(values.dtype),
        preferred_element_type=jnp.float32,
    )


def softmax_values(
    scores: Float[Array, "B K Q S"],
    values: Float[Array, "B K S H"],
    visible: Bool[Array, "B T S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K Q S"]]:
    """Softmax of scores under any mask, and the sum of values. Each query must see some slot.

    Returns:
      The output in float32, and the probabilities in float32 (Q = G * T, G major).
    """
    t = visible.shape[1]
    mask = jnp.tile(visible, (1, scores.shape[2] // t, 1))[:, None]  # [B, 1, Q, S]
    # A finite floor: a padded query may see nothing, and a NaN would spread through the values.
    floor = jnp.finfo(jnp.float32).min
    probs = jax.nn.softmax(jnp.where(mask, scores, floor), axis=-1)
    return ungroup(weighted_values(probs, values), t), probs


def mean_over_queries(
    mass: Float[Array, "B K Q C"], num_queries: int, counts: Int[Array, "B"]
) -> Float[Array, "B K C"]:
    """Averages over a row's first `counts` queries and over the heads of the group."""
    b, k, q, c = mass.shape
    mass = mass.reshape(b, k, q // num_queries, num_queries, c)
    real = jnp.arange(num_queries)[None, :] < counts[:, None]  # [B, T]
    mass = jnp.where(real[:, None, None, :, None], mass, 0.0).sum(axis=(2, 3))
    return mass / ((q // num_queries) * jnp.maximum(counts, 1))[:, None, None]


def attend(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    lengths: Int[Array, "B"],
    *,
    mass_chunk: int = 0,
    mass_queries: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K C"] | None]:
    """See `attention.dispatch.attend`."""
    t, s = q.shape[1], keys.shape[2]
    visible = causal_visibility(lengths, t, jnp.arange(s))
    scores = attention_scores(group_queries(q, keys.shape[1]), keys)
    out, probs = softmax_values(scores, values, visible)
    out = out.astype(q.dtype)
    if not mass_chunk:
        return out, None
    mass = probs.reshape(*probs.shape[:3], s // mass_chunk, mass_chunk).sum(-1)
    counts = jnp.full_like(lengths, t) if mass_queries is None else mass_queries
    return out, mean_over_queries(mass, t, counts)
