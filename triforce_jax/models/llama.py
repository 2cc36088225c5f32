"""Llama in Flax NNX: grouped-query attention, RMSNorm, SwiGLU, layers unrolled.

The model knows nothing of KV caches. A call gets one KV state a layer and a function `attend`
that writes the new keys and values into that state, reads it and returns it updated, so every
cache policy (cache/) shares this one model and a call stays pure.

Source: HF `transformers.models.llama.modeling_llama`. Weights are kept input-major
(`[D, N, H]`), the transposes of HF's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from triforce_jax.config import ModelConfig
from triforce_jax.typing import Array, Float, Int

# q [B, T, N, H], k [B, T, K, H], v [B, T, K, H] (not rotated), KV state of the layer
# -> attention output [B, T, N, H], KV state updated.
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """float32 means float32: TPU and GPU would round its products to bfloat16 or TF32."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def _einsum(spec: str, x: Array, w: Array) -> Array:
    return jnp.einsum(spec, x, w, precision=matmul_precision(w.dtype))


def _weight(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    return nnx.Param(value.astype(dtype))


class Projection(nnx.Module):
    """A linear map `[..., *inputs] -> [..., *outputs]` with an optional bias."""

    def __init__(
        self,
        spec: str,
        shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None,
        fan_in: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.spec = spec
        self.kernel = _weight(rngs, shape, fan_in, dtype)
        self.bias = nnx.Param(jnp.zeros(bias_shape, dtype)) if bias_shape else None

    def __call__(self, x: Array) -> Array:
        y = _einsum(self.spec, x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (HF `LlamaRMSNorm`)."""

    def __init__(self, dim: int, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((dim,), dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * y.astype(x.dtype)


class Attention(nnx.Module):
    """Projections of grouped-query attention; the attention itself is the caller's `attend`."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        c = config
        bias = c.attention_bias

        def heads(count: int) -> Projection:
            shape = (c.embed_dim, count, c.head_dim)
            return Projection(
                "btd,dnh->btnh", shape, shape[1:] if bias else None, c.embed_dim, dtype, rngs
            )

        self.q = heads(c.num_heads)
        self.k = heads(c.num_kv_heads)
        self.v = heads(c.num_kv_heads)
        self.o = Projection(
            "btnh,nhd->btd",
            (c.num_heads, c.head_dim, c.embed_dim),
            (c.embed_dim,) if bias else None,
            c.num_heads * c.head_dim,
            dtype,
            rngs,
        )

    def __call__(self, x: Array, kv: Any, attend: Attend) -> tuple[Array, Any]:
        out, kv = attend(self.q(x), self.k(x), self.v(x), kv)
        return self.o(out), kv


class MLP(nnx.Module):
    """SwiGLU (HF `LlamaMLP`)."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        d, f, bias = config.embed_dim, config.mlp_dim, config.mlp_bias
        self.gate = Projection("btd,df->btf", (d, f), (f,) if bias else None, d, dtype, rngs)
        self.up = Projection("btd,df->btf", (d, f), (f,) if bias else None, d, dtype, rngs)
        self.down = Projection("btf,fd->btd", (f, d), (d,) if bias else None, f, dtype, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps, dtype)
        self.attention = Attention(config, dtype, rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(self, x: Array, kv: Any, attend: Attend) -> tuple[Array, Any]:
        out, kv = self.attention(self.attention_norm(x), kv, attend)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), kv


class Llama(nnx.Module):
    """A Llama-family decoder.

    Parameter paths (see checkpoint/weights.py for their HF and GGUF names): `embed`,
    `blocks.{i}.attention_norm.scale`, `blocks.{i}.attention.{q,k,v,o}.{kernel,bias}`,
    `blocks.{i}.mlp_norm.scale`, `blocks.{i}.mlp.{gate,up,down}.{kernel,bias}`, `norm.scale`,
    and `head` unless the embeddings are tied.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        c = config
        self.config = config
        self.embed = _weight(rngs, (c.vocab_size, c.embed_dim), c.embed_dim, dtype)
        self.blocks = nnx.List([Block(c, dtype, rngs) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.embed_dim, c.norm_eps, dtype)
        if not c.tie_embeddings:
            self.head = _weight(rngs, (c.vocab_size, c.embed_dim), c.embed_dim, dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], layers: Sequence[Any], attend: Attend
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Runs the decoder over new tokens.

        Args:
          tokens: the new tokens. Their positions are `attend`'s business.
          layers: one KV state a layer.
          attend: writes a layer's new keys and values, attends, returns the state updated.

        Returns:
          The last hidden states (normed, ready for `logits`) and the updated KV states.
        """
        x = self.embed[...][tokens]
        updated = []
        for block, kv in zip(self.blocks, layers, strict=True):
            x, kv = block(x, kv, attend)
            updated.append(kv)
        return self.norm(x), tuple(updated)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Next-token logits, accumulated and returned in float32."""
        head = self.embed if self.config.tie_embeddings else self.head
        return jnp.einsum(
            "btd,vd->btv",
            hidden,
            head[...],
            precision=matmul_precision(head[...].dtype),
            preferred_element_type=jnp.float32,
        )
