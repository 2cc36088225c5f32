"""The inner level: candidates for the target, with the distributions they were drawn from.

Three ways: the draft proposes and the retrieval level verifies ("triforce"), the retrieval level
alone ("retrieval": rounds without proposals, each ending in a bonus token), or the draft alone
("draft"). Candidates are written behind the known tokens of the history, into scratch, so every
level finds its next tokens there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from triforce_jax.config import DecodeConfig
from triforce_jax.decoding import ngram
from triforce_jax.decoding.levels import Levels
from triforce_jax.decoding.rejection import rejection_step
from triforce_jax.decoding.sampling import RowSampling, draw_token, probabilities
from triforce_jax.decoding.state import (
    DRAFT,
    RETRIEVAL,
    Caches,
    Counters,
    DecodeState,
    put_slice,
    take_slice,
)
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Float, Int

# (round, n) -> uniforms [B, n] in [0, 1), independent for every round of an outer step.
Draw = Callable[[Array | int, int], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """Proposals for the target.

    Attributes:
      tokens: the history, candidates written behind each row's known tokens.
      probs: the distribution each candidate was drawn from, `[B, X, V]`.
      origins: codes of ORIGINS, `[B, X]`.
      counts: how many candidates a row has.
    """

    tokens: Int[Array, "B Z"]
    probs: Float[Array, "B X V"]
    origins: Int[Array, "B X"]
    counts: Int[Array, "B"]


class Proposed(NamedTuple):
    """What one outer step's inner level returns."""

    candidates: Candidates
    caches: Caches
    counters: Counters


def is_any(tokens: Int[Array, "B T"], ids: Int[Array, "B E"]) -> Array:
    """Whether each token is one of its row's ids, `[B, T]`."""
    return (tokens[:, :, None] == ids[:, None, :]).any(-1)


def draft_proposals(
    levels: Levels,
    config: DecodeConfig,
    shapes: Shapes,
    sampling: RowSampling,
    caches: Caches,
    tokens: Int[Array, "B Z"],
    last: Int[Array, "B"],
    uniforms: Float[Array, "B X"],
) -> tuple[Array, Array, Caches]:
    """Draws X = draft_proposals tokens from the draft after slot `last` of the history.

    The first pass feeds the newest `draft_feed` tokens, among them all that the draft's cache
    does not have yet; feeding one again writes what is there already.

    Returns:
      The proposals `[B, X]`, their distributions `[B, X, V]` and the caches.
    """
    count = shapes.draft_proposals
    if levels.draft is None:
        found = ngram.look_up(tokens, last, config.ngram, count)
        return found, jax.nn.one_hot(found, levels.vocab_size, dtype=jnp.float32), caches
    draft = levels.draft

    def draw(logits: Array, i) -> tuple[Array, Array]:
        q = probabilities(logits[:, None], sampling)[:, 0]
        return draw_token(q, jnp.take(uniforms, i, axis=1)), q

    first = jnp.maximum(last + 1 - shapes.draft_feed, 0)
    logits, caches = draft(caches, take_slice(tokens, first, shapes.draft_feed), first)
    newest = jnp.take_along_axis(logits, (last - first)[:, None, None], axis=1)[:, 0]
    token, q = draw(newest, 0)
    proposals = jnp.zeros((tokens.shape[0], count), jnp.int32).at[:, 0].set(token)
    probs = jnp.zeros((*proposals.shape, levels.vocab_size), jnp.float32).at[:, 0].set(q)
    if count == 1:
        return proposals, probs, caches

    def one_more(i, carry):
        proposals, probs, caches = carry
        previous = jnp.take(proposals, i - 1, axis=1)[:, None]
        logits, caches = draft(caches, previous, last + i)
        token, q = draw(logits[:, 0], i)
        return proposals.at[:, i].set(token), probs.at[:, i].set(q), caches

    return jax.lax.fori_loop(1, count, one_more, (proposals, probs, caches))


def propose(
    levels: Levels,
    config: DecodeConfig,
    shapes: Shapes,
    state: DecodeState,
    wanted: Int[Array, "B"],
    draw: Draw,
) -> Proposed:
    """Collects at least `wanted` candidates a row, fewer only after an EOS.

    Args:
      levels, config, shapes: static.
      state: the state between two outer steps.
      wanted: at most gamma; 0 for rows that want none.
      draw: source of uniforms; uses rounds from 0 on.
    """
    b = state.tokens.shape[0]
    if not shapes.candidates:
        probs = jnp.zeros((b, 0, levels.vocab_size), jnp.float32)
        none = Candidates(state.tokens, probs, jnp.zeros((b, 0), jnp.int8), jnp.zeros_like(wanted))
        return Proposed(none, state.caches, state.counters)
    if config.method == "draft":
        return _from_draft(levels, config, shapes, state, wanted, draw)
    return _from_retrieval(levels, config, shapes, state, wanted, draw)


