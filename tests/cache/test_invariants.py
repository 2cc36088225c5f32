"""After any sequence of accepted and rejected candidates, every cache equals a fresh build.

The passes of real (random) models run on made-up candidates, with made-up decisions; what the
levels can see afterwards must be what a prefill of the tokens that stayed would have built.
"""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from triforce_jax.cache import retrieval, streaming
from triforce_jax.decoding import prefill
from triforce_jax.decoding.levels import of_models

CONFIG = dataclasses.replace(tiny.DECODE, max_length=160, batch_size=2, gamma=4, draft_gamma=2)
# Keys of these models are as large as 12: this is 1e-5 of that.
ATOL = 1.2e-4


class Rig:
    """Passes of one pair of models, jitted by width."""

    def __init__(self, config):
        self.config = config
        self.target, self.draft = tiny.llama(), tiny.llama(tiny.DRAFT, seed=1)
        self.engine = tiny.engine(
            config.method, config=config, target=self.target, draft=self.draft
        )
        self.programs, self.shapes = self.engine.programs, self.engine.programs.shapes
        self.models = [nnx.split(m) for m in (self.target, self.draft)]
        self.passes = {
            name: jax.jit(functools.partial(self._run, name), donate_argnums=1)
            for name in ("draft", "retrieval", "target")
        }
        self.install = jax.jit(functools.partial(self._run, "install"))

    def _run(self, name, weights, caches, *args):
        target, draft = (
            nnx.merge(definition, w)
            for (definition, _), w in zip(self.models, weights, strict=True)
        )
        lengths = jnp.ones((self.config.batch_size,), jnp.int32)
        levels = of_models(target, draft, self.config, self.shapes, lengths)
        return getattr(levels, name)(caches, *args)

    @property
    def weights(self):
        return tuple(state for _, state in self.models)

    def prefilled(self, rows):
        """Caches and history after all but the last token of each row."""
        state = self.engine.prefill([tiny.row(row) for row in rows])
        return state.caches


@functools.cache
def rig(method, scoring="mean_key", refresh_interval=1):
    return Rig(
        dataclasses.replace(
            CONFIG, method=method, scoring=scoring, refresh_interval=refresh_interval
        )
    )


def events():
    """Steps: for each row how many of the candidates are accepted; the first steps always few."""
    accepted = st.tuples(st.integers(0, 5), st.integers(0, 5))
    return st.lists(accepted, min_size=1, max_size=9)


def play(some, prompts, steps, seed):
    """Feeds candidates to all levels as decoding does; returns caches and what tokens stayed."""
    rng = np.random.default_rng(seed)
    shapes, config = some.shapes, some.config
    rows = [list(p) for p in prompts]
    caches = some.prefilled(rows)
    lengths = np.array([len(r) - 1 for r in rows], np.int32)
    for number, accepted in enumerate(steps):
        count = 0 if number == 0 else shapes.candidates
        candidates = rng.integers(0, 61, (2, shapes.target_width)).astype(np.int32)
        history = np.zeros((2, lengths.max() + 1 + shapes.target_width), np.int32)
        for b, row in enumerate(rows):
            history[b, : len(row)] = row
            history[b, len(row) : len(row) + count] = candidates[b, :count]
        if count:
            # The draft's first pass feeds its newest tokens again; then one by one.
            for i in range(count):
                last = lengths + i
                first = np.maximum(last + 1 - shapes.draft_feed, 0).astype(np.int32)
                feed = np.stack(
                    [history[b, f : f + shapes.draft_feed] for b, f in enumerate(first)]
                )
                _, caches = some.passes["draft"](some.weights, caches, feed, first)
            if config.uses_retrieval:
                for i in range(0, count - 1, shapes.retrieval_width):
                    at = (lengths + i).astype(np.int32)
                    feed = np.stack(
                        [history[b, a : a + shapes.retrieval_width] for b, a in enumerate(at)]
                    )
                    _, caches = some.passes["retrieval"](some.weights, caches, feed, at, lengths)
        feed = np.stack([history[b, n : n + shapes.target_width] for b, n in enumerate(lengths)])
        counts = np.full((2,), count + 1, np.int32)
        logits, caches = some.passes["target"](
            some.weights, caches, feed, lengths, counts, np.int32(number)
        )
        before = lengths
        for b, row in enumerate(rows):
            taken = min(accepted[b], count)
            row += [*candidates[b, :taken].tolist(), int(rng.integers(61))]
        # A new array: JAX may still be reading the old one.
        lengths = np.array([len(row) - 1 for row in rows], np.int32)
        caches = some.install(some.weights, caches, before, lengths)
        caches = jax.tree.map(jnp.copy, caches)  # the next passes donate them
    return caches, rows, before, np.asarray(logits)


