"""The n-gram draft: prompt look-up (the idea of HF's `prompt_lookup_num_tokens`).

No model at all: find the longest suffix of the tokens so far that occurred before, and propose
what followed it there. Its distribution is one-hot, so verification stays exact.
"""

from __future__ import annotations

import jax.numpy as jnp

from triforce_jax.typing import Array, Int


def look_up(
    tokens: Int[Array, "B Z"], last: Int[Array, "B"], longest: int, count: int
) -> Int[Array, "B count"]:
    """Proposes the `count` tokens after the newest of the longest earlier matches.

    Args:
      tokens: the tokens so far, then anything.
      last: slot of each row's last token.
      longest: longest suffix that is looked up.
      count: tokens to propose. A match that runs into the end repeats from its start, as the
        text it matched would; without any match the last token is proposed.
    """
    slots = jnp.arange(tokens.shape[1])[None, :]
    rows = jnp.arange(tokens.shape[0])[:, None]
    matching = slots < last[:, None]
    length = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(longest):
        wanted = tokens[rows, jnp.maximum(last[:, None] - back, 0)]  # [B, 1]
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        matching &= (shifted == wanted) & (slots >= back)
        length += matching
    # Longest first, then newest.
    best = jnp.argmax(jnp.where(length > 0, length * tokens.shape[1] + slots, -1), axis=1)
    found = length.max(axis=1) > 0
    period = jnp.where(found, last - best, 1)[:, None]
    start = jnp.where(found, best + 1, last)[:, None]
    return tokens[rows, start + jnp.arange(count)[None, :] % period]
