"""Rotary position embeddings, every kind computed as HF `transformers.modeling_rope_utils` does.

No table of some maximum length exists: cos and sin are computed for the positions of a pass, in
float32. Dimensions are in HF Llama's order: the first half of a head rotates with the second.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from triforce_jax.config import RopeConfig
from triforce_jax.typing import Array, Float, Int


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _yarn(config: RopeConfig, head_dim: int) -> np.ndarray:
    """arXiv 2309.00071, section 3.2: interpolate slow dimensions, keep fast ones."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as HF does
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = (1 - ramp).astype(np.float32)
    frequencies = np.float32(1) / np.float32(config.theta) ** _exponents(head_dim)
    return frequencies / np.float32(config.factor) * (1 - keep) + frequencies * keep


def _llama3(config: RopeConfig, head_dim: int) -> np.ndarray:
    """HF `_compute_llama3_parameters`."""
    frequencies = np.float32(1) / np.float32(config.theta) ** _exponents(head_dim)
    wavelength = 2 * math.pi / frequencies
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = (config.original_max_position / wavelength - low) / (high - low)
    medium = (1 - smooth) * frequencies / config.factor + smooth * frequencies
    slow = wavelength > config.original_max_position / low
    fast = wavelength < config.original_max_position / high
    return np.where(slow, frequencies / config.factor, np.where(fast, frequencies, medium))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Frequencies `[H/2]` float32; for "dynamic", those within the original length."""
    if config.kind == "yarn":
        frequencies = _yarn(config, head_dim)
    elif config.kind == "llama3":
        frequencies = _llama3(config, head_dim)
    else:
        frequencies = np.float32(1) / np.float32(config.theta) ** _exponents(head_dim)
        if config.kind == "linear":
            frequencies = frequencies / np.float32(config.factor)
    return frequencies.astype(np.float32)


def attention_scale(config: RopeConfig) -> float:
    """What cos and sin are both multiplied by (YaRN's temperature; 1 for the other kinds)."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def rope_tables(
    config: RopeConfig,
    head_dim: int,
    positions: Int[Array, "B T"],
    prompt_lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """cos and sin of every position, F = H / 2, float32, scaled by `attention_scale`.

    For "dynamic" (NTK) the base of a token follows from the length its row had when HF would
    have rotated it: a prompt's tokens from the prompt's length, a generated one from its own
    position. So a pass over one token and a pass over many agree, and no earlier, longer prompt
    has any influence. The other kinds ignore `prompt_lengths`.
    """
    at = positions.astype(jnp.float32)[..., None]
    if config.kind == "dynamic":
        original, factor = config.original_max_position, config.factor
        length = jnp.maximum(jnp.maximum(prompt_lengths[:, None], positions + 1), original)
        grown = factor * length.astype(jnp.float32) / original - (factor - 1)
        base = config.theta * grown ** (head_dim / (head_dim - 2))
        angles = at / base[..., None] ** jnp.asarray(_exponents(head_dim))
    else:
        angles = at * jnp.asarray(inverse_frequencies(config, head_dim))
    scale = jnp.float32(attention_scale(config))
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "*dims H"], cos: Float[Array, "*tables F"], sin: Float[Array, "*tables F"]
) -> Float[Array, "*dims H"]:
    """Rotates the last axis; cos and sin broadcast against x's leading axes."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def apply_rope(
    x: Float[Array, "B T heads H"], cos: Float[Array, "B T F"], sin: Float[Array, "B T F"]
) -> Float[Array, "B T heads H"]:
    """Rotates the heads of each token (HF `apply_rotary_pos_emb`)."""
    return rotate(x, cos[:, :, None], sin[:, :, None])
