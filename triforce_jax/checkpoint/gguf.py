"""Reading GGUF files: dequantised tensors with HF's names, and the tokenizer of the metadata."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from triforce_jax.checkpoint.weights import weights_of
from triforce_jax.config import ModelConfig
from triforce_jax.errors import InputError

# Token types of the metadata that are special.
_CONTROL, _USER_DEFINED = 3, 4
# llama.cpp's names of pre-tokenizers, as the pattern that splits before the byte level.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class GGUFSource:
    """A Llama GGUF file. See `source.Source`.

    Raises:
      InputError: not a GGUF file, a corrupt one, or another architecture.
    """

    def __init__(self, path: pathlib.Path, field: str):
        self.name = path.stem
        self._field = field
        try:
            reader = gguf.GGUFReader(path)
            self._meta = {key: value.contents() for key, value in reader.fields.items()}
        except (ValueError, IndexError, OSError, KeyError) as error:
            raise InputError(field, f"{path} ({error})", "a whole GGUF file") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self._meta.get("general.architecture")
        if architecture != "llama" or "rope_freqs.weight" in self._tensors:
            kind = repr(architecture) if architecture != "llama" else "rope_freqs.weight"
            raise InputError(
                field, f"{path} with {kind}", "architecture 'llama' without a table of frequencies"
            )
        self.config: Mapping[str, Any] = self._config()
        model = ModelConfig.from_hf(self.config, self.name)
        self._heads = {"attn_q": model.num_heads, "attn_k": model.num_kv_heads}
        self._gguf_names = {w.hf: w.gguf for w in weights_of(model)}
        self.generation: Mapping[str, Any] = {
            "eos_token_id": self._meta.get("tokenizer.ggml.eos_token_id")
        }

    def _config(self) -> dict[str, Any]:
        def get(key: str, default: Any = None) -> Any:
            value = self._meta.get(f"llama.{key}", default)
            if value is None:
                raise InputError(self._field, f"{self.name} without llama.{key}", "a whole GGUF")
            return value

        heads = get("attention.head_count")
        dim = get("embedding_length")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": dim,
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": get("attention.key_length", dim // heads),
            "max_position_embeddings": get("context_length"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
            "bos_token_id": self._meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._meta.get("tokenizer.ggml.eos_token_id"),
        }
        kind = self._meta.get("llama.rope.scaling.type")
        if kind not in (None, "none"):
            config["rope_scaling"] = {"rope_type": kind, "factor": get("rope.scaling.factor")}
            original = self._meta.get("llama.rope.scaling.original_context_length")
            if original:
                config["rope_scaling"]["original_max_position_embeddings"] = original
        return config

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        hf_names = {gguf_name: hf for hf, gguf_name in self._gguf_names.items()}
        return {
            hf_names.get(name, name): tuple(int(n) for n in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        key = self._gguf_names[name]
        tensor = self._tensors[key]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        heads = self._heads.get(key.split(".")[-2])
        if heads:
            # llama.cpp interleaves the halves of each head; HF and ours keep them apart.
            half = array.shape[0] // heads // 2
            array = array.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(array.shape)
        return array

    def write_tokenizer(self, directory: pathlib.Path) -> None:
        meta = {k.removeprefix("tokenizer.ggml."): v for k, v in self._meta.items()}
        if "tokens" not in meta:
            return
        if meta.get("model") != "gpt2":
            raise InputError(
                self._field,
                f"{self.name} with a {meta.get('model')!r} tokenizer",
                "a byte-level BPE ('gpt2') tokenizer",
                "use the HF checkpoint of the model",
            )
        byte_level_tokenizer(meta, self._field).save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            if f"{key}_token_id" in meta:
                config[f"{name}_token"] = meta["tokens"][meta[f"{key}_token_id"]]
        template = self._meta.get("tokenizer.chat_template")
        if template:
            config["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def byte_level_tokenizer(meta: Mapping[str, Any], field: str) -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of GGUF metadata (keys without `tokenizer.ggml.`)."""
    pre = meta.get("pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        split = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    elif pre in ("default", "gpt-2"):
        split = [byte_level]
    elif pre in ("llama-bpe", "llama3", "llama-v3"):
        split = [
            pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        raise InputError(field, f"pre-tokenizer {pre!r}", "one of 'smollm', 'gpt-2', 'llama-bpe'")
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    vocabulary = {token: i for i, token in enumerate(meta["tokens"])}
    result = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(split)
    result.decoder = decoders.ByteLevel()
    types = meta.get("token_type", [])
    for kind in (_CONTROL, _USER_DEFINED):
        tokens = [t for t, k in zip(meta["tokens"], types, strict=False) if k == kind]
        result.add_tokens(
            [AddedToken(t, special=kind == _CONTROL, normalized=False) for t in tokens]
        )
    return result
