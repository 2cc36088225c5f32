"""What a checkpoint to be read looks like, whatever its format."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from triforce_jax.checkpoint.weights import Weight, weights_of
from triforce_jax.config import ModelConfig
from triforce_jax.errors import InputError


@runtime_checkable
class Source(Protocol):
    """A checkpoint on disk.

    Attributes:
      name: what messages call it.
      config: HF config.json content.
      generation: HF generation_config.json content, or empty.
    """

    name: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """HF names of the tensors that are there, and their shapes."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, in HF's layout."""
        ...

    def write_tokenizer(self, directory: pathlib.Path) -> None:
        """Writes or copies the tokenizer's files, if there is a tokenizer."""
        ...


def eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The union of all `eos_token_id` fields, each an id, a list of them or nothing."""
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        if value is not None:
            found.update(int(i) for i in (value if isinstance(value, list) else [value]))
    return tuple(sorted(found))


def checked_weights(source: Source, config: ModelConfig, field: str) -> list[Weight]:
    """The weights to read.

    Raises:
      InputError: listing every missing and unexpected tensor, or those of the wrong shape.
    """
    weights = list(weights_of(config))
    present = dict(source.shapes())
    expected = {w.hf for w in weights}
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(expected - set(present))
    unexpected = sorted(
        name
        for name in set(present) - expected - ignored
        if not name.endswith("rotary_emb.inv_freq")
    )
    if missing or unexpected:
        parts = [
            f"{what} {names}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise InputError(
            field,
            f"{source.name} with tensors " + ", ".join(parts),
            "those its config.json implies",
        )
    wrong = [
        f"{w.hf} {list(present[w.hf])}, not {list(w.hf_shape)}"
        for w in weights
        if tuple(present[w.hf]) != w.hf_shape
    ]
    if wrong:
        raise InputError(
            field, f"{source.name} with shapes " + ", ".join(wrong), "those its config.json implies"
        )
    return weights
