"""Logits -> probabilities, and drawing a token from probabilities.

One transform serves every level: temperature, then top-k, top-p and min-p, each on what the one
before left, as HF's logits processors do. All parameters are traced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from triforce_jax.config import SamplingParams
from triforce_jax.typing import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """The traced sampling parameters of a batch, one entry a row."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    min_p: Float[Array, "B"]

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> RowSampling:
        """Stacks the parameters of a batch's rows."""

        def column(name: str, dtype) -> Array:
            return jnp.asarray(np.array([getattr(p, name) for p in params], dtype))

        return cls(
            temperature=column("temperature", np.float32),
            top_p=column("top_p", np.float32),
            # No vocabulary is larger than int32; a larger k keeps everything, as 0 does.
            top_k=jnp.asarray(np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32)),
            min_p=column("min_p", np.float32),
        )


def _ordered_bits(x: Float[Array, "B T V"]) -> Int[Array, "B T V"]:
    """For floats >= 0 the bit patterns, as integers, are in the order of the values."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _greatest_threshold(
    holds_above: Callable[[Int[Array, "B T 1"]], Bool[Array, "B T 1"]],
    shape: tuple[int, ...],
) -> Int[Array, "B T 1"]:
    """Bisects for the greatest bit pattern for which `holds_above` is False, or 0.

    `holds_above` goes from False to True as the threshold rises. 31 reductions over the
    vocabulary replace a sort of it.
    """
    low = jnp.zeros((*shape, 1), jnp.int32)
    high = jnp.full((*shape, 1), 0x7F800000, jnp.int32)  # infinity: True

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        holds = holds_above(middle)
        return jnp.where(holds, low, middle), jnp.where(holds, middle, high)

    return jax.lax.fori_loop(0, 31, halve, (low, high))[0]


def keep_top_k(probs: Float[Array, "B T V"], top_k: Int[Array, "B"]) -> Float[Array, "B T V"]:
    """Keeps the k most probable tokens and the ties of the k-th (HF TopK), renormalised."""
    bits, k = _ordered_bits(probs), top_k[:, None, None]
    off = (k <= 0) | (k >= probs.shape[-1])

    def fewer_than_k(threshold):
        return (bits >= threshold).sum(-1, keepdims=True) < k

    kth = _greatest_threshold(fewer_than_k, probs.shape[:2])
    kept = jnp.where(bits >= kth, probs, 0.0)
    return jnp.where(off, probs, kept / kept.sum(-1, keepdims=True))


def keep_top_p(probs: Float[Array, "B T V"], top_p: Float[Array, "B"]) -> Float[Array, "B T V"]:
    """Keeps a token if the mass before it, in descending order, is below p (HF TopP).

    Of equally probable tokens the lower id comes first. Not renormalised.
    """
    bits, p = _ordered_bits(probs), top_p[:, None, None]

    def mass_above_is_below_p(threshold):
        return jnp.where(bits > threshold, probs, 0.0).sum(-1, keepdims=True) < p

    # The mass above `cut` still reaches p; the value next above it is the last one kept.
    cut = _greatest_threshold(mass_above_is_below_p, probs.shape[:2])
    last = jnp.where(bits > cut, bits, jnp.iinfo(jnp.int32).max).min(-1, keepdims=True)
    tied = bits == last
    above = jnp.where(bits > last, probs, 0.0).sum(-1, keepdims=True)
    value = jnp.where(tied, probs, 0.0).max(-1, keepdims=True)
    rank = jnp.cumsum(tied, axis=-1) - tied  # how many of the ties have a lower id
    kept = (bits > last) | (tied & (above + rank * value < p))
    return jnp.where((p >= 1) | kept, probs, 0.0)


def probabilities(logits: Float[Array, "B T V"], sampling: RowSampling) -> Float[Array, "B T V"]:
    """The distribution a level samples from, in float32. Ids may carry logits of -inf."""
    logits = logits.astype(jnp.float32)
    temperature = sampling.temperature[:, None, None]
    greedy = temperature == 0
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    # Subtract before dividing: a small temperature must not overflow.
    shifted = logits - logits.max(-1, keepdims=True)
    probs = jax.nn.softmax(shifted / jnp.where(greedy, 1.0, temperature), axis=-1)

    # Each filter costs reductions over the vocabulary: skip it where no row asks for it.
    live = sampling.temperature > 0
    probs = jax.lax.cond(
        jnp.any(live & (sampling.top_k > 0)),
        lambda x: keep_top_k(x, sampling.top_k),
        lambda x: x,
        probs,
    )
    probs = jax.lax.cond(
        jnp.any(live & (sampling.top_p < 1)),
        lambda x: keep_top_p(x, sampling.top_p),
        lambda x: x,
        probs,
    )
    least = sampling.min_p[:, None, None] * probs.max(-1, keepdims=True)
    probs = jnp.where(probs >= least, probs, 0.0)
    probs = probs / probs.sum(-1, keepdims=True)
    return jnp.where(greedy, best, probs)


def draw_token(weights: Float[Array, "B V"], uniforms: Float[Array, "B"]) -> Int[Array, "B"]:
    """Draws from weights that need not sum to one, by inverting their cumulative sum.

    A token of weight zero is never drawn, whatever the rounding. Two levels of cumulative sums,
    over blocks and then in one block, read the vocabulary once.

    Args:
      weights: not negative, not all zero.
      uniforms: in [0, 1).
    """
    b, v = weights.shape
    size = max(1, math.isqrt(v))
    blocks = jnp.pad(weights, ((0, 0), (0, -v % size))).reshape(b, -1, size)
    sums = blocks.sum(-1)
    goal = uniforms * sums.sum(-1)
    block, before = _invert(sums, goal)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    token, _ = _invert(inside, goal - before)
    return block * size + token


def _invert(weights: Float[Array, "B X"], goal: Float[Array, "B"]) -> tuple[Array, Array]:
    """First index of positive weight whose cumulative sum exceeds the goal, and the sum before.

    Falls back to the last index of positive weight where rounding leaves none.
    """
    total = jnp.cumsum(weights, axis=-1)
    positive = weights > 0
    hit = positive & (total > goal[:, None])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index = jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)
    before = jnp.take_along_axis(total - weights, index[:, None], axis=-1)[:, 0]
    return index, before
