"""What the algorithm needs of the models: three functions from tokens to logits.

propose.py and verify.py know only this interface, so the very code that decodes with Llama can be
proved on tables of probabilities (tests/decoding/test_exactness.py). `of_models` builds the
levels of real models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from triforce_jax.cache import full, retrieval, streaming
from triforce_jax.cache.full import KVCache
from triforce_jax.config import DecodeConfig
from triforce_jax.decoding.state import Caches
from triforce_jax.models.llama import Llama
from triforce_jax.shapes import Shapes
from triforce_jax.typing import Array, Float, Int


class Levels(NamedTuple):
    """The passes of the levels. Tokens are `[B, T]`, logits `[B, T, V]` float32.

    Attributes:
      draft: (caches, tokens, positions [B]) -> logits, caches. None: no draft model.
      retrieval: (caches, tokens, positions [B], committed [B]) -> logits, caches; `committed` of
        the positions are in the retrieval cache for good, the rest is scratch.
      target: (caches, tokens, committed [B], counts [B], step) -> logits, caches; a row's first
        `counts` tokens are real. Selects for the retrieval level as it goes.
      install: (caches, committed before [B], committed after [B]) -> caches; called once the
        verification has decided, moves the retrieval cache to the tokens now committed.
      vocab_size: V.
    """

    draft: Callable[..., tuple[Array, Caches]] | None
    retrieval: Callable[..., tuple[Array, Caches]] | None
    target: Callable[..., tuple[Array, Caches]]
    install: Callable[[Caches, Array, Array], Caches]
    vocab_size: int


def fit_vocabulary(logits: Float[Array, "B T W"], vocab_size: int) -> Float[Array, "B T V"]:
    """Cuts or pads logits to V ids: a draft may be padded differently from its target."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)


def of_models(
    target: Llama,
    draft: Llama | None,
    config: DecodeConfig,
    shapes: Shapes,
    prompt_lengths: Int[Array, "B"],
) -> Levels:
    """The levels of a target and, if there is one, a draft model."""
    model = target.config

    def rotation(positions: Array, width: int):
        return full.rotation(model, positions, width, prompt_lengths)

    def target_pass(caches: Caches, tokens: Array, committed: Array, counts: Array, step: Array):
        rotate = rotation(committed, tokens.shape[1])
        if caches.retrieval is None:
            attend = full.pass_over(
                rotate, committed, implementation=config.attention, block=shapes.attention_block
            )
            hidden, layers = target(tokens, caches.target.layers, attend)
            new = Caches(KVCache.of_layers(layers), None, caches.draft)
            return target.logits(hidden), new
        interval = config.refresh_interval
        refresh = step % interval == 0 if interval else step == 0
        attend = retrieval.verification(rotate, committed, counts, refresh, config, shapes)
        layers = retrieval.verify_layers(caches.target, caches.retrieval)
        hidden, layers = target(tokens, layers, attend)
        kv, selected = retrieval.of_verify_layers(layers, caches.retrieval.lengths)
        return target.logits(hidden), Caches(kv, selected, caches.draft)

    def install(caches: Caches, before: Array, after: Array) -> Caches:
        if caches.retrieval is None:
            return caches
        first_recent = retrieval.window_chunk(before, config)
        lengths = retrieval.valid_slots(after, first_recent, shapes)
        selected = dataclasses.replace(caches.retrieval, lengths=lengths)
        return Caches(caches.target, selected, caches.draft)

    def retrieval_pass(caches: Caches, tokens: Array, positions: Array, committed: Array):
        assert caches.retrieval is not None
        slots = caches.retrieval.lengths + positions - committed
        attend = full.pass_over(
            rotation(positions, tokens.shape[1]),
            slots,
            implementation=config.attention,
            block=shapes.retrieval_slots,
        )
        hidden, layers = target(tokens, caches.retrieval.kv.layers, attend)
        selected = dataclasses.replace(caches.retrieval, kv=KVCache.of_layers(layers))
        return target.logits(hidden), Caches(caches.target, selected, caches.draft)

    def draft_pass(caches: Caches, tokens: Array, positions: Array):
        assert draft is not None
        assert caches.draft is not None
        attend = streaming.decode_pass(draft.config, config, positions)
        hidden, layers = draft(tokens, caches.draft.layers, attend)
        logits = fit_vocabulary(draft.logits(hidden), model.vocab_size)
        return logits, Caches(caches.target, caches.retrieval, KVCache.of_layers(layers))

    return Levels(
        draft=draft_pass if draft is not None and config.uses_draft else None,
        retrieval=retrieval_pass if config.uses_retrieval else None,
        target=target_pass,
        install=install,
        vocab_size=model.vocab_size,
    )
