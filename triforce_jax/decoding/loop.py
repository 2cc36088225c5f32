"""The decode loop: outer steps in one `lax.while_loop`, with no way to the host in between.

The autoregressive baseline is the same loop with no candidates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from triforce_jax.config import DecodeConfig
from triforce_jax.decoding.levels import Levels
from triforce_jax.decoding.propose import Draw, propose
from triforce_jax.decoding.state import DecodeState
from triforce_jax.decoding.verify import verify
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Int


def row_uniforms(state: DecodeState) -> Draw:
    """Uniforms that depend on the row's key and its own steps, not on its neighbours."""

    def draw(index, count: int) -> Array:
        def one_row(key):
            key = jax.random.fold_in(jax.random.fold_in(key, state.step), index)
            return jax.random.uniform(key, (count,), jnp.float32)

        return jax.vmap(one_row)(state.request.keys)

    return draw


def outer_step(
    levels: Levels, config: DecodeConfig, shapes: Shapes, state: DecodeState, draw: Draw
) -> DecodeState:
    """One outer step: propose, verify, commit. Emits at least one token a row that is not done.

    How many candidates are wanted depends on the tokens emitted so far only.
    """
    room = state.request.limits - (state.lengths + 1)
    # The verification emits one token by itself, so one candidate fewer than fit is enough.
    wanted = jnp.where(state.done, 0, jnp.clip(room - 1, 0, config.gamma))
    if config.uses_retrieval:
        # The first verification makes the retrieval cache, with the last prompt token's query.
        wanted = jnp.where(state.step == 0, 0, wanted)
    proposed = propose(levels, config, shapes, state, wanted, draw)
    return verify(levels, shapes, state, proposed, draw)


def decode(
    levels: Levels,
    config: DecodeConfig,
    shapes: Shapes,
    state: DecodeState,
    max_steps: Int[Array, ""],
) -> DecodeState:
    """Takes outer steps until every row is done, `max_steps` at most."""
    last = state.step + max_steps

    def unfinished(state: DecodeState) -> Array:
        return (state.step < last) & ~jnp.all(state.done)

    def body(state: DecodeState) -> DecodeState:
        return outer_step(levels, config, shapes, state, row_uniforms(state))

    return jax.lax.while_loop(unfinished, body, state)