def check_target(some, caches, rows):
    fresh = rig(some.config.method).prefilled(rows)
    for got, want in zip(
        (*caches.target.keys, *caches.target.values),
        (*fresh.target.keys, *fresh.target.values),
        strict=True,
    ):
        for b, row in enumerate(rows):
            n = len(row) - 1
            np.testing.assert_allclose(got[b, :, :n], want[b, :, :n], atol=ATOL)


def check_draft(some, caches, rows):
    """What is in the ring by position, as far as a query can still see it."""
    fresh = rig(some.config.method).prefilled(rows)
    config = some.config
    slots = caches.draft.keys[0].shape[2]
    written = jnp.array([len(r) - 1 for r in rows])
    # Rejected candidates may have been written behind; their slots hold no older position that
    # is still needed.
    held = np.asarray(streaming.slot_positions(written, slots, config.draft_sinks))
    window = config.draft_budget - config.draft_sinks
    for b, row in enumerate(rows):
        newest = len(row) - 1
        # The tokens fed again by the next pass need not be there yet.
        known = newest - some.shapes.draft_feed
        wanted = [
            s
            for s, p in enumerate(held[b])
            if 0 <= p <= known and (p < config.draft_sinks or p > newest - window)
        ]
        for got, want in zip(
            (*caches.draft.keys, *caches.draft.values),
            (*fresh.draft.keys, *fresh.draft.values),
            strict=True,
        ):
            np.testing.assert_allclose(got[b][:, wanted], want[b][:, wanted], atol=ATOL)


def check_retrieval(some, caches, rows, before):
    """The compact buffer is made of chunks of the full cache, at the places that ids say."""
    config, shapes = some.config, some.shapes
    first = retrieval.window_chunk(jnp.asarray(before), config)
    lengths = jnp.array([len(r) - 1 for r in rows])
    valid = retrieval.valid_slots(lengths, first, shapes)
    np.testing.assert_array_equal(caches.retrieval.lengths, valid)
    size = config.chunk_size
    for layer, ids in enumerate(caches.retrieval.chunk_ids):
        for b in range(2):
            selected = min(int(first[b]), shapes.selected_chunks)
            recent = np.arange(int(first[b]) * size, int(lengths[b]))
            for k in range(ids.shape[1]):
                chosen = np.asarray(ids[b, k, :selected])
                assert len(set(chosen.tolist())) == selected
                assert selected == 0 or chosen[0] == 0
                assert (chosen < int(first[b])).all()
                slots = (chosen[:, None] * size + np.arange(size)).ravel()
                slots = np.concatenate([slots, recent])
                assert len(slots) == int(valid[b])
                for buffers, compact in (
                    (caches.target.keys, caches.retrieval.kv.keys),
                    (caches.target.values, caches.retrieval.kv.values),
                ):
                    want = np.asarray(buffers[layer])[b, k, slots]
                    got = np.asarray(compact[layer])[b, k, : len(slots)]
                    np.testing.assert_array_equal(got, want)
            if caches.retrieval.chunk_means:
                got = caches.retrieval.chunk_means[layer][b, :, : int(first[b])]
                keys = caches.target.keys[layer][b : b + 1, :, : int(first[b]) * size]
                want = retrieval.means_of(keys, size)[0]
                np.testing.assert_allclose(got, want, atol=ATOL)


PROMPTS = st.tuples(st.integers(1, 90), st.integers(1, 90))


