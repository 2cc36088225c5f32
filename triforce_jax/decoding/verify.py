"""The outer level: one pass of the target over the candidates, one rejection step, the commit."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from triforce_jax.decoding.levels import Levels
from triforce_jax.decoding.propose import Candidates, Draw, Proposed, is_any
from triforce_jax.decoding.rejection import Rejection, rejection_step
from triforce_jax.decoding.sampling import probabilities
from triforce_jax.decoding.state import (
    BONUS,
    EOS,
    LENGTH,
    TARGET,
    DecodeState,
    put_slice,
    take_slice,
)
from triforce_jax.shapes import Shapes

# The round number of the verification's uniforms: beyond any inner round's.
VERIFY_ROUND = 1 << 20


def verify(
    levels: Levels, shapes: Shapes, state: DecodeState, proposed: Proposed, draw: Draw
) -> DecodeState:
    """Verifies candidates against the full cache and commits what is accepted.

    The pass is over [pending token, candidates]; p of a candidate is the target's distribution
    after all before it, and the candidates' own distributions are the rejection step's q.
    """
    candidates = proposed.candidates
    num = shapes.candidates
    committed = state.lengths
    feed = take_slice(candidates.tokens, committed, shapes.target_width)
    logits, caches = levels.target(
        proposed.caches, feed, committed, candidates.counts + 1, state.step
    )
    uniforms = draw(VERIFY_ROUND, num + 1)
    result = rejection_step(
        probabilities(logits, state.request.sampling),
        candidates.probs,
        feed[:, 1:],
        candidates.counts,
        uniforms[:, :num],
        uniforms[:, num],
    )
    active = ~state.done
    counters = proposed.counters.add(
        target_passes=active,
        target_accepted=jnp.where(active, result.num_accepted, 0),
        target_proposed=jnp.where(active, candidates.counts, 0),
    )
    state = dataclasses.replace(state, caches=caches, counters=counters)
    state = commit(state, candidates, result, feed[:, 1:])
    caches = levels.install(state.caches, committed, state.lengths)
    return dataclasses.replace(state, caches=caches, step=state.step + 1)


def commit(state: DecodeState, candidates: Candidates, result: Rejection, proposals) -> DecodeState:
    """Appends the accepted candidates and the token after them, up to EOS and the row's limit."""
    request = state.request
    place = jnp.arange(proposals.shape[1] + 1)[None, :]  # [1, X + 1]
    end = result.num_accepted[:, None]
    emitted = jnp.where(place == end, result.token[:, None], jnp.pad(proposals, ((0, 0), (0, 1))))
    bonus = result.all_accepted & (candidates.counts > 0)
    last_origin = jnp.where(bonus, BONUS, TARGET).astype(jnp.int8)
    origins = jnp.where(
        place == end, last_origin[:, None], jnp.pad(candidates.origins, ((0, 0), (0, 1)))
    )
    # A row has lengths + 1 known tokens, and emits down to its first EOS or up to its limit.
    room = request.limits - (state.lengths + 1)
    eos = is_any(emitted, request.eos_ids)
    before_eos = jnp.cumsum(eos, axis=1) - eos == 0
    kept = (place <= end) & before_eos & (place < room[:, None])
    kept = kept & ~state.done[:, None]
    count = kept.sum(axis=1, dtype=jnp.int32)
    saw_eos = (kept & eos).any(axis=1)
    full = count >= room
    done = state.done | saw_eos | full
    reason = jnp.where(saw_eos, EOS, LENGTH).astype(state.finish.dtype)
    return dataclasses.replace(
        state,
        tokens=put_slice(state.tokens, emitted, state.lengths + 1),
        origins=put_slice(state.origins, origins, state.lengths + 1),
        lengths=state.lengths + count,
        done=done,
        finish=jnp.where(state.done, state.finish, reason),
    )
