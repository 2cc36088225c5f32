"""The sampling transform against HF's logits processors, and drawing from probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from triforce_jax.config import SamplingParams
from triforce_jax.decoding.sampling import (
    RowSampling,
    draw_token,
    keep_top_k,
    keep_top_p,
    probabilities,
)
from triforce_jax.errors import InputError

PARAMS = [
    SamplingParams(temperature=1.0, top_p=1.0),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(temperature=0.3, top_p=1.0, top_k=5),
    SamplingParams(temperature=0.8, top_p=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.1),
    SamplingParams(temperature=1.0, top_p=1.0, top_k=10**12),
    SamplingParams(temperature=1.0, top_p=1e-8),
]


def hf_probabilities(logits, params):
    """Temperature, top-k, top-p, min-p, in the order of HF `generate`."""
    scores = torch.tensor(logits)
    warpers = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1).numpy()


@pytest.mark.parametrize("vocab", [11, 1000, 50001])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_equals_hf_row_by_row(vocab, scale):
    rng = np.random.default_rng(vocab)
    logits = (scale * rng.normal(size=(len(PARAMS), 2, vocab))).astype(np.float32)
    got = np.asarray(jax.jit(probabilities)(logits, RowSampling.of(PARAMS)))
    for row, params in enumerate(PARAMS):
        want = hf_probabilities(logits[row], params)
        np.testing.assert_array_equal(got[row] > 0, want > 0, err_msg=str(params))
        np.testing.assert_allclose(got[row], want, rtol=2e-5, err_msg=str(params))


def one(logits, **params):
    fields = {"temperature": 1.0, "top_p": 1.0} | params
    rows = RowSampling.of([SamplingParams(**fields)])
    return np.asarray(probabilities(jnp.asarray(logits, jnp.float32)[None, None], rows))[0, 0]


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, {0, 3}),
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),  # ties: the lower ids, as many as are needed
        ([0.1, 0.45, 0.45], 0.4, {1}),
        ([0.1, 0.2, 0.7], 1e-8, {2}),
        ([0.1, 0.2, 0.7], 1.0, {0, 1, 2}),
        ([0.5, 0.5, 0.0], 0.9, {0, 1}),
    ],
)
def test_top_p_values(probs, top_p, kept):
    got = keep_top_p(jnp.asarray(probs, jnp.float32)[None, None], jnp.array([top_p]))[0, 0]
    assert set(np.flatnonzero(got)) == kept
    np.testing.assert_array_equal(got[jnp.array(sorted(kept))], np.float32(probs)[sorted(kept)])


def test_top_k_keeps_the_ties_of_the_last():
    probs = jnp.array([[[0.3, 0.2, 0.2, 0.2, 0.1]]])
    got = keep_top_k(probs, jnp.array([2]))[0, 0]
    np.testing.assert_allclose(got, np.array([3, 2, 2, 2, 0]) / 9, rtol=1e-6)
    np.testing.assert_array_equal(keep_top_k(probs, jnp.array([0])), probs)


def test_greedy_is_one_hot_and_takes_the_lowest_id():
    np.testing.assert_array_equal(one([1.0, 3.0, 3.0, -5.0], temperature=0.0), [0, 1, 0, 0])
    # The filters do not matter, nor do they break it.
    got = one([1.0, 3.0, 3.0], temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    np.testing.assert_array_equal(got, [0, 1, 0])


def test_temperature_comes_before_the_filters():
    logits = np.log([0.5, 0.3, 0.2])
    assert (one(logits, top_p=0.6) > 0).sum() == 2
    assert (one(logits, top_p=0.6, temperature=0.3) > 0).sum() == 1


def test_extreme_values():
    assert one([0.0, 1.0, -np.inf], temperature=1e-6)[1] == 1
    np.testing.assert_allclose(one([1e30, 1e30, -1e30], temperature=0.01), [0.5, 0.5, 0])
    # An id that no level may sample has a logit of -inf, through all filters.
    for params in ({"top_k": 2}, {"top_p": 0.999}, {"min_p": 0.001}):
        assert one([0.0, 0.0, -np.inf], **params)[2] == 0


def test_parameters_are_traced():
    import chex

    chex.clear_trace_counter()
    run = jax.jit(chex.assert_max_traces(probabilities, n=1))
    logits = jnp.zeros((1, 1, 7))
    for params in PARAMS:
        run(logits, RowSampling.of([params]))


@pytest.mark.parametrize("vocab", [1, 2, 5, 100, 1023])
def test_draw_inverts_the_cumulative_sum(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.random(vocab) * (rng.random(vocab) < 0.7)
    weights[rng.integers(vocab)] = 0.5
    ends = np.cumsum(weights) / weights.sum()
    uniforms = (np.arange(4000) + 0.5) / 4000
    got = draw_token(
        jnp.tile(jnp.asarray(weights, jnp.float32), (4000, 1)), jnp.asarray(uniforms, jnp.float32)
    )
    want = np.searchsorted(ends, uniforms, side="right")
    assert (weights[got] > 0).all()
    close = np.abs(ends[:, None] - uniforms).min(0) < 1e-6  # float32 may fall on either side
    np.testing.assert_array_equal(np.asarray(got)[~close], want[~close])


def test_a_token_of_no_weight_is_never_drawn():
    weights = np.zeros((3, 50), np.float32)
    weights[0, 0], weights[1, 49], weights[2, 25] = 1e-30, 1e-30, 1.0
    for uniform in (0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))):
        got = draw_token(jnp.asarray(weights), jnp.full((3,), uniform))
        np.testing.assert_array_equal(got, [0, 49, 25])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"top_k": -1},
        {"top_k": 1.5},
        {"max_new_tokens": -1},
        {"max_new_tokens": True},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop": [3]},
    ],
)
def test_bad_parameters_are_named(params):
    (name,) = params
    with pytest.raises(InputError, match=f"^{name}: got ") as error:
        SamplingParams(**params)
    assert "\n" not in str(error.value)


def test_numpy_numbers_are_numbers():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(1))
    assert RowSampling.of([params]).top_k.tolist() == [3]
    assert SamplingParams(stop="\n").stop == ("\n",)
