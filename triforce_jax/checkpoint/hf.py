"""Reading HF directories: one or many safetensors files, one tensor at a time."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors

from triforce_jax import tokenizer
from triforce_jax.errors import InputError


def read_json(path: pathlib.Path, field: str) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(field, f"{path} ({error})", "valid JSON") from None
    if not isinstance(content, dict):
        raise InputError(field, f"{path} with a {type(content).__name__}", "a JSON object")
    return content


class HFSource:
    """A directory with config.json and safetensors files. See `source.Source`.

    Raises:
      InputError: not such a directory, or a file of it is missing, truncated or corrupt.
    """

    def __init__(self, directory: pathlib.Path, field: str):
        self.name = directory.name
        self._directory = directory
        self.config: Mapping[str, Any] = read_json(directory / "config.json", field)
        self.generation: Mapping[str, Any] = read_json(directory / "generation_config.json", field)
        index = read_json(directory / "model.safetensors.index.json", field)
        files = sorted({*index.get("weight_map", {}).values()}) or sorted(
            path.name for path in directory.glob("*.safetensors")
        )
        if not self.config or not files:
            raise InputError(
                field,
                f"{directory}, which is no checkpoint",
                "a directory with config.json and *.safetensors, or one that convert_weights wrote",
            )
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            path = directory / file
            try:
                # "numpy" cannot hold bfloat16; the Flax framework reads it as a JAX array.
                opened = safetensors.safe_open(path, framework="flax", device="cpu")
                names = list(opened.keys())
                self._shapes |= {n: tuple(opened.get_slice(n).get_shape()) for n in names}
            except FileNotFoundError:
                raise InputError(field, f"no file {path}", "every shard the index names") from None
            except (safetensors.SafetensorError, OSError) as error:
                raise InputError(
                    field, f"{path} ({error})", "a whole safetensors file", "copy it again"
                ) from None
            self._files |= dict.fromkeys(names, opened)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._files[name].get_tensor(name))

    def write_tokenizer(self, directory: pathlib.Path) -> None:
        for file in tokenizer.ALL_FILES:
            if (self._directory / file).is_file():
                shutil.copy(self._directory / file, directory / file)
