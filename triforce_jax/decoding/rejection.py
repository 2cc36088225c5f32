"""The rejection step of speculative sampling, a pure function of its uniforms.

Source: arXiv 2211.17192 (Leviathan et al.), algorithm 1. TriForce nests it (DESIGN 2).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from triforce_jax.decoding.sampling import draw_token
from triforce_jax.typing import Array, Bool, Float, Int


class Rejection(NamedTuple):
    """Outcome of one rejection step.

    Attributes:
      num_accepted: leading proposals accepted.
      token: the token after them, from the residual or, all accepted, the bonus token.
      all_accepted: whether `token` is a bonus token.
    """

    num_accepted: Int[Array, "B"]
    token: Int[Array, "B"]
    all_accepted: Bool[Array, "B"]


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(p - q, 0), not normalised; p itself where nothing is left (p equals q by rounding)."""
    rest = jnp.maximum(p - q, 0.0)
    return jnp.where(rest.sum(-1, keepdims=True) > 0, rest, p)


def rejection_step(
    p: Float[Array, "B T V"],
    q: Float[Array, "B X V"],
    proposals: Int[Array, "B X"],
    counts: Int[Array, "B"],
    accept_uniforms: Float[Array, "B X"],
    token_uniforms: Float[Array, "B"],
) -> Rejection:
    """Accepts proposals x_i ~ q_i while u_i q_i(x_i) < p_i(x_i), then draws one more token.

    The accepted tokens and the last one are distributed exactly as p, token by token.

    Args:
      p: the verifier's distributions, T = X + 1; p[:, i] follows the first i proposals.
      q: the distributions that the proposals were drawn from.
      proposals: the proposals.
      counts: how many of a row's proposals are real; after them comes p[:, counts].
      accept_uniforms, token_uniforms: independent, in [0, 1).
    """
    num = proposals.shape[1]
    at = proposals[:, :, None]
    p_of_x = jnp.take_along_axis(p[:, :num], at, axis=2)[:, :, 0]
    q_of_x = jnp.take_along_axis(q, at, axis=2)[:, :, 0]
    real = jnp.arange(num)[None, :] < counts[:, None]
    accepted = real & (accept_uniforms * q_of_x < p_of_x)
    num_accepted = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    all_accepted = num_accepted == counts
    p_next = jnp.take_along_axis(p, num_accepted[:, None, None], axis=1)[:, 0]
    if num:
        rejected = jnp.minimum(num_accepted, num - 1)[:, None, None]
        q_next = jnp.take_along_axis(q, rejected, axis=1)[:, 0]
        weights = jnp.where(all_accepted[:, None], p_next, residual(p_next, q_next))
    else:
        weights = p_next
    return Rejection(num_accepted, draw_token(weights, token_uniforms), all_accepted)
