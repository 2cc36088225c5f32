"""The rejection step by hand-worked values."""

import jax.numpy as jnp
import numpy as np

from triforce_jax.decoding.rejection import rejection_step, residual

P = jnp.array([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]]])
Q = jnp.array([[[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]])


def step(proposals, counts, accept, token, p=P, q=Q):
    result = rejection_step(
        p,
        q,
        jnp.array([proposals], jnp.int32),
        jnp.array([counts], jnp.int32),
        jnp.array([accept], jnp.float32),
        jnp.array([token], jnp.float32),
    )
    return int(result.num_accepted[0]), int(result.token[0]), bool(result.all_accepted[0])


def test_all_accepted_takes_the_bonus():
    # p(1) / q(1) = 1 and 3: accepted whatever the coin.
    assert step([1, 1], 2, [0.999, 0.999], 0.0) == (2, 2, True)


def test_first_rejection_ends_it_and_the_residual_is_drawn():
    # p_2(0) / q_2(0) = 0.25.
    assert step([1, 0], 2, [0.5, 0.24], 0.0) == (2, 2, True)
    # residual of [.2, .3, .5] - [.8, .1, .1]: [0, 1/3, 2/3]
    assert step([1, 0], 2, [0.5, 0.26], 0.32) == (1, 1, False)
    assert step([1, 0], 2, [0.5, 0.26], 0.34) == (1, 2, False)
    # After a rejection nothing is accepted, though its own coin would.
    assert step([2, 1], 2, [0.0, 0.0], 0.9) == (0, 0, False)


def test_a_proposal_that_the_verifier_excludes_is_rejected_at_u_zero():
    assert step([2, 1], 2, [0.0, 0.0], 0.0)[0] == 0


def test_fewer_proposals_than_the_width():
    # Row of one: its next token is of p after one proposal; slot 2 is scratch.
    assert step([1, 1], 1, [0.5, 0.0], 0.9) == (1, 2, True)
    assert step([1, 1], 0, [0.5, 0.0], 0.6) == (0, 1, True)


def test_no_proposals_at_all():
    none = jnp.zeros((1, 0, 3))
    assert step([], 0, [], 0.6, p=P[:, :1], q=none) == (0, 1, True)


def test_equal_distributions_leave_no_residual():
    np.testing.assert_array_equal(residual(P[:, 0], P[:, 0]), P[:, 0])
    np.testing.assert_allclose(residual(P[:, 1], Q[:, 1]), [[0, 0.2, 0.4]], rtol=1e-6)


def test_rows_are_independent():
    rng = np.random.default_rng(0)
    b, x, v = 64, 4, 7
    p = rng.dirichlet(np.ones(v), (b, x + 1)).astype(np.float32)
    q = rng.dirichlet(np.ones(v), (b, x)).astype(np.float32)
    proposals = rng.integers(0, v, (b, x)).astype(np.int32)
    counts = rng.integers(0, x + 1, b).astype(np.int32)
    coins, last = rng.random((b, x)).astype(np.float32), rng.random(b).astype(np.float32)
    whole = rejection_step(*map(jnp.asarray, (p, q, proposals, counts, coins, last)))
    for i in range(b):
        one = (a[i : i + 1] for a in (p, q, proposals, counts, coins, last))
        alone = rejection_step(*map(jnp.asarray, one))
        for got, want in zip(whole, alone, strict=True):
            assert got[i] == want[0]
        assert whole.num_accepted[i] <= counts[i]
