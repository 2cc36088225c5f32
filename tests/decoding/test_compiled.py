"""What XLA makes of the decode loop: no copies of the cache, no second compilation."""

import re

import chex
import jax
import jaxtyping
import numpy as np
import pytest
import tiny

from triforce_jax.decoding import programs as programs_module

# So long that nothing but the full cache is anywhere near its size.
SLOTS = 1 << 17


@pytest.fixture
def untyped():
    """`lower` builds the state out of descriptions of arrays, which no type check knows."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def engine(method, **changes):
    fields = {"max_length": SLOTS, "budget": 64, "prefill_chunk": 512} | changes
    return tiny.engine(method, config=tiny.DECODE, **fields)


def compiled_decode(method, batch_size, **changes):
    one = engine(method, batch_size=batch_size, **changes)
    rows = [tiny.row([1, 2, 3])] * batch_size
    state = one.prefill(rows)
    lowered = one.programs.decode.lower(one.programs.weights, state, np.int32(4))
    return one.programs, state, lowered.compile()


CASES = [
    (method, batch, {})
    for method in ("autoregressive", "retrieval", "draft", "triforce")
    for batch in (1, 3)
] + [("triforce", 1, {"refresh_interval": 2}), ("triforce", 2, {"scoring": "attention_mass"})]


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(("method", "batch", "changes"), CASES)
def test_caches_are_updated_in_place(method, batch, changes):
    programs, state, compiled = compiled_decode(method, batch, **changes)
    text = compiled.as_text()
    # Every donated buffer is some output's buffer.
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text, re.S).group(1)
    weights = len(jax.tree.leaves(programs.weights))
    donated = {int(n) for n in re.findall(r"\((\d+),", aliases)}
    big = [
        i + weights for i, leaf in enumerate(jax.tree.leaves(state)) if leaf.nbytes >= 1024 * batch
    ]
    assert len(big) >= 4
    assert donated.issuperset(big)
    # No instruction copies an array of the full cache's size.
    model = programs.model
    elements = batch * model.num_kv_heads * programs.shapes.full_slots * model.head_dim
    copies = [
        line.strip()[:150]
        for line in text.splitlines()
        if (found := re.search(r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start)\(", line))
        and np.prod([int(n) for n in found.group(1).split(",")]) >= elements
    ]
    assert copies == []
    # Nor is there room for one among the temporaries.
    assert compiled.memory_analysis().temp_size_in_bytes < elements * 4


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("method", ["autoregressive", "retrieval", "draft", "triforce"])
def test_prefill_works_in_place(method):
    one = engine(method)
    programs = one.programs
    caches = one.take_caches()
    tokens = np.zeros((1, programs.shapes.prefill_small), np.int32)
    lowered = programs.prefill_target.lower(
        programs.weights, caches, tokens, np.int32(0), np.ones(1, np.int32)
    )
    compiled = lowered.compile()
    model = programs.model
    layer = model.num_kv_heads * programs.shapes.full_slots * model.head_dim * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * model.num_layers * layer
    assert compiled.memory_analysis().temp_size_in_bytes < layer


@pytest.mark.parametrize("method", ["autoregressive", "retrieval", "draft", "triforce"])
def test_the_second_call_compiles_nothing(monkeypatch, method):
    """Other lengths, parameters, EOS ids, seeds, limits, and the streaming block: one program."""
    chex.clear_trace_counter()
    for name, most in (("_decode", 1), ("_prefill_target", 2), ("_prefill_draft", 2)):
        original = getattr(programs_module, name)
        monkeypatch.setattr(programs_module, name, chex.assert_max_traces(original, n=most))
    one = tiny.engine(method, batch_size=2)
    first = [tiny.row([1] * 100), tiny.row([2, 3])]  # wide and small prefill passes
    tiny.decode(one, first)
    before = [f._cache_size() for f in (one.programs.decode, one.programs.prefill_target)]
    tiny.decode(one, [tiny.row([5] * 77, temperature=0.7, top_p=0.5, top_k=4, seed=9)])
    tiny.decode(one, [tiny.row([7], eos_ids=(3, 4, 5), max_new_tokens=3)], block=1)
    tiny.decode(one, [tiny.row([7] * 130, min_p=0.1, temperature=1.3)] * 2, block=2)
    after = [f._cache_size() for f in (one.programs.decode, one.programs.prefill_target)]
    assert after == before


def test_a_failed_call_does_not_poison_the_engine(monkeypatch):
    """Buffers donated to a call that failed are gone: the next call gets new ones."""
    one = tiny.engine("triforce")
    want = tiny.decode(one, [tiny.row([1, 2, 3])]).token_ids
    run = one.run([tiny.row([4, 5])])
    lost = run._state
    one.programs.decode(one.programs.weights, lost, np.int32(1))  # donated, result thrown away
    run.close()
    assert tiny.decode(one, [tiny.row([1, 2, 3])]).token_ids == want
