"""Writing into the full cache."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from triforce_jax.cache import full


@pytest.mark.parametrize("batch", [1, 3])
def test_write_puts_each_row_at_its_own_slot(batch):
    rng = np.random.default_rng(0)
    buffer = rng.normal(size=(batch, 2, 20, 4)).astype(np.float32)
    new = rng.normal(size=(batch, 3, 2, 4)).astype(np.float32)
    slots = np.array([5, 0, 17][:batch])
    got = full.write(jnp.asarray(buffer), jnp.asarray(new), jnp.asarray(slots))
    want = buffer.copy()
    for b in range(batch):
        for t in range(3):
            want[b, :, slots[b] + t] = new[b, t]
    np.testing.assert_array_equal(got, want)


def test_empty_has_one_buffer_a_layer_in_its_dtype():
    cache = full.empty(tiny.MODEL, 3, 40, jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == tiny.MODEL.num_layers
    assert {(x.shape, x.dtype) for x in cache.keys} == {((3, 2, 40, 8), jnp.dtype(jnp.bfloat16))}
    again = full.KVCache.of_layers(cache.layers)
    assert all(a is b for a, b in zip(again.keys, cache.keys, strict=True))
