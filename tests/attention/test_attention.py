"""Attention against PyTorch, and every implementation against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from triforce_jax.attention.dispatch import attend
from triforce_jax.errors import InputError


def arrays(batch, queries, kv_heads, group, slots, head_dim, seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (batch, kv_heads, slots, head_dim)
    q = jax.random.normal(keys[0], (batch, queries, kv_heads * group, head_dim), dtype)
    return q, jax.random.normal(keys[1], shape, dtype), jax.random.normal(keys[2], shape, dtype)


def torch_attention(q, keys, values, lengths):
    """Row by row, with nothing of ours in it."""
    out = np.zeros(q.shape, np.float32)
    queries, group = q.shape[1], q.shape[2] // keys.shape[1]
    for b, length in enumerate(lengths):
        total = length + queries
        mask = torch.ones(queries, total).tril(diagonal=length).bool()
        k = torch.tensor(np.array(keys[b, :, :total])).repeat_interleave(group, 0)
        v = torch.tensor(np.array(values[b, :, :total])).repeat_interleave(group, 0)
        one = torch.tensor(np.array(q[b])).transpose(0, 1)
        got = torch.nn.functional.scaled_dot_product_attention(one, k, v, attn_mask=mask)
        out[b] = got.transpose(0, 1).numpy()
    return out


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "auto"])
@pytest.mark.parametrize("queries", [1, 2, 7, 64])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_equals_pytorch(implementation, queries, group):
    q, keys, values = arrays(3, queries, 2, group, 384, 16)
    lengths = np.array([0, 5, 384 - queries])
    got, mass = attend(
        q, keys, values, jnp.asarray(lengths), implementation=implementation, block=32
    )
    assert mass is None
    np.testing.assert_allclose(got, torch_attention(q, keys, values, lengths), atol=2e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_head_dims_and_bfloat16(head_dim):
    q, keys, values = arrays(2, 4, 1, 2, 128, head_dim, dtype=jnp.bfloat16)
    lengths = np.array([3, 100])
    got, _ = attend(q, keys, values, jnp.asarray(lengths), implementation="blockwise", block=32)
    assert got.dtype == jnp.bfloat16
    wide = [np.asarray(x, np.float32) for x in (q, keys, values)]
    np.testing.assert_allclose(
        np.asarray(got, np.float32), torch_attention(*wide, lengths), atol=0.03
    )


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_mass_is_the_probability_of_each_chunk(implementation):
    q, keys, values = arrays(2, 3, 2, 2, 64, 8)
    lengths, counts = jnp.array([10, 50]), jnp.array([1, 3])
    _, mass = attend(
        q,
        keys,
        values,
        lengths,
        implementation=implementation,
        block=16,
        mass_chunk=4,
        mass_queries=counts,
    )
    np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-6)
    scores = np.einsum("btkgh,bksh->bkgts", np.asarray(q).reshape(2, 3, 2, 2, 8), keys) / 8**0.5
    for b in range(2):
        want = np.zeros((2, 16))
        for t in range(int(counts[b])):
            end = int(lengths[b]) + t + 1
            probs = np.exp(scores[b, :, :, t, :end])
            probs /= probs.sum(-1, keepdims=True)
            probs = np.pad(probs, ((0, 0), (0, 0), (0, 64 - end)))
            want += probs.reshape(2, 2, 16, 4).sum(-1).mean(1) / int(counts[b])
        np.testing.assert_allclose(mass[b], want, atol=1e-6)


def test_nothing_past_the_longest_row_is_read():
    """Not even a NaN there: the loop ends before it, and inside a block the mask hides it."""
    q, keys, values = arrays(2, 2, 1, 2, 256, 8)
    lengths = jnp.array([3, 61])
    want, _ = attend(q, keys, values, lengths, implementation="blockwise", block=32)
    poisoned = [x.at[:, :, 64:].set(jnp.nan) for x in (keys, values)]
    got, _ = attend(q, *poisoned, lengths, implementation="blockwise", block=32)
    np.testing.assert_array_equal(got, want)


def test_large_scores_do_not_overflow():
    q, keys, values = arrays(1, 2, 1, 1, 64, 8)
    got, _ = attend(
        q * 1e4, keys * 1e4, values, jnp.array([50]), implementation="blockwise", block=16
    )
    assert np.isfinite(got).all()


def test_unknown_implementation():
    with pytest.raises(InputError, match="attention"):
        attend(*arrays(1, 1, 1, 1, 8, 4), jnp.array([0]), implementation="magic")
