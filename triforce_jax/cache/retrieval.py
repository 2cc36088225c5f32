"""The retrieval cache: the most relevant chunks of the full cache and a recent window.

A buffer of R slots a layer and KV head is *compact*: the selected chunks come first, then the
recent window from the border of a chunk on, then scratch. So the one `attend` over a prefix of
valid slots serves it, and a row whose context fits the budget simply holds all of it. Selection
and gather happen inside the target's verification pass, layer by layer. Which chunks are chosen
depends on the past only, so the target's verification stays exact whatever is chosen.

Scores (DESIGN 3): `mean_key` is the paper's (arXiv 2404.11912, section 4.1), `attention_mass` is
the probability that the verification pass itself gave each chunk.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from triforce_jax.attention.dispatch import attend
from triforce_jax.cache import full
from triforce_jax.cache.full import KVCache, Rotate
from triforce_jax.config import DecodeConfig, ModelConfig
from triforce_jax.models.llama import matmul_precision
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetrievalCache:
    """What the retrieval level reads, and what is needed to select again.

    Attributes:
      kv: compact keys and values `[B, K, R, H]` of every layer.
      lengths: valid slots of each row.
      chunk_ids: the chunks selected, `[B, K, selected_chunks]` a layer.
      chunk_means: mean rotated key of each chunk, `[B, K, C, H]` a layer; right for every chunk
        before the recent window. Empty for `attention_mass`.
    """

    kv: KVCache
    lengths: Int[Array, "B"]
    chunk_ids: tuple[Int[Array, "B K M"], ...]
    chunk_means: tuple[Float[Array, "B K C H"], ...]


def empty(
    model: ModelConfig, config: DecodeConfig, shapes: Shapes, dtype: DTypeLike
) -> RetrievalCache:
    """A retrieval cache of zeros."""
    b, k, layers = config.batch_size, model.num_kv_heads, range(model.num_layers)
    ids = (b, k, shapes.selected_chunks)
    means = (b, k, shapes.num_chunks, model.head_dim)
    keep_means = config.scoring == "mean_key"
    return RetrievalCache(
        kv=full.empty(model, b, shapes.retrieval_slots, dtype),
        lengths=jnp.zeros((b,), jnp.int32),
        chunk_ids=tuple(jnp.zeros(ids, jnp.int32) for _ in layers),
        chunk_means=tuple(jnp.zeros(means, dtype) for _ in layers) if keep_means else (),
    )


def means_of(keys: Float[Array, "B K S H"], chunk_size: int) -> Float[Array, "B K C H"]:
    """Mean key of each chunk, summed in float32."""
    b, k, s, h = keys.shape
    chunks = keys.astype(jnp.float32).reshape(b, k, s // chunk_size, chunk_size, h)
    return chunks.mean(axis=3).astype(keys.dtype)


def window_chunk(lengths: Int[Array, "B"], config: DecodeConfig) -> Int[Array, "B"]:
    """The chunk at which the recent window starts once the pending token is committed."""
    return jnp.maximum(lengths + 1 - config.recent_window, 0) // config.chunk_size


def renew_means(
    means: Float[Array, "B K C H"],
    keys: Float[Array, "B K S H"],
    first_recent: Int[Array, "B"],
    shapes: Shapes,
) -> Float[Array, "B K C H"]:
    """Computes the means of the chunks that have just left the recent window."""
    count, size = shapes.updated_chunks, shapes.chunk_size
    start = jnp.maximum(first_recent - count, 0)

    def one_row(row_means, row_keys, chunk):
        piece = jax.lax.dynamic_slice_in_dim(row_keys, chunk * size, count * size, axis=1)
        new = means_of(piece[None], size)[0]
        return jax.lax.dynamic_update_slice(row_means, new, (0, chunk, 0))

    return jax.vmap(one_row)(means, keys, start)


def mean_key_scores(
    query: Float[Array, "B N H"], means: Float[Array, "B K C H"]
) -> Float[Array, "B K C"]:
    """Query . mean key, no scale; the maximum over the heads of a group."""
    b, k, _, h = means.shape
    grouped = query.reshape(b, k, query.shape[1] // k, h)
    scores = jnp.einsum(
        "bkgh,bkch->bkgc",
        grouped,
        means,
        precision=matmul_precision(means.dtype),
        preferred_element_type=jnp.float32,
    )
    return scores.max(axis=2)


def select(
    scores: Float[Array, "B K C"], first_recent: Int[Array, "B"], count: int
) -> Int[Array, "B K M"]:
    """The best `count` chunks before the recent window; chunk 0, the attention sink, is first.

    Where a row has fewer chunks than that, entry j past them is chunk j: should the row grow
    without another selection, the chunks that leave the window are then kept in turn.
    """
    chunk = jnp.arange(scores.shape[-1])
    scores = jnp.where(chunk < first_recent[:, None, None], scores, -jnp.inf)
    scores = jnp.where(chunk == 0, jnp.inf, scores)
    top_k = getattr(jnp, "top_k", None) or jax.lax.top_k  # jnp.top_k: newer JAX only
    ids = top_k(scores, count)[1].astype(jnp.int32)
    return jnp.where(jnp.arange(count) < first_recent[:, None, None], ids, jnp.arange(count))


def valid_slots(
    lengths: Int[Array, "B"], first_recent: Int[Array, "B"], shapes: Shapes
) -> Int[Array, "B"]:
    """Valid slots of the compact buffer once `lengths` tokens are committed."""
    selected = jnp.minimum(first_recent, shapes.selected_chunks)
    return lengths + (selected - first_recent) * shapes.chunk_size


def gather(
    buffer: Float[Array, "B K S H"],
    chunk_ids: Int[Array, "B K M"],
    first_recent: Int[Array, "B"],
    shapes: Shapes,
) -> Float[Array, "B K R H"]:
    """Builds the compact buffer out of whole chunks of the full one."""
    b, k, s, h = buffer.shape
    size = shapes.chunk_size
    selected = jnp.minimum(first_recent, shapes.selected_chunks)[:, None]  # [B, 1]
    place = jnp.arange(shapes.retrieval_slots // size)[None, :]  # [1, R / size]
    recent = jnp.minimum(first_recent[:, None] + place - selected, s // size - 1)
    padded = jnp.pad(chunk_ids, ((0, 0), (0, 0), (0, place.shape[1] - chunk_ids.shape[2])))
    ids = jnp.where((place < selected)[:, None, :], padded, recent[:, None, :])
    chunks = buffer.reshape(b, k, s // size, size, h)
    taken = jnp.take_along_axis(chunks, ids[:, :, :, None, None], axis=2, mode="promise_in_bounds")
    return taken.reshape(b, k, shapes.retrieval_slots, h)


class VerifyLayer(NamedTuple):
    """KV state of one layer in a verification pass that also selects."""

    keys: Array  # [B, K, S, H]
    values: Array
    retrieval_keys: Array  # [B, K, R, H]
    retrieval_values: Array
    chunk_ids: Array  # [B, K, M]
    chunk_means: Array | None  # [B, K, C, H]


def verify_layers(cache: KVCache, retrieval: RetrievalCache) -> tuple[VerifyLayer, ...]:
    """The KV states a selecting verification pass takes."""
    means = retrieval.chunk_means or (None,) * len(cache.keys)
    return tuple(
        VerifyLayer(*columns)
        for columns in zip(
            cache.keys,
            cache.values,
            retrieval.kv.keys,
            retrieval.kv.values,
            retrieval.chunk_ids,
            means,
            strict=True,
        )
    )


def of_verify_layers(
    layers: tuple[VerifyLayer, ...], lengths: Int[Array, "B"]
) -> tuple[KVCache, RetrievalCache]:
    """Undoes `verify_layers`; `lengths` are the retrieval cache's."""
    retrieval = RetrievalCache(
        KVCache.of_layers((layer.retrieval_keys, layer.retrieval_values) for layer in layers),
        lengths,
        tuple(layer.chunk_ids for layer in layers),
        tuple(layer.chunk_means for layer in layers if layer.chunk_means is not None),
    )
    return KVCache.of_layers((layer.keys, layer.values) for layer in layers), retrieval


