"""Selection and the compact buffer, against loops in NumPy."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from triforce_jax.cache import retrieval
from triforce_jax.config import DecodeConfig
from triforce_jax.shapes import Shapes

CONFIG = DecodeConfig(
    method="retrieval",
    max_length=200,
    gamma=3,
    budget=40,
    chunk_size=4,
    recent_window=12,
    prefill_chunk=64,
)
SHAPES = Shapes.of(CONFIG)


def test_the_budget_holds_the_selection_and_the_window():
    assert SHAPES.selected_chunks * CONFIG.chunk_size + CONFIG.recent_window == CONFIG.budget


def test_scores_are_query_times_mean_key_max_over_the_group():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 6, 8)).astype(np.float32)
    keys = rng.normal(size=(2, 3, 40, 8)).astype(np.float32)
    means = retrieval.means_of(jnp.asarray(keys), 4)
    got = retrieval.mean_key_scores(jnp.asarray(query), means)
    for b in range(2):
        for k in range(3):
            for c in range(10):
                mean = keys[b, k, 4 * c : 4 * c + 4].mean(0)
                want = max(query[b, 2 * k + g] @ mean for g in range(2))
                np.testing.assert_allclose(got[b, k, c], want, rtol=1e-4, atol=1e-5)


def test_selection_takes_chunk_0_then_the_best_before_the_window():
    scores = jnp.array([[[-5.0, 1.0, 4.0, 2.0, 9.0, 9.5, 3.0]]])
    assert retrieval.select(scores, jnp.array([5]), 3).tolist() == [[[0, 4, 2]]]
    assert retrieval.select(scores, jnp.array([7]), 3).tolist() == [[[0, 5, 4]]]
    # Fewer chunks than places: the places past them are the chunks to come.
    assert retrieval.select(scores, jnp.array([2]), 4).tolist() == [[[0, 1, 2, 3]]]
    assert retrieval.select(scores, jnp.array([0]), 3).tolist() == [[[0, 1, 2]]]


def test_nan_and_minus_infinity_scores_do_not_reach_past_the_window():
    scores = jnp.full((1, 1, 9), -jnp.inf)
    ids = retrieval.select(scores, jnp.array([5]), 3)[0, 0].tolist()
    assert ids[0] == 0
    assert max(ids) < 5


@hypothesis.given(length=st.integers(0, 195), accepted=st.integers(1, 4), seed=st.integers(0, 9))
def test_compact_buffer_holds_selection_window_and_scratch(length, accepted, seed):
    """What the level reads after a commit: the selected chunks, then everything newer."""
    rng = np.random.default_rng(seed)
    lengths = jnp.array([length])
    first = retrieval.window_chunk(lengths, CONFIG)
    # The window: at least `recent_window` of the tokens so far, from a chunk's border on.
    start = int(first[0]) * 4
    assert max(length + 1 - 12 - 3, 0) <= start <= max(length + 1 - 12, 0)
    buffer = np.arange(SHAPES.full_slots, dtype=np.float32)[None, None, :, None]
    scores = jnp.asarray(rng.normal(size=(1, 1, SHAPES.num_chunks)), jnp.float32)
    ids = retrieval.select(scores, first, SHAPES.selected_chunks)
    compact = retrieval.gather(jnp.asarray(buffer), ids, first, SHAPES)[0, 0, :, 0]
    after = length + accepted
    valid = int(retrieval.valid_slots(jnp.array([after]), first, SHAPES)[0])
    held = compact[:valid].astype(int).tolist()
    selected = min(int(first[0]), SHAPES.selected_chunks)
    chosen = ids[0, 0, :selected].tolist()
    want = [4 * c + i for c in chosen for i in range(4)] + list(range(start, after))
    assert held == want
    assert len(set(held)) == len(held)  # nothing twice
    if after <= CONFIG.budget - 4:
        assert sorted(held) == list(range(after))  # a short row is there entirely
    # Room for the candidates of the next step, and they too are in the window's order.
    room = SHAPES.candidates + SHAPES.retrieval_width
    assert valid + room <= SHAPES.retrieval_slots


@pytest.mark.parametrize("scoring", ["mean_key", "attention_mass"])
def test_means_are_kept_only_where_needed(scoring):
    import tiny

    config = dataclasses.replace(CONFIG, scoring=scoring)
    cache = retrieval.empty(tiny.MODEL, config, SHAPES, jnp.float32)
    assert len(cache.chunk_means) == (2 if scoring == "mean_key" else 0)
    assert len(cache.chunk_ids) == 2


def test_renewed_means_are_those_of_the_chunks_before_the_window():
    rng = np.random.default_rng(1)
    keys = jnp.asarray(rng.normal(size=(2, 2, SHAPES.full_slots, 8)), jnp.float32)
    stale = jnp.zeros((2, 2, SHAPES.num_chunks, 8))
    first = jnp.array([0, 20])
    got = retrieval.renew_means(stale, keys, first, SHAPES)
    want = retrieval.means_of(keys, 4)
    count = SHAPES.updated_chunks
    np.testing.assert_allclose(got[1, :, 20 - count : 20], want[1, :, 20 - count : 20], atol=1e-6)
    np.testing.assert_array_equal(got[1, :, : 20 - count], 0)
    np.testing.assert_array_equal(got[:, :, 20:], 0)
