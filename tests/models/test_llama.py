"""Logits against HF transformers in PyTorch, float32, through the chunked prefill."""

import dataclasses

import hf
import numpy as np
import pytest

from triforce_jax import Generator
from triforce_jax.config import ModelConfig
from triforce_jax.errors import InputError

VARIANTS = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "head_dim": {"head_dim": 20},
    "one layer": {"num_hidden_layers": 1},
}
VARIANTS |= {
    f"rope {name}": {"rope_parameters": {"rope_theta": 10000.0} | parameters}
    for name, parameters in hf.ROPE_KINDS.items()
    if name != "yarn, implied factor"
}


def ours(model, directory, **decode) -> Generator:
    hf.save(model, directory)
    return Generator.from_pretrained(
        directory, dtype="float32", method="autoregressive", progress=False, **decode
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_hf(name, tmp_path):
    model = hf.model(seed=3, **VARIANTS[name])
    # Dynamic scaling only sets in past max_position_embeddings.
    length = 700 if "dynamic" in name else 300
    tokens = np.random.default_rng(0).integers(0, 61, (1, length))
    generator = ours(model, tmp_path, max_length=length, prefill_chunk=256)
    got = generator.score(tokens[0].tolist())
    assert hf.relative_error(got, hf.logits(model, tokens)) < 1e-5


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_logits_at_4000_tokens(kind, tmp_path):
    parameters = {"rope_theta": 10000.0} | hf.ROPE_KINDS[kind]
    limit = 2048 if kind == "dynamic" else 4096
    if "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 512
    model = hf.model(seed=4, max_position_embeddings=limit, rope_parameters=parameters)
    tokens = np.random.default_rng(1).integers(0, 61, (1, 4000))
    got = ours(model, tmp_path, max_length=4000).score(tokens[0].tolist())
    assert hf.relative_error(got, hf.logits(model, tokens)) < 1e-4


def test_chunked_prefill_equals_one_shot(tmp_path):
    model = hf.model(seed=5)
    tokens = np.random.default_rng(2).integers(0, 61, 200).tolist()
    hf.save(model, tmp_path)
    results = []
    for chunk in (8, 64, 1600):  # a pass of 1, 8 and 200 tokens
        generator = ours(model, tmp_path, max_length=256, chunk_size=1, prefill_chunk=chunk)
        results.append(generator.score(tokens))
    for other in results[:-1]:
        assert hf.relative_error(other, results[-1]) < 1e-5


def test_a_ragged_batch_scores_as_its_rows(tmp_path):
    model = hf.model(seed=6)
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 61, n).tolist() for n in (5, 170, 1)]
    got = ours(model, tmp_path, max_length=256, batch_size=3, prefill_chunk=64).score(rows)
    assert got.shape == (3, 170, 61)
    for row, logits in zip(rows, got, strict=True):
        assert hf.relative_error(logits[: len(row)], hf.logits(model, [row])[0]) < 1e-5
        assert np.isnan(logits[len(row) :]).all()


def test_bfloat16_is_close(tmp_path):
    model = hf.model(seed=7)
    tokens = np.random.default_rng(4).integers(0, 61, 100)
    hf.save(model, tmp_path)
    generator = Generator.from_pretrained(
        tmp_path, method="autoregressive", max_length=128, progress=False
    )
    got = generator.score(tokens.tolist())
    assert got.dtype == np.float32
    error = hf.relative_error(got, hf.logits(model, tokens[None]))
    assert 1e-5 < error < 0.1  # it is bfloat16, and it is right


FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
BAD = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "rope": ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, "rope_scaling.rope_type"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd head": ({"head_dim": 9}, "head_dim"),
    "not a number": ({"vocab_size": "many"}, "config.json"),
    "null": ({"vocab_size": None}, "config.json"),
    "zero": ({"num_hidden_layers": 0}, "num_layers"),
    "no heads": ({"num_attention_heads": 0}, "config.json"),
    "factor below 1": ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor"),
    "factor is no number": (
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        "config.json",
    ),
    "rope is no object": ({"rope_scaling": 7}, "config.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations(name):
    change, field = BAD[name]
    with pytest.raises(InputError, match=field) as error:
        ModelConfig.from_hf(FIELDS | change)
    assert "\n" not in str(error.value)


def test_missing_field_is_named():
    for field in ("vocab_size", "hidden_size", "num_attention_heads"):
        with pytest.raises(InputError, match=field):
            ModelConfig.from_hf({k: v for k, v in FIELDS.items() if k != field})


def test_context_limit():
    assert ModelConfig.from_hf(FIELDS).context_limit == 512
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert ModelConfig.from_hf(FIELDS | dynamic).context_limit == 1024
    assert dataclasses.replace(ModelConfig.from_hf(FIELDS), max_position=7).context_limit == 7
