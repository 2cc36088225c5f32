"""Temperature 0, float32: every method, and HF `generate`, give the same tokens."""

import dataclasses

import hf
import numpy as np
import pytest
import tiny

from triforce_jax import checkpoint
from triforce_jax.config import METHODS
from triforce_jax.decoding.programs import Programs
from triforce_jax.engine import Engine

# name: method, whether the draft is a model, changes of tiny.DECODE.
WAYS = {
    "autoregressive": ("autoregressive", False, {}),
    "retrieval": ("retrieval", False, {}),
    "retrieval, never refreshed": ("retrieval", False, {"refresh_interval": 0}),
    "retrieval, every third": ("retrieval", False, {"refresh_interval": 3}),
    "retrieval by mass": ("retrieval", False, {"scoring": "attention_mass"}),
    "draft": ("draft", True, {}),
    "draft n-gram": ("draft", False, {}),
    "draft, no sinks": ("draft", True, {"draft_sinks": 0}),
    "triforce": ("triforce", True, {}),
    "triforce n-gram": ("triforce", False, {}),
    "triforce, long proposals": ("triforce", True, {"draft_gamma": 4, "gamma": 5}),
    "triforce, gamma 1": ("triforce", True, {"gamma": 1}),
    "triforce, gamma 16": ("triforce", True, {"gamma": 16, "refresh_interval": 2}),
    "triforce, reference attention": ("triforce", True, {"attention": "reference"}),
    "triforce, chunk 1": ("triforce", True, {"chunk_size": 1, "budget": 12}),
}
LENGTHS = (1, 2, 7, 8, 33, 64, 65, 150)  # some not a multiple of anything, some below the budget


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """HF's random model, ours with the same weights, and an unrelated draft."""
    theirs = hf.model(seed=11)
    directory = hf.save(theirs, tmp_path_factory.mktemp("model"))
    ours = checkpoint.load(directory, dtype="float32").model
    return theirs, ours, tiny.llama(dataclasses.replace(tiny.DRAFT, max_position=512), seed=12)


