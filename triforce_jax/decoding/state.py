"""The state of one batch while it decodes: a pytree of static shapes, donated to each call."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from triforce_jax.cache.full import KVCache
from triforce_jax.cache.retrieval import RetrievalCache
from triforce_jax.decoding.sampling import RowSampling
from triforce_jax.typing import Array, Bool, Int, UInt32

# Where a token came from, as int8 codes in `DecodeState.origins`.
ORIGINS = ("prompt", "draft", "retrieval", "target", "bonus")
PROMPT, DRAFT, RETRIEVAL, TARGET, BONUS = range(len(ORIGINS))

# Why a row ended.
FINISH_REASONS = ("length", "eos")
LENGTH, EOS = range(len(FINISH_REASONS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """The caches of all levels; None where the method has no such level."""

    target: KVCache
    retrieval: RetrievalCache | None
    draft: KVCache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """What a row did so far. A pass of the whole batch counts for the rows that needed it."""

    target_passes: Int[Array, "B"]
    retrieval_passes: Int[Array, "B"]
    draft_passes: Int[Array, "B"]
    target_accepted: Int[Array, "B"]
    target_proposed: Int[Array, "B"]
    retrieval_accepted: Int[Array, "B"]
    retrieval_proposed: Int[Array, "B"]

    @classmethod
    def zeros(cls, batch_size: int) -> Counters:
        return cls(*(jnp.zeros((batch_size,), jnp.int32) for _ in dataclasses.fields(cls)))

    def add(self, **increments: Array) -> Counters:
        """A copy with each named counter increased by its `[B]` increment."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + value for name, value in increments.items()}
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """What each row was asked for: constant while it decodes.

    Attributes:
      sampling: the sampling parameters.
      keys: the row's random key; its draws depend on it and on the row's own steps only.
      prompt_lengths: tokens of the prompt.
      limits: most tokens, prompt and output together.
      eos_ids: E ids that end a row, padded with -1.
    """

    sampling: RowSampling
    keys: UInt32[Array, "B 2"]
    prompt_lengths: Int[Array, "B"]
    limits: Int[Array, "B"]
    eos_ids: Int[Array, "B E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """State between two outer steps.

    Attributes:
      tokens: prompt and output of each row, then scratch.
      origins: for each token a code of ORIGINS.
      lengths: tokens whose KV is committed. The token at that slot is *pending*: emitted (or the
        prompt's last), not yet seen by the target.
      done: rows that ended; they change no more.
      finish: for each ended row a code of FINISH_REASONS.
      step: outer steps taken.
      caches: the KV caches.
      counters: statistics.
      request: what was asked for.
    """

    tokens: Int[Array, "B Z"]
    origins: Int[Array, "B Z"]
    lengths: Int[Array, "B"]
    done: Bool[Array, "B"]
    finish: Int[Array, "B"]
    step: Int[Array, ""]
    caches: Caches
    counters: Counters
    request: Request


def take_slice(buffer: Array, starts: Int[Array, "B"], width: int) -> Array:
    """Each row's `width` entries from its own start on: `[B, Z, ...] -> [B, width, ...]`."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(buffer, starts)


def put_slice(buffer: Array, piece: Array, starts: Int[Array, "B"]) -> Array:
    """Writes each row's piece `[B, width, ...]` at its own start."""
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))(
        buffer, piece.astype(buffer.dtype), starts
    )
