"""Lossless hierarchical speculative decoding (TriForce) for long-context Llama models in JAX.

The public names, imported when first used, so that the commands can answer `--help` and most bad
input without loading JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triforce_jax.config import DecodeConfig, SamplingParams
    from triforce_jax.errors import InputError
    from triforce_jax.generator import Generator
    from triforce_jax.outputs import GenerationOutput, Piece, Stats
    from triforce_jax.sharding import make_mesh

_HOMES = {
    "DecodeConfig": "triforce_jax.config",
    "GenerationOutput": "triforce_jax.outputs",
    "Generator": "triforce_jax.generator",
    "InputError": "triforce_jax.errors",
    "Piece": "triforce_jax.outputs",
    "SamplingParams": "triforce_jax.config",
    "Stats": "triforce_jax.outputs",
    "make_mesh": "triforce_jax.sharding",
}

__all__ = [
    "DecodeConfig",
    "GenerationOutput",
    "Generator",
    "InputError",
    "Piece",
    "SamplingParams",
    "Stats",
    "make_mesh",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'triforce_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