def _from_draft(levels, config, shapes, state, wanted, draw) -> Proposed:
    count = shapes.draft_proposals
    proposals, probs, caches = draft_proposals(
        levels,
        config,
        shapes,
        state.request.sampling,
        state.caches,
        state.tokens,
        state.lengths,
        draw(0, count),
    )
    tokens = put_slice(state.tokens, proposals, state.lengths + 1)
    origins = jnp.full(proposals.shape, DRAFT, jnp.int8)
    used = jnp.where(wanted > 0, count if levels.draft else 0, 0)
    counters = state.counters.add(draft_passes=used)
    return Proposed(Candidates(tokens, probs, origins, wanted), caches, counters)


def _from_retrieval(levels, config, shapes, state, wanted, draw) -> Proposed:
    width, num = shapes.retrieval_width, shapes.draft_proposals
    request, committed = state.request, state.lengths
    b = committed.shape[0]
    # Rows that are done with their round write behind everything: one round's width more.
    room = shapes.candidates + width

    def unfinished(counts: Array, stopped: Array) -> Array:
        return (counts < wanted) & ~stopped

    def another_round(carry) -> Array:
        _, counts, stopped, *_ = carry
        return jnp.any(unfinished(counts, stopped))

    def one_round(carry):
        index, counts, stopped, tokens, probs, origins, caches, counters = carry
        active = unfinished(counts, stopped)
        last = committed + counts
        uniforms = draw(index, 2 * num + 1)
        if num:
            proposals, q, caches = draft_proposals(
                levels,
                config,
                shapes,
                request.sampling,
                caches,
                tokens,
                last,
                uniforms[:, :num],
            )
        else:
            proposals = jnp.zeros((b, 0), jnp.int32)
            q = jnp.zeros((b, 0, levels.vocab_size), jnp.float32)
        feed = jnp.concatenate([take_slice(tokens, last, 1), proposals], axis=1)
        logits, caches = levels.retrieval(caches, feed, last, committed)
        r = probabilities(logits, request.sampling)
        result = rejection_step(
            r,
            q,
            proposals,
            jnp.full((b,), num, jnp.int32),
            uniforms[:, num : 2 * num],
            uniforms[:, -1],
        )
        # x_1..x_a, then the token of the rejection step; what follows is scratch.
        place = jnp.arange(width)[None, :]
        end = result.num_accepted[:, None]
        padded = jnp.pad(proposals, ((0, 0), (0, 1)))
        new = jnp.where(place == end, result.token[:, None], padded)
        origin = jnp.where(place < end, DRAFT, RETRIEVAL).astype(jnp.int8)
        at = jnp.where(active, counts, shapes.candidates)
        tokens = put_slice(tokens, new, committed + 1 + at)
        probs = put_slice(probs, r, at)
        origins = put_slice(origins, origin, at)
        ended = (is_any(new, request.eos_ids) & (place <= end)).any(-1)
        counts = jnp.where(active, counts + result.num_accepted + 1, counts)
        counters = counters.add(
            retrieval_passes=active,
            draft_passes=jnp.where(active, num if levels.draft else 0, 0),
            retrieval_accepted=jnp.where(active, result.num_accepted, 0),
            retrieval_proposed=jnp.where(active, num, 0),
        )
        stopped = stopped | (active & ended)
        return index + 1, counts, stopped, tokens, probs, origins, caches, counters

    init = (
        jnp.int32(0),
        jnp.zeros((b,), jnp.int32),
        jnp.zeros((b,), bool),
        state.tokens,
        jnp.zeros((b, room, levels.vocab_size), jnp.float32),
        jnp.zeros((b, room), jnp.int8),
        state.caches,
        state.counters,
    )
    _, counts, _, tokens, probs, origins, caches, counters = jax.lax.while_loop(
        another_round, one_round, init
    )
    x = shapes.candidates
    return Proposed(Candidates(tokens, probs[:, :x], origins[:, :x], counts), caches, counters)
