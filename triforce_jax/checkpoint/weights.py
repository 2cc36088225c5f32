"""One table: our parameter paths, their HF and GGUF names, and HF's layout turned into ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from triforce_jax.config import ModelConfig

# ours (below a block): HF name, GGUF name.
_PROJECTIONS = {
    "attention.q": ("self_attn.q_proj", "attn_q"),
    "attention.k": ("self_attn.k_proj", "attn_k"),
    "attention.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
    "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_NORMS = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
      path: ours, as in models/llama.py.
      hf, gguf: its names there.
      shape: ours.
      transposed: HF keeps it output-major, ours is input-major.
    """

    path: str
    hf: str
    gguf: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape in an HF checkpoint: a matrix, or a vector."""
        if not self.transposed:
            return self.shape if self.path in ("embed", "head") else (int(np.prod(self.shape)),)
        inputs = self.shape[:-1] if self.path.endswith("attention.o.kernel") else self.shape[:1]
        size = int(np.prod(inputs))
        return int(np.prod(self.shape)) // size, size

    def from_hf(self, array: np.ndarray) -> np.ndarray:
        """HF's layout in ours."""
        return (array.T if self.transposed else array).reshape(self.shape)


def weights_of(config: ModelConfig) -> Iterator[Weight]:
    """Every parameter of a model, in the order of the layers."""
    c = config
    d, f, n, k, h = c.embed_dim, c.mlp_dim, c.num_heads, c.num_kv_heads, c.head_dim
    shapes = {
        "attention.q": ((d, n, h), (n, h)),
        "attention.k": ((d, k, h), (k, h)),
        "attention.v": ((d, k, h), (k, h)),
        "attention.o": ((n, h, d), (d,)),
        "mlp.gate": ((d, f), (f,)),
        "mlp.up": ((d, f), (f,)),
        "mlp.down": ((f, d), (d,)),
    }
    yield Weight("embed", "model.embed_tokens.weight", "token_embd.weight", (c.vocab_size, d))
    for i in range(c.num_layers):
        ours, hf, gguf = f"blocks.{i}.", f"model.layers.{i}.", f"blk.{i}."
        for name, (hf_name, gguf_name) in _NORMS.items():
            yield Weight(
                f"{ours}{name}.scale", f"{hf}{hf_name}.weight", f"{gguf}{gguf_name}.weight", (d,)
            )
        for name, (hf_name, gguf_name) in _PROJECTIONS.items():
            kernel, bias = shapes[name]
            yield Weight(
                f"{ours}{name}.kernel",
                f"{hf}{hf_name}.weight",
                f"{gguf}{gguf_name}.weight",
                kernel,
                transposed=True,
            )
            if c.attention_bias if name.startswith("attention") else c.mlp_bias:
                yield Weight(
                    f"{ours}{name}.bias", f"{hf}{hf_name}.bias", f"{gguf}{gguf_name}.bias", bias
                )
    yield Weight("norm.scale", "model.norm.weight", "output_norm.weight", (d,))
    if not c.tie_embeddings:
        yield Weight("head", "lm_head.weight", "output.weight", (c.vocab_size, d))
