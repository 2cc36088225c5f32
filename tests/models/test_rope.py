"""RoPE of every kind against HF's own functions."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf import ROPE_KINDS as KINDS
from hf import config as hf_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from triforce_jax.config import ModelConfig, RopeConfig
from triforce_jax.models import rope


def pair(name):
    """HF's and our configuration."""
    parameters = {"rope_theta": 10000.0} | KINDS[name]
    if name == "yarn, implied factor":
        # HF wants the factor; checkpoints that leave it out mean the quotient of the lengths.
        theirs = hf_config(head_dim=32, rope_parameters=parameters | {"factor": 8.0})
    else:
        theirs = hf_config(head_dim=32, rope_parameters=parameters)
    fields = theirs.to_dict() | {"rope_parameters": parameters}
    fields["architectures"] = ["LlamaForCausalLM"]
    return theirs, ModelConfig.from_hf(fields)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [9, 512, 1000])
def test_tables_equal_those_of_hf(name, length):
    theirs, ours = pair(name)
    embedding = LlamaRotaryEmbedding(theirs)
    positions = np.arange(length)[None]
    cos, sin = embedding(torch.zeros(1, length, 32), torch.tensor(positions))
    got = rope.rope_tables(ours.rope, 32, jnp.asarray(positions), jnp.array([length]))
    half = 16  # HF repeats the first half
    # The angle is a float32 product of up to 1,000 radians: 6e-5 is its last bit.
    np.testing.assert_allclose(got[0], cos[..., :half].numpy(), atol=1e-4)
    np.testing.assert_allclose(got[1], sin[..., :half].numpy(), atol=1e-4)


def test_frequencies_and_scale_equal_those_of_hf():
    for name in KINDS:
        theirs, ours = pair(name)
        embedding = LlamaRotaryEmbedding(theirs)
        got = rope.inverse_frequencies(ours.rope, 32)
        np.testing.assert_allclose(got, embedding.inv_freq.numpy(), rtol=1e-6, err_msg=name)
        assert rope.attention_scale(ours.rope) == pytest.approx(embedding.attention_scaling), name


def test_old_field_names_mean_the_same():
    _, new = pair("llama3")
    fields = {k: v for k, v in KINDS["llama3"].items() if k != "rope_type"}
    old = new_config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 128,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    old = new_config | {"rope_scaling": fields | {"type": "llama3"}}
    assert ModelConfig.from_hf(old).rope == new.rope


def test_dynamic_scaling_has_no_memory():
    """Short, long, short again: a row's tables follow from its own length alone."""
    dynamic = RopeConfig(kind="dynamic", factor=2.0, original_max_position=64)
    plain = RopeConfig()

    def tables(config, length):
        return rope.rope_tables(
            config, 32, jnp.arange(length)[None], jnp.array([length], jnp.int32)
        )

    short = tables(dynamic, 50)
    long = tables(dynamic, 100)
    np.testing.assert_allclose(short, tables(plain, 50), atol=1e-5)
    assert np.abs(np.asarray(long[0][:, :50]) - short[0]).max() > 0.1
    both = rope.rope_tables(
        dynamic, 32, jnp.tile(jnp.arange(100), (2, 1)), jnp.array([1, 100], jnp.int32)
    )
    np.testing.assert_allclose(both[0][0, :50], short[0][0], atol=1e-5)
    np.testing.assert_allclose(both[0][1], long[0][0], atol=1e-5)
