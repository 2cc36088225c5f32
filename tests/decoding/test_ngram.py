"""The n-gram draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triforce_jax.decoding.ngram import look_up


def propose(tokens, longest=3, count=3, pad=5):
    history = jnp.array([list(tokens) + [9] * pad])
    return look_up(history, jnp.array([len(tokens) - 1]), longest, count)[0].tolist()


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),
        ([1, 2, 3, 7, 4, 2, 3, 8, 4, 1, 2, 3], [7, 4, 2]),  # the longest match wins ...
        ([2, 3, 7, 0, 2, 3, 8, 0, 2, 3], [8, 0, 2]),  # ... then the newest
        ([5, 1, 2, 1, 2], [1, 2, 1]),  # a match that runs into the end goes round
        ([1, 2, 3], [3, 3, 3]),  # no match
        ([4], [4, 4, 4]),
        ([4, 4, 4], [4, 4, 4]),
        ([9, 1], [1, 1, 1]),  # what lies behind the last token is not looked at
    ],
)
def test_values(tokens, want):
    assert propose(tokens) == want


def test_longest_is_a_limit():
    tokens = [1, 2, 3, 7, 4, 9, 3, 8, 4, 1, 2, 3]
    assert propose(tokens, longest=3, count=1) == [7]
    assert propose(tokens, longest=1, count=1) == [8]


def test_rows_of_different_lengths():
    history = np.full((2, 12), 3, np.int32)
    history[0, :5] = [1, 2, 5, 1, 2]
    history[1, :8] = [7, 7, 1, 2, 6, 0, 1, 2]
    got = jax.jit(look_up, static_argnums=(2, 3))(history, np.array([4, 7]), 2, 2)
    np.testing.assert_array_equal(got, [[5, 1], [6, 0]])
