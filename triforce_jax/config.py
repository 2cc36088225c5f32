"""Frozen, validated configurations, and reading a Hugging Face config.json into one.

`ModelConfig` says what a checkpoint is. `DecodeConfig` says how to decode with it; everything in
it is *static*: a new value compiles a new program. Everything a request may change without a new
program (temperature, top-p, lengths, EOS ids, seeds) is traced and lives in `SamplingParams`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from triforce_jax.errors import InputError

METHODS = ("triforce", "retrieval", "draft", "autoregressive")
SCORINGS = ("mean_key", "attention_mass")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
ARCHITECTURES = ("LlamaForCausalLM",)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, as HF `transformers.modeling_rope_utils` defines its kinds.

    Attributes:
      kind: one of ROPE_KINDS.
      theta: base of the frequencies.
      factor: context extension factor (all kinds but default).
      original_max_position: context length before extension (dynamic, yarn, llama3).
      attention_factor: scale of cos and sin (yarn); None derives it from the factor and mscale.
      beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn only.
      low_freq_factor, high_freq_factor: llama3 only.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise InputError("rope_scaling.rope_type", repr(self.kind), f"one of {ROPE_KINDS}")
        if not self.theta > 0:
            raise InputError("rope_theta", self.theta, "a number above 0")
        if self.kind != "default" and not self.factor >= 1:
            raise InputError("rope_scaling.factor", self.factor, "a number of at least 1")
        if self.kind in ("dynamic", "yarn", "llama3") and self.original_max_position < 1:
            raise InputError(
                "rope_scaling.original_max_position_embeddings",
                self.original_max_position,
                f"a positive number for rope type {self.kind!r}",
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-family architecture (HF `LlamaConfig`)."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: RopeConfig = RopeConfig()
    name: str = ""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or value < 1):
                raise InputError(field.name, repr(value), "a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                "num_key_value_heads",
                self.num_kv_heads,
                f"a divisor of num_attention_heads ({self.num_heads})",
            )
        if self.head_dim % 2:
            raise InputError("head_dim", self.head_dim, "an even number, which RoPE needs")

    @property
    def context_limit(self) -> int:
        """Most tokens of one row. Dynamic scaling reaches further than what it starts from."""
        if self.rope.kind == "dynamic":
            return int(self.max_position * self.rope.factor)
        return self.max_position

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> ModelConfig:
        """Reads the content of an HF config.json (old `rope_scaling` or new `rope_parameters`).

        Raises:
          InputError: unknown architecture, activation or RoPE type, or a missing field.
        """
        archs = config.get("architectures") or []
        known = any(a in ARCHITECTURES for a in archs) or (
            not archs and config.get("model_type") == "llama"
        )
        if not known:
            raise InputError(
                "architectures",
                archs or repr(config.get("model_type")),
                f"one of {list(ARCHITECTURES)}",
                "convert a Llama-family checkpoint",
            )
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise InputError("hidden_act", repr(act), "'silu'")
        try:
            heads = int(config["num_attention_heads"])
            embed = int(config["hidden_size"])
            return cls(
                vocab_size=int(config["vocab_size"]),
                embed_dim=embed,
                mlp_dim=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=heads,
                num_kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or embed // heads),
                max_position=int(config["max_position_embeddings"]),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tie_embeddings=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                mlp_bias=bool(config.get("mlp_bias", False)),
                rope=_rope_from_hf(config),
                name=name,
            )
        except KeyError as error:
            raise InputError(
                "config.json", f"no field {error}", "a complete Llama configuration"
            ) from None
        except InputError:
            raise
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(
                "config.json", f"{error}", "numbers in the fields of a Llama configuration"
            ) from None


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """RoPE fields of an HF config; see `transformers.modeling_rope_utils`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind in (None, "default"):
        return RopeConfig(theta=theta)
    max_position = int(config["max_position_embeddings"])
    stated = scaling.get(
        "original_max_position_embeddings", config.get("original_max_position_embeddings")
    )
    # HF's dynamic scaling starts at max_position_embeddings, whatever else is stated.
    original = max_position if kind == "dynamic" else int(stated or max_position)
    # Some YaRN checkpoints leave the factor to be implied by the two context lengths.
    factor = scaling.get("factor")
    if factor is None and stated:
        factor = max_position / original
    fields: dict[str, Any] = {
        "kind": kind,
        "theta": theta,
        "factor": float(factor) if factor is not None else 1.0,
        "original_max_position": original,
        "truncate": bool(scaling.get("truncate", True)),
    }
    for name in (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "low_freq_factor",
        "high_freq_factor",
    ):
        if scaling.get(name) is not None:
            fields[name] = float(scaling[name])
    return RopeConfig(**fields)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How to decode: all of it static, so each field's value is part of the compiled program.

    Attributes:
      method: "triforce" (draft -> retrieval -> target), "retrieval" (retrieval -> target),
        "draft" (draft -> target) or "autoregressive".
      max_length: most tokens of one row, prompt and output together.
      batch_size: rows decoded together.
      gamma: tokens the level below proposes to the target in one outer step.
      draft_gamma: tokens the draft proposes to the retrieval level in one inner round.
      budget: KV slots the retrieval level keeps, recent window included.
      chunk_size: tokens of one selectable chunk.
      recent_window: newest tokens the retrieval level always keeps, part of the budget.
      refresh_interval: outer steps between two selections; 0 selects once, as the paper does.
      scoring: how chunks are scored, one of SCORINGS.
      draft_budget: KV tokens the draft sees, attention sinks included.
      draft_sinks: first tokens that the draft always sees.
      ngram: longest suffix that the n-gram draft looks up.
      prefill_chunk: tokens of one prefill pass.
      attention: implementation of attention, see attention/dispatch.py.
    """

    method: Literal["triforce", "retrieval", "draft", "autoregressive"] = "triforce"
    max_length: int = 4096
    batch_size: int = 1
    gamma: int = 6
    draft_gamma: int = 1
    budget: int = 4096
    chunk_size: int = 8
    recent_window: int = 64
    refresh_interval: int = 1
    scoring: str = "mean_key"
    draft_budget: int = 256
    draft_sinks: int = 16
    ngram: int = 3
    prefill_chunk: int = 2048
    attention: str = "auto"

    def __post_init__(self):
        def whole(name: str, least: int):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(name, repr(value), f"a whole number of at least {least}")

        if self.method not in METHODS:
            raise InputError("method", repr(self.method), f"one of {METHODS}")
        if self.scoring not in SCORINGS:
            raise InputError("scoring", repr(self.scoring), f"one of {SCORINGS}")
        for name in (
            "max_length",
            "batch_size",
            "gamma",
            "draft_gamma",
            "budget",
            "chunk_size",
            "recent_window",
            "draft_budget",
            "ngram",
            "prefill_chunk",
        ):
            whole(name, 1)
        whole("refresh_interval", 0)
        whole("draft_sinks", 0)
        for name in ("budget", "recent_window"):
            if getattr(self, name) % self.chunk_size:
                raise InputError(
                    name,
                    getattr(self, name),
                    f"a multiple of chunk_size ({self.chunk_size})",
                    f"try {math.ceil(getattr(self, name) / self.chunk_size) * self.chunk_size}",
                )
        if self.budget < self.recent_window + self.chunk_size:
            raise InputError(
                "budget",
                self.budget,
                f"at least recent_window + chunk_size ({self.recent_window + self.chunk_size})",
                "raise budget or lower recent_window",
            )
        if self.draft_sinks >= self.draft_budget:
            raise InputError(
                "draft_sinks", self.draft_sinks, f"fewer than draft_budget ({self.draft_budget})"
            )

    @property
    def uses_retrieval(self) -> bool:
        return self.method in ("triforce", "retrieval")

    @property
    def uses_draft(self) -> bool:
        return self.method in ("triforce", "draft")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
      temperature: 0 takes the most probable token (ties: the lowest id).
      top_p: keep the most probable tokens until their mass reaches this; 1.0 is off.
      top_k: keep the k most probable tokens (ties of the k-th too); 0 is off.
      min_p: drop tokens less probable than this share of the best one's; 0.0 is off.
      max_new_tokens: exactly so many tokens unless EOS or a stop string comes first.
      seed: of the random numbers; None draws a fresh one.
      stop: strings that end the output, which is cut before them.
      ignore_eos: go on after an EOS token.

    Raises:
      InputError: a value out of its range.
    """

    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        def check(name: str, ok: Callable[[Any], bool], expected: str):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            real = isinstance(value, (float, np.floating)) and math.isfinite(float(value))
            if not (whole or real) or not ok(value):
                raise InputError(name, repr(value), expected)

        check("temperature", lambda v: v >= 0, "a number of at least 0 (0 is greedy)")
        check("top_p", lambda v: 0 < v <= 1, "a number above 0, at most 1 (1 is off)")
        check("min_p", lambda v: 0 <= v <= 1, "a number from 0 (off) to 1")
        for name in ("top_k", "max_new_tokens"):
            check(name, lambda v: v >= 0 and int(v) == v, "a whole number of at least 0")
        if self.seed is not None:
            check("seed", lambda v: int(v) == v and 0 <= v < 2**63, "a whole number from 0")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise InputError("stop", repr(self.stop), "strings that are not empty")
        object.__setattr__(self, "stop", stop)
