"""The full KV cache: per layer keys (rotated) and values `[B, K, S, H]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from triforce_jax.attention.dispatch import attend
from triforce_jax.config import ModelConfig
from triforce_jax.models.rope import apply_rope, rope_tables
from triforce_jax.typing import Array, Float, Int

# Rotates queries or keys [B, T, heads, H] of one pass.
Rotate = Callable[[Array], Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer; which slots are valid is known to its owner."""

    keys: tuple[Float[Array, "B K S H"], ...]
    values: tuple[Float[Array, "B K S H"], ...]

    @property
    def layers(self) -> tuple[tuple[Array, Array], ...]:
        """The KV states that `Llama.__call__` takes."""
        return tuple(zip(self.keys, self.values, strict=True))

    @classmethod
    def of_layers(cls, layers: Iterable[tuple[Array, Array]]) -> KVCache:
        """Undoes `layers`."""
        keys, values = zip(*layers, strict=True)
        return cls(keys, values)


def empty(config: ModelConfig, batch_size: int, slots: int, dtype: DTypeLike) -> KVCache:
    """A cache of zeros for all layers of a model."""
    shape = (batch_size, config.num_kv_heads, slots, config.head_dim)

    def buffers() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return KVCache(buffers(), buffers())


def write(
    buffer: Float[Array, "B K S H"], new: Float[Array, "B T K H"], slots: Int[Array, "B"]
) -> Float[Array, "B K S H"]:
    """Writes T new tokens of each row at slots[b]..slots[b]+T-1."""
    rows = new.astype(buffer.dtype).transpose(0, 2, 1, 3)  # [B, K, T, H]
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, slots[0], 0))
    return jax.vmap(
        lambda row, piece, slot: jax.lax.dynamic_update_slice(row, piece, (0, slot, 0))
    )(buffer, rows, slots)


def rotation(
    config: ModelConfig,
    positions: Int[Array, "B"],
    num_tokens: int,
    prompt_lengths: Int[Array, "B"],
) -> Rotate:
    """RoPE for T tokens of each row, the first at `positions`."""
    at = positions[:, None] + jnp.arange(num_tokens)[None, :]
    cos, sin = rope_tables(config.rope, config.head_dim, at, prompt_lengths)
    return lambda x: apply_rope(x, cos, sin)


def pass_over(rotate: Rotate, slots: Int[Array, "B"], *, implementation: str, block: int):
    """The `attend` of a pass that writes at `slots` and reads all valid slots before them."""

    def attend_layer(q, k, v, kv):
        keys = write(kv[0], rotate(k), slots)
        values = write(kv[1], v, slots)
        out, _ = attend(rotate(q), keys, values, slots, implementation=implementation, block=block)
        return out, (keys, values)

    return attend_layer
