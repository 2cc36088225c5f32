"""Decode configurations and the sizes that follow."""

import dataclasses

import pytest

from triforce_jax.config import METHODS, DecodeConfig
from triforce_jax.errors import InputError
from triforce_jax.shapes import Shapes


@pytest.mark.parametrize(
    "change",
    [
        {"method": "magic"},
        {"scoring": "luck"},
        {"gamma": 0},
        {"gamma": 2.5},
        {"gamma": True},
        {"gamma": "6"},
        {"draft_gamma": 0},
        {"max_length": 0},
        {"batch_size": -1},
        {"budget": 4097},
        {"budget": 64},
        {"recent_window": 63},
        {"chunk_size": 0},
        {"refresh_interval": -1},
        {"draft_sinks": 256},
        {"draft_budget": 0},
        {"ngram": 0},
        {"prefill_chunk": 0},
    ],
)
def test_bad_values_are_named(change):
    (name,) = change
    with pytest.raises(InputError, match=f"^{name}: got ") as error:
        DecodeConfig(**change)
    assert "\n" not in str(error.value)


def test_budget_says_what_to_try():
    with pytest.raises(InputError, match="multiple of chunk_size \\(8\\); try 1008"):
        DecodeConfig(budget=1001)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gamma", [1, 6, 16, 40])
@pytest.mark.parametrize("draft_gamma", [1, 5])
@pytest.mark.parametrize("max_length", [1, 7, 1000, 131072])
@pytest.mark.parametrize(("chunk", "window", "budget"), [(1, 1, 2), (8, 64, 4096), (24, 48, 96)])
def test_every_buffer_holds_what_is_written_to_it(
    method, gamma, draft_gamma, max_length, chunk, window, budget
):
    config = DecodeConfig(
        method=method,
        gamma=gamma,
        draft_gamma=draft_gamma,
        max_length=max_length,
        chunk_size=chunk,
        recent_window=window,
        budget=budget,
    )
    s = Shapes.of(config)
    # The last verification starts at max_length - 1 at most; the last prefill pass may overhang.
    assert s.full_slots >= max_length - 1 + s.target_width
    assert s.full_slots % chunk == s.full_slots % s.attention_block == 0
    assert s.attention_block % chunk == s.prefill_small % chunk == 0
    assert s.prefill_chunk % s.prefill_small == 0
    assert s.full_slots >= -(-max_length // s.prefill_small) * s.prefill_small
    assert s.num_chunks * chunk == s.full_slots
    # Compact buffer: selected chunks, a window that starts up to a chunk early, one step's
    # accepted tokens, and the candidates of the rounds after it.
    newest = window + chunk - 1 + s.target_width + s.candidates + s.retrieval_width
    assert s.retrieval_slots >= s.selected_chunks * chunk + newest
    assert s.retrieval_slots % chunk == 0
    assert s.selected_chunks <= s.num_chunks
    # A step's tokens and proposals must not evict what the window still shows.
    window_slots = config.draft_budget - config.draft_sinks
    assert s.ring_slots >= window_slots + s.target_width + s.draft_proposals
    # History: candidates behind the known tokens, and slices of full width near the end.
    assert s.token_slots >= max_length + s.candidates + s.retrieval_width + s.draft_feed


def test_gamma_16_needs_no_slack_by_hand():
    small, large = (Shapes.of(DecodeConfig(gamma=g)) for g in (6, 16))
    assert large.target_width == small.target_width + 10 == 18
    assert large.retrieval_slots >= small.retrieval_slots + 20
    config = DecodeConfig(gamma=16)
    assert config.uses_draft
    assert config.uses_retrieval
    assert not dataclasses.replace(config, method="draft").uses_retrieval