@pytest.mark.parametrize(
    ("method", "scoring", "refresh"),
    [
        ("triforce", "mean_key", 1),
        ("triforce", "mean_key", 0),
        ("triforce", "mean_key", 3),
        ("triforce", "attention_mass", 1),
        ("draft", "mean_key", 1),
    ],
)
@hypothesis.settings(max_examples=8)
@hypothesis.given(lengths=PROMPTS, steps=events(), seed=st.integers(0, 3))
def test_caches_equal_a_fresh_build(method, scoring, refresh, lengths, steps, seed):
    some = rig(method, scoring, refresh)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 61, n).tolist() for n in lengths]
    caches, rows, before, _ = play(some, prompts, steps, seed)
    check_target(some, caches, rows)
    check_draft(some, caches, rows)
    if some.config.uses_retrieval:
        check_retrieval(some, caches, rows, before)


@hypothesis.settings(max_examples=30)
@hypothesis.given(written=st.integers(0, 400), ring=st.integers(1, 40), sinks=st.integers(0, 7))
def test_ring_positions(written, ring, sinks):
    """Against writing positions one after the other."""
    slots = [-1] * (sinks + ring)
    for p in range(written):
        slots[p if p < sinks else sinks + (p - sinks) % ring] = p
    got = streaming.slot_positions(jnp.array([written]), sinks + ring, sinks)[0].tolist()
    assert got == slots


def dense_streaming(model, config, tokens):
    """StreamingLLM by the definition: every token sees the sinks and its window, nothing else.

    A full forward pass, in which query t gives key s the rotation of their cache positions.
    """
    from triforce_jax.attention import reference
    from triforce_jax.models.rope import rope_tables, rotate

    n, c = len(tokens), model.config
    capacity, sinks = config.draft_budget, config.draft_sinks

    def attend(q, k, v, kv):
        out = []
        for t in range(n):
            seen = [s for s in range(t + 1) if s < sinks or t - s < capacity - sinks]
            places = jnp.arange(len(seen))[None]  # by position in the cache
            cos, sin = rope_tables(c.rope, c.head_dim, places, jnp.array([0]))
            keys = rotate(k[:, jnp.array(seen)], cos[:, :, None], sin[:, :, None])
            query = rotate(q[:, t : t + 1], cos[:, -1:, None], sin[:, -1:, None])
            got, _ = reference.attend(
                query,
                keys.transpose(0, 2, 1, 3),
                v[:, jnp.array(seen)].transpose(0, 2, 1, 3),
                jnp.array([len(seen) - 1]),
            )
            out.append(got)
        return jnp.concatenate(out, axis=1), kv

    hidden, _ = model(jnp.asarray([tokens]), (None,) * c.num_layers, attend)
    return np.asarray(model.logits(hidden))[0]


def test_draft_sees_what_streamingllm_defines():
    model = tiny.llama(dataclasses.replace(tiny.DRAFT, num_layers=2), seed=3)
    config = dataclasses.replace(CONFIG, method="draft", batch_size=1)
    tokens = np.random.default_rng(0).integers(0, 61, 60).tolist()
    want = dense_streaming(model, config, tokens)
    slots = config.draft_sinks + tiny.engine("draft", config=config).programs.shapes.ring_slots
    from triforce_jax.cache import full

    cache = full.empty(model.config, 1, slots, jnp.float32)
    one = jax.jit(lambda layers, token, at: _decode_one(model, config, layers, token, at))
    # Prefill of 30, then token by token.
    cache = prefill.prefill_draft(
        model, config, cache, jnp.asarray([tokens[:30]]), jnp.int32(0), jnp.array([30])
    )
    layers = cache.layers
    for at in range(30, 60):
        logits, layers = one(layers, jnp.asarray([[tokens[at]]]), jnp.array([at]))
        np.testing.assert_allclose(logits[0, 0], want[at], atol=1e-4)


def _decode_one(model, config, layers, token, at):
    attend = streaming.decode_pass(model.config, config, at)
    hidden, layers = model(token, layers, attend)
    return model.logits(hidden), layers