@pytest.fixture(scope="module")
def expected(models):
    """Prompts and what HF generates."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in LENGTHS]
    return prompts, [hf.greedy(models[0], p, 40) for p in prompts]


def engine(models, way, **changes):
    method, drafts, fields = WAYS[way]
    _, target, draft = models
    config = dataclasses.replace(tiny.DECODE, method=method, **(fields | changes))
    return Engine(Programs(target, draft if drafts else None, config), progress=False)


@pytest.mark.parametrize("way", WAYS)
def test_one_row_at_a_time(models, expected, way):
    one = engine(models, way)
    for prompt, want in zip(*expected, strict=True):
        result = tiny.decode(one, [tiny.row(prompt, max_new_tokens=40)])
        assert result.token_ids == [want], len(prompt)
        assert result.finish_reasons == ["length"]
        check_counts(way, result)
    # Every token of an output in turn is made the EOS: each place of a block is hit.
    prompt, want = expected[0][5], expected[1][5]
    for eos in dict.fromkeys(want[:12]):
        result = tiny.decode(one, [tiny.row(prompt, eos_ids=(60, eos), max_new_tokens=40)])
        end = min(want.index(e) for e in (60, eos) if e in want)
        assert result.token_ids == [want[: end + 1]]
        assert result.finish_reasons == ["eos"]


def check_counts(way, result):
    """The counters of a whole output of 40 tokens agree with each other."""
    stats, origins = result.stats, result.origins[0]
    assert len(origins) == 40
    corrected = origins.count("target") + origins.count("bonus")
    # Each pass accepts some candidates and emits one token of its own, but the last may be cut.
    assert 0 <= stats.target_passes - corrected <= 1
    assert 40 - stats.target_passes <= stats.target_accepted <= stats.target_proposed
    assert stats.retrieval_accepted <= stats.retrieval_proposed
    if WAYS[way][0] == "autoregressive":
        assert stats.target_passes == 40
        assert set(origins) == {"target"}


@pytest.mark.parametrize("way", WAYS)
def test_ragged_batches(models, expected, way):
    four = engine(models, way, batch_size=4)
    prompts, want = expected
    for start in (0, 4):
        rows = [
            tiny.row(p, max_new_tokens=40 - 7 * i)  # they end one by one
            for i, p in enumerate(prompts[start : start + 4])
        ]
        result = tiny.decode(four, rows)
        assert result.token_ids == [w[: 40 - 7 * i] for i, w in enumerate(want[start : start + 4])]
    # Fewer rows than the batch holds.
    result = tiny.decode(four, [tiny.row(prompts[4], max_new_tokens=9)])
    assert result.token_ids == [want[4][:9]]


@pytest.mark.parametrize("way", ["autoregressive", "retrieval", "draft", "triforce"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 300])
def test_exactly_max_new_tokens(models, way, count):
    """gamma is 3 and the budget 32: 0, 1, gamma - 1, gamma, gamma + 1, and beyond the budget."""
    theirs, *_ = models
    one = engine(models, way, max_length=310)
    result = tiny.decode(one, [tiny.row([5, 6, 7], max_new_tokens=count)])
    assert len(result.token_ids[0]) == count
    if count:
        assert result.token_ids[0] == hf.greedy(theirs, [5, 6, 7], count)
    assert result.finish_reasons == ["length"]


def test_eos_of_one_row_changes_no_other(models, expected):
    prompts, wants = expected
    four = engine(models, "triforce", batch_size=4)
    rows = [tiny.row(p, max_new_tokens=40) for p in prompts[:4]]
    rows[1] = tiny.row(prompts[1], eos_ids=(wants[1][4],), max_new_tokens=40)
    result = tiny.decode(four, rows)
    cut = wants[1].index(wants[1][4]) + 1
    assert result.token_ids == [wants[0], wants[1][:cut], *wants[2:4]]
    assert result.finish_reasons == ["length", "eos", "length", "length"]


def test_eos_on_the_last_token_is_eos(models, expected):
    prompts, wants = expected
    eos = wants[0][9]
    place = wants[0].index(eos)
    one = engine(models, "triforce")
    row = tiny.row(prompts[0], eos_ids=(eos,), max_new_tokens=place + 1)
    result = tiny.decode(one, [row])
    assert (result.token_ids, result.finish_reasons) == ([wants[0][: place + 1]], ["eos"])


@pytest.mark.parametrize("way", ["retrieval", "triforce", "triforce n-gram", "draft"])
def test_a_perfect_draft_is_always_accepted(models, expected, way):
    """The target drafts for itself; with the whole context in budget, so does retrieval."""
    prompts, wants = expected
    _, target, _ = models
    method, drafts, _ = WAYS[way]
    config = dataclasses.replace(
        tiny.DECODE, method=method, budget=256, draft_budget=256, draft_gamma=2
    )
    one = Engine(Programs(target, target if drafts else None, config), progress=False)
    result = tiny.decode(one, [tiny.row(prompts[6], max_new_tokens=40)])
    assert result.token_ids == [wants[6]]
    assert result.stats.target_accepted == result.stats.target_proposed > 0
    if way == "triforce":
        assert result.stats.retrieval_accepted == result.stats.retrieval_proposed > 0
        assert {"draft", "retrieval", "bonus"} <= set(result.origins[0])


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 30}


@pytest.mark.parametrize("way", ["autoregressive", "retrieval", "draft", "triforce"])
def test_a_seed_decides_whatever_the_neighbours_and_blocks(models, expected, way):
    prompts, _ = expected
    one, four = engine(models, way), engine(models, way, batch_size=4)
    row = tiny.row(prompts[4], seed=123456789012, **SAMPLED)
    alone = tiny.decode(one, [row]).token_ids[0]
    assert alone == tiny.decode(one, [row]).token_ids[0]
    assert alone == tiny.decode(one, [row], block=1).token_ids[0]
    others = [tiny.row(p, seed=i, **SAMPLED) for i, p in enumerate(prompts[:3])]
    assert alone == tiny.decode(four, [*others, row]).token_ids[3]
    assert alone == tiny.decode(four, [row, *others], block=2).token_ids[0]
    other_seed = dataclasses.replace(row.params, seed=7)
    assert alone != tiny.decode(one, [dataclasses.replace(row, params=other_seed)]).token_ids[0]
    unseeded = dataclasses.replace(row.params, seed=None)
    free = dataclasses.replace(row, params=unseeded)
    assert tiny.decode(one, [free]).token_ids != tiny.decode(one, [free]).token_ids


def test_rows_have_their_own_parameters(models, expected):
    """A greedy row between sampled ones."""
    prompts, wants = expected
    four = engine(models, "triforce", batch_size=4)
    rows = [tiny.row(p, seed=i, **SAMPLED) for i, p in enumerate(prompts[:4])]
    rows[2] = tiny.row(prompts[2], max_new_tokens=30)
    assert tiny.decode(four, rows).token_ids[2] == wants[2][:30]


def test_all_methods_are_tried():
    assert {method for method, _, _ in WAYS.values()} == set(METHODS)
