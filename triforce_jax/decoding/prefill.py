"""Chunked prefill: passes of a static width over the prompts, straight into the caches.

A pass costs what the tokens so far cost, not what the buffer could hold, and no pass computes
logits: the last prompt token is left *pending*, and the first verification feeds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from triforce_jax.cache import full, retrieval, streaming
from triforce_jax.cache.full import KVCache
from triforce_jax.config import DecodeConfig, ModelConfig
from triforce_jax.models.llama import Llama
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Float, Int

# The draft's window is short: its prefill runs over pieces of this many tokens at a time.
_DRAFT_PIECE = 256


def prefill_target(
    model: Llama,
    config: DecodeConfig,
    shapes: Shapes,
    cache: KVCache,
    chunk_means: tuple[Float[Array, "B K C H"], ...],
    tokens: Int[Array, "B T"],
    start: Int[Array, ""],
    prompt_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T D"], KVCache, tuple[Array, ...]]:
    """One pass of the target: tokens at positions start..start+T-1 of every row.

    Rows whose prompt is shorter write scratch. Chunk means, where they are kept, are computed of
    the pass's own keys; a chunk that scratch is in is computed again before it can be selected.

    Returns:
      The hidden states, the cache and the chunk means, updated.
    """
    b, width = tokens.shape
    starts = jnp.full((b,), start, jnp.int32)
    rotate = full.rotation(model.config, starts, width, prompt_lengths)
    write_and_read = full.pass_over(
        rotate, starts, implementation=config.attention, block=shapes.attention_block
    )

    def attend(q, k, v, layer):
        kv, means = layer
        out, kv = write_and_read(q, k, v, kv)
        if means is not None:
            piece = jax.lax.dynamic_slice_in_dim(kv[0], start, width, axis=2)
            new = retrieval.means_of(piece, shapes.chunk_size)
            at = (0, 0, start // shapes.chunk_size, 0)
            means = jax.lax.dynamic_update_slice(means, new, at)
        return out, (kv, means)

    means = chunk_means or (None,) * len(cache.keys)
    layers = tuple(zip(cache.layers, means, strict=True))
    hidden, layers = model(tokens, layers, attend)
    kept = tuple(m for _, m in layers) if chunk_means else ()
    return hidden, KVCache.of_layers(kv for kv, _ in layers), kept


def prefill_draft(
    model: Llama,
    config: DecodeConfig,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    start: Int[Array, ""],
    counts: Int[Array, "B"],
) -> KVCache:
    """One pass of the draft over T tokens, of which each row's first `counts` are real."""
    b, width = tokens.shape
    size = min(_DRAFT_PIECE, width)
    pieces = -(-width // size)
    tokens = jnp.pad(tokens, ((0, 0), (0, pieces * size - width)))

    def one_piece(i, layers):
        piece = jax.lax.dynamic_slice_in_dim(tokens, i * size, size, axis=1)
        at = jnp.full((b,), start + i * size, jnp.int32)
        real = jnp.clip(counts - i * size, 0, size)
        attend = streaming.prefill_pass(model.config, config, at, real)
        _, layers = model(piece, layers, attend)
        return layers

    return KVCache.of_layers(jax.lax.fori_loop(0, pieces, one_piece, cache.layers))


@dataclasses.dataclass(frozen=True)
class PrefillPass:
    """One pass of the plan: positions start..start+width-1."""

    start: int
    width: int


def plan(num_tokens: int, shapes: Shapes) -> list[PrefillPass]:
    """Covers positions 0..num_tokens-1 with wide passes, and with small ones what is left."""
    passes, start = [], 0
    while num_tokens - start >= shapes.prefill_chunk:
        passes.append(PrefillPass(start, shapes.prefill_chunk))
        start += shapes.prefill_chunk
    while start < num_tokens:
        passes.append(PrefillPass(start, shapes.prefill_small))
        start += shapes.prefill_small
    return passes


def draft_needs(
    one_pass: PrefillPass, num_tokens: Sequence[int], model: ModelConfig, config: DecodeConfig
) -> bool:
    """Whether a draft pass can be seen by any row once its `num_tokens` are in the cache.

    A key depends on one window of tokens a layer below it, and on the sinks; what lies further
    back than that, the draft need not read at all.
    """
    reach = config.draft_budget * (model.num_layers + 1)
    start, end = one_pass.start, one_pass.start + one_pass.width
    return start < config.draft_sinks or any(start < n and end > n - reach for n in num_tokens)
