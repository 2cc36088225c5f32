"""HF transformers in PyTorch, float32: the reference for logits, tokens and files."""

import warnings

import numpy as np
import torch
import transformers

# Parameters of every kind of RoPE, for a model of 512 positions.
ROPE_KINDS = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, implied factor": {"rope_type": "yarn", "original_max_position_embeddings": 64},
    "yarn, no truncation": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "yarn, attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.75,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def config(**changes) -> transformers.LlamaConfig:
    """A small Llama configuration."""
    fields = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    return transformers.LlamaConfig(**(fields | changes))


def model(seed=0, **changes) -> transformers.LlamaForCausalLM:
    """A random model with random norms and biases too."""
    torch.manual_seed(seed)
    result = transformers.LlamaForCausalLM(config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return result


def save(result, directory, **kwargs):
    """Writes a model as HF does; returns the directory."""
    result.save_pretrained(directory, **kwargs)
    return directory


def logits(result, tokens) -> np.ndarray:
    """float32 `[B, T, V]`."""
    with torch.no_grad():
        return result(torch.tensor(np.asarray(tokens))).logits.float().numpy()


def greedy(result, prompt, num_tokens, eos_ids=()) -> list[int]:
    """The new tokens of `generate` without sampling."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        prompt = torch.tensor([list(prompt)])
        out = result.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
        )
    return out[0, prompt.shape[1] :].tolist()


def relative_error(ours, theirs) -> float:
    """Largest difference, as a share of the largest reference value."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())