def verification(
    rotate: Rotate,
    lengths: Int[Array, "B"],
    query_counts: Int[Array, "B"],
    refresh: Array,
    config: DecodeConfig,
    shapes: Shapes,
):
    """The `attend` of a verification pass that selects and gathers as it goes.

    Args:
      rotate: RoPE of the pass's tokens.
      lengths: committed tokens of each row; the pending token is the pass's first.
      query_counts: real tokens of each row in this pass.
      refresh: scalar bool, whether to select again or to keep the chunks chosen before.
      config, shapes: static.
    """
    first_recent = window_chunk(lengths, config)

    def attend_layer(q, k, v, layer: VerifyLayer):
        q = rotate(q)
        keys = full.write(layer.keys, rotate(k), lengths)
        values = full.write(layer.values, v, lengths)
        by_mass = config.scoring == "attention_mass"
        out, mass = attend(
            q,
            keys,
            values,
            lengths,
            implementation=config.attention,
            block=shapes.attention_block,
            mass_chunk=shapes.chunk_size if by_mass else 0,
            mass_queries=query_counts,
        )
        means = layer.chunk_means
        if means is not None:
            means = renew_means(means, keys, first_recent, shapes)

        def choose():
            # q[:, 0] is the pending token's query: the newest token that is certain.
            scores = mass if means is None else mean_key_scores(q[:, 0], means)
            assert scores is not None
            return select(scores, first_recent, shapes.selected_chunks)

        if config.refresh_interval == 1:
            chunk_ids = choose()
        else:
            chunk_ids = jax.lax.cond(refresh, choose, lambda: layer.chunk_ids)
        return out, VerifyLayer(
            keys,
            values,
            gather(keys, chunk_ids, first_recent, shapes),
            gather(values, chunk_ids, first_recent, shapes),
            chunk_ids,
            means,
        )

    return attend_layer
