"""The compiled programs of one decoder: what is static, what is traced, what is donated.

This is the one place that decides. Static: the models' definitions, `DecodeConfig` and the sizes
that follow from it, so each program compiles once a decoder. Traced: weights, tokens, lengths,
sampling parameters, EOS ids, keys and the number of steps. Donated: every cache and the state.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from triforce_jax import sharding
from triforce_jax.cache import full, retrieval
from triforce_jax.config import DecodeConfig, ModelConfig
from triforce_jax.decoding import loop, prefill
from triforce_jax.decoding.levels import of_models
from triforce_jax.decoding.state import Caches, DecodeState
from triforce_jax.models.llama import Llama
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Float, Int


class Weights(NamedTuple):
    """NNX states of the models' parameters."""

    target: nnx.State
    draft: nnx.State | None


class Programs:
    """Compiled programs over one pair of models and one configuration.

    Args:
      target, draft: the models; their weights are split off into `weights`.
      config: the decode configuration.
      mesh: where caches are sharded over KV heads; None keeps them on the default device.

    Attributes:
      prefill_target: (weights, caches, tokens [B, W], start, prompt_lengths [B]) -> caches.
      prefill_draft: (weights, caches, tokens [B, W], start, counts [B]) -> caches.
      score: as prefill_target, -> (logits [B, W, V] float32, caches).
      decode: (weights, state, max_steps) -> state.
    """

    def __init__(
        self, target: Llama, draft: Llama | None, config: DecodeConfig, mesh: Mesh | None = None
    ):
        self.config = config
        self.shapes = Shapes.of(config)
        self.model: ModelConfig = target.config
        self.draft_model: ModelConfig | None = draft.config if draft is not None else None
        self.dtype: DTypeLike = target.embed[...].dtype
        self.mesh = mesh
        target_def, target_state = nnx.split(target)
        draft_def, draft_state = nnx.split(draft) if draft is not None else (None, None)
        self.weights = Weights(target_state, draft_state)
        static = functools.partial(
            functools.partial, target_def=target_def, draft_def=draft_def, config=config
        )
        shapes = self.shapes
        self.prefill_target = jax.jit(static(_prefill_target, shapes=shapes), donate_argnums=1)
        self.prefill_draft = jax.jit(static(_prefill_draft), donate_argnums=1)
        self.score = jax.jit(static(_score, shapes=shapes), donate_argnums=1)
        self.decode = jax.jit(static(_decode, shapes=shapes), donate_argnums=1)

    def new_caches(self) -> Caches:
        """Allocates all caches. They are reused, donated from call to call."""
        config, shapes, b = self.config, self.shapes, self.config.batch_size

        def make() -> Caches:
            draft = None
            if self.draft_model is not None:
                slots = config.draft_sinks + shapes.ring_slots
                draft = full.empty(self.draft_model, b, slots, self.dtype)
            selected = None
            if config.uses_retrieval:
                selected = retrieval.empty(self.model, config, shapes, self.dtype)
            target = full.empty(self.model, b, shapes.full_slots, self.dtype)
            return Caches(target, selected, draft)

        if self.mesh is None:
            return jax.jit(make)()
        placed = sharding.cache_shardings(jax.eval_shape(make), self.mesh)
        return jax.jit(make, out_shardings=placed)()


def _means(caches: Caches) -> tuple[Array, ...]:
    return caches.retrieval.chunk_means if caches.retrieval is not None else ()


def _run_prefill(
    weights, caches, tokens, start, prompt_lengths, *, target_def, config, shapes
) -> tuple[Llama, Array, Caches]:
    model = nnx.merge(target_def, weights.target)
    hidden, kv, means = prefill.prefill_target(
        model, config, shapes, caches.target, _means(caches), tokens, start, prompt_lengths
    )
    selected = caches.retrieval
    if selected is not None:
        selected = retrieval.RetrievalCache(
            selected.kv, selected.lengths, selected.chunk_ids, means
        )
    return model, hidden, Caches(kv, selected, caches.draft)


def _prefill_target(
    weights: Weights,
    caches: Caches,
    tokens: Int[Array, "B W"],
    start: Int[Array, ""],
    prompt_lengths: Int[Array, "B"],
    *,
    target_def,
    draft_def,
    config: DecodeConfig,
    shapes: Shapes,
) -> Caches:
    del draft_def
    _, _, caches = _run_prefill(
        weights,
        caches,
        tokens,
        start,
        prompt_lengths,
        target_def=target_def,
        config=config,
        shapes=shapes,
    )
    return caches


def _score(
    weights: Weights,
    caches: Caches,
    tokens: Int[Array, "B W"],
    start: Int[Array, ""],
    prompt_lengths: Int[Array, "B"],
    *,
    target_def,
    draft_def,
    config: DecodeConfig,
    shapes: Shapes,
) -> tuple[Float[Array, "B W V"], Caches]:
    del draft_def
    model, hidden, caches = _run_prefill(
        weights,
        caches,
        tokens,
        start,
        prompt_lengths,
        target_def=target_def,
        config=config,
        shapes=shapes,
    )
    return model.logits(hidden), caches


def _prefill_draft(
    weights: Weights,
    caches: Caches,
    tokens: Int[Array, "B W"],
    start: Int[Array, ""],
    counts: Int[Array, "B"],
    *,
    target_def,
    draft_def,
    config: DecodeConfig,
) -> Caches:
    del target_def
    model = nnx.merge(draft_def, weights.draft)
    assert caches.draft is not None
    draft = prefill.prefill_draft(model, config, caches.draft, tokens, start, counts)
    return Caches(caches.target, caches.retrieval, draft)


def _decode(
    weights: Weights,
    state: DecodeState,
    max_steps: Int[Array, ""],
    *,
    target_def,
    draft_def,
    config: DecodeConfig,
    shapes: Shapes,
) -> DecodeState:
    target = nnx.merge(target_def, weights.target)
    draft = nnx.merge(draft_def, weights.draft) if draft_def is not None else None
    levels = of_models(target, draft, config, shapes, state.request.prompt_lengths)
    return loop.decode(levels, config, shapes, state, jnp.int32(max_steps))
