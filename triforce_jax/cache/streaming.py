"""The draft's cache after StreamingLLM (arXiv 2309.17453): attention sinks and a recent window.

The first `sinks` slots hold the first tokens; the token at position p >= sinks lives in ring slot
`sinks + (p - sinks) % ring`. Which position a slot holds follows from how much was written, so
roll-back is free as long as the ring is longer than the window by the tokens of one step.

A token at position p sees the sinks and the last `window` tokens, itself included, wherever the
steps that led there began and whatever they rolled back: the cache after any sequence of accepts
and rejects is the one a fresh prefill builds. Keys are stored un-rotated and rotated at read by
their position *in the cache*: a query's is at most `sinks + window - 1`.
"""

from __future__ import annotations

import jax.numpy as jnp

from triforce_jax.attention import reference
from triforce_jax.cache.full import KVCache
from triforce_jax.config import DecodeConfig, ModelConfig
from triforce_jax.models.rope import rope_tables, rotate
from triforce_jax.typing import Array, Float, Int

__all__ = ["KVCache", "decode_pass", "prefill_pass", "slot_positions"]


def slot_positions(written: Int[Array, "B"], slots: int, sinks: int) -> Int[Array, "B Z"]:
    """Position held by each of Z slots once positions below `written` were written; -1: none."""
    ring = slots - sinks
    slot = jnp.arange(slots)[None, :]
    last = written[:, None] - 1
    # The newest position <= last that is congruent to the slot.
    position = jnp.where(slot < sinks, slot, last - (last - slot) % ring)
    valid = (position <= last) & ((slot < sinks) | (position >= sinks))
    return jnp.where(valid, position, -1)


def _attention(
    model: ModelConfig,
    config: DecodeConfig,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K Z H"],
    values: Float[Array, "B K Z H"],
    queries_at: Int[Array, "B T"],
    keys_at: Int[Array, "B Z"],
) -> Float[Array, "B T N H"]:
    """Attention of each un-rotated query to the sinks and to its own window.

    The first slots are the sinks'; a sink elsewhere, and position -1, is nothing.
    """
    sinks, capacity = config.draft_sinks, config.draft_budget
    # RoPE sees distances only: shift each row so that its first query lies in the cache.
    shift = jnp.maximum(queries_at[:, :1] - (capacity - 1), 0)

    def tables(positions: Array) -> tuple[Array, Array]:
        # A draft stays within its window, so dynamic scaling never sets in.
        return rope_tables(model.rope, model.head_dim, positions, jnp.zeros_like(shift[:, 0]))

    def scores(queries_rotated_at: Array, some_keys: Array) -> Array:
        cos, sin = tables(queries_rotated_at)
        rotated = rotate(q, cos[:, :, None], sin[:, :, None])
        return reference.attention_scores(
            reference.group_queries(rotated, keys.shape[1]), some_keys
        )

    in_sinks = jnp.arange(keys.shape[2]) < sinks
    cos, sin = tables(jnp.maximum(keys_at - jnp.where(in_sinks, 0, shift), 0))
    rotated_keys = rotate(keys, cos[:, None], sin[:, None])
    near = scores(queries_at - shift, rotated_keys)
    if sinks:  # no query is further from a sink than the cache is long
        far = scores(jnp.minimum(queries_at, capacity - 1), rotated_keys[:, :, :sinks])
        near = jnp.concatenate([far, near[..., sinks:]], axis=-1)

    distance = queries_at[:, :, None] - keys_at[:, None, :]  # [B, T, Z]
    in_window = (keys_at >= sinks)[:, None] & (distance < capacity - sinks)
    visible = (keys_at >= 0)[:, None] & (distance >= 0) & (in_sinks | in_window)
    out, _ = reference.softmax_values(near, values, visible)
    return out.astype(q.dtype)


def _scatter(
    buffer: Float[Array, "B K Z H"], new: Float[Array, "B T K H"], at: Int[Array, "B T"], sinks: int
) -> Float[Array, "B K Z H"]:
    """Writes each new token at the slot of its position."""
    ring = buffer.shape[2] - sinks
    slots = jnp.where(at < sinks, at, sinks + (at - sinks) % ring)
    rows = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows, :, slots].set(new.astype(buffer.dtype))


def decode_pass(model: ModelConfig, config: DecodeConfig, positions: Int[Array, "B"]):
    """The `attend` of a pass over T tokens, at most the ring's slack, the first at `positions`."""
    sinks = config.draft_sinks

    def attend_layer(q, k, v, kv):
        at = positions[:, None] + jnp.arange(q.shape[1])[None, :]
        keys, values = _scatter(kv[0], k, at, sinks), _scatter(kv[1], v, at, sinks)
        held = slot_positions(positions + q.shape[1], keys.shape[2], sinks)
        return _attention(model, config, q, keys, values, at, held), (keys, values)

    return attend_layer


def prefill_pass(
    model: ModelConfig,
    config: DecodeConfig,
    positions: Int[Array, "B"],
    counts: Int[Array, "B"],
):
    """The `attend` of a pass of any width, of which each row's first `counts` tokens are real.

    It may be longer than the ring, so it reads the old slots and the new tokens side by side and
    keeps the newest real ones.
    """
    sinks = config.draft_sinks

    def attend_layer(q, k, v, kv):
        width = q.shape[1]
        at = positions[:, None] + jnp.arange(width)[None, :]
        slots = kv[0].shape[2]
        before = slot_positions(positions, slots, sinks)
        after = slot_positions(positions + counts, slots, sinks)
        from_pass = after >= positions[:, None]  # [B, Z]
        source = jnp.clip(after - positions[:, None], 0, width - 1)

        def keep(buffer, new):
            picked = jnp.take_along_axis(new, source[:, None, :, None], axis=2)
            return jnp.where(from_pass[:, None, :, None], picked, buffer)

        new_keys = k.transpose(0, 2, 1, 3).astype(kv[0].dtype)  # [B, K, T, H]
        new_values = v.transpose(0, 2, 1, 3).astype(kv[1].dtype)
        keys, values = keep(kv[0], new_keys), keep(kv[1], new_values)
        # The sinks are read where they live, new or old; what else is new, behind the old ring.
        held = jnp.concatenate(
            [after[:, :sinks], before[:, sinks:], jnp.where(at < sinks, -1, at)], axis=1
        )
        out = _attention(
            model,
            config,
            q,
            jnp.concatenate([keys[:, :, :sinks], kv[0][:, :, sinks:], new_keys], axis=2),
            jnp.concatenate([values[:, :, :sinks], kv[1][:, :, sinks:], new_values], axis=2),
            at,
            held,
        )
        return out, (keys, values)

    return attend_layer
