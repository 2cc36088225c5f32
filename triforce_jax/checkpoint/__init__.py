"""Checkpoints: HF directories, GGUF files and converted Orbax directories."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike
from tqdm import tqdm

from triforce_jax import sharding
from triforce_jax.checkpoint import orbax
from triforce_jax.checkpoint.gguf import GGUFSource
from triforce_jax.checkpoint.hf import HFSource, read_json
from triforce_jax.checkpoint.source import Source, checked_weights, eos_ids
from triforce_jax.checkpoint.weights import weights_of
from triforce_jax.config import ModelConfig
from triforce_jax.errors import InputError
from triforce_jax.models.llama import Llama
from triforce_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
      config: the architecture.
      model: the model with its weights.
      tokenizer: None if the checkpoint has none.
      eos_ids: ids that end a text, of all its configurations together.
      name: what messages call it.
    """

    config: ModelConfig
    model: Llama
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    name: str


def load(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    mesh: Mesh | None = None,
    progress: bool = False,
    field: str = "target",
) -> Checkpoint:
    """Loads an HF or Orbax directory, a .gguf file or a hub id, tensor by tensor.

    Raises:
      InputError: it is none of these, or it is broken.
    """
    path = _local(source, field)
    if (path / orbax.MARKER).is_file():
        config = read_json(path / "config.json", field)
        generation = read_json(path / "generation_config.json", field)
        model = ModelConfig.from_hf(config, path.name)
        abstract = _abstract(model, dtype, mesh)
        weights = orbax.read(path, abstract, field)
        tokenizer = Tokenizer.from_directory(path, path.name)
        name = path.name
    else:
        opened = _open(path, field)
        config, generation, name = opened.config, opened.generation, opened.name
        model = ModelConfig.from_hf(config, name)
        abstract = _abstract(model, dtype, mesh)
        weights = (
            (
                w.path,
                jax.device_put(
                    w.from_hf(opened.read(w.hf)).astype(jnp.dtype(dtype)), abstract[w.path].sharding
                ),
            )
            for w in checked_weights(opened, model, field)
        )
        with tempfile.TemporaryDirectory() as directory:
            opened.write_tokenizer(pathlib.Path(directory))
            tokenizer = Tokenizer.from_directory(pathlib.Path(directory), name)
    bar = tqdm(weights, total=len(abstract), desc=f"load {name}", disable=not progress, leave=False)
    state: dict[tuple[Any, ...], jax.Array] = {
        tuple(_key(part) for part in p.split(".")): a for p, a in bar
    }
    llama = nnx.eval_shape(lambda: Llama(model, dtype=dtype, rngs=nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(llama))
    leaves = nnx.from_flat_state([(path, leaf.replace(state[path])) for path, leaf in flat])
    nnx.update(llama, leaves)
    known = eos_ids(config, generation)
    return Checkpoint(
        model, llama, tokenizer, known or (tokenizer.eos_ids if tokenizer else ()), name
    )


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    progress: bool = False,
    overwrite: bool = False,
) -> pathlib.Path:
    """Converts an HF directory, hub id or GGUF file into an Orbax directory.

    Holds one layer's weights at a time. The output appears under its name when it is whole.

    Raises:
      InputError: a source that cannot be read, or an output that exists.
    """
    path, out = _local(source, "source"), pathlib.Path(output)
    if out.exists() and not overwrite:
        raise InputError("output", f"{out}, which exists", "a new name", "or pass --overwrite")
    opened = _open(path, "source")
    model = ModelConfig.from_hf(opened.config, opened.name)
    weights = checked_weights(opened, model, "source")
    bar = tqdm(weights, desc=f"convert {opened.name}", disable=not progress, leave=False)
    with orbax.written_whole(out.absolute()) as directory:
        orbax.write(
            directory,
            ((w.path, w.from_hf(opened.read(w.hf)).astype(jnp.dtype(dtype))) for w in bar),
        )
        for name, content in (
            ("config.json", opened.config),
            ("generation_config.json", opened.generation),
        ):
            (directory / name).write_text(json.dumps(dict(content), indent=2))
        opened.write_tokenizer(directory)
        orbax.mark(directory, dtype=str(jnp.dtype(dtype)), source=opened.name)
    return out


def _key(part: str) -> str | int:
    return int(part) if part.isdigit() else part


def _abstract(
    model: ModelConfig, dtype: DTypeLike, mesh: Mesh | None
) -> dict[str, jax.ShapeDtypeStruct]:
    def place(path: str, shape: tuple[int, ...]):
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return sharding.param_sharding(path, shape, mesh)

    return {
        w.path: jax.ShapeDtypeStruct(w.shape, jnp.dtype(dtype), sharding=place(w.path, w.shape))
        for w in weights_of(model)
    }


def _local(source: str | os.PathLike[str], field: str) -> pathlib.Path:
    path = pathlib.Path(source)
    if path.exists():
        return path
    text = str(source)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise InputError(field, f"{text!r}, which does not exist", "a directory or .gguf file")
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(text, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many kinds
        raise InputError(
            field,
            f"{text!r}, no directory here, nor to be had from the hub ({type(error).__name__})",
            "a directory, a .gguf file or a hub id",
        ) from None


def _open(path: pathlib.Path, field: str) -> Source:
    return GGUFSource(path, field) if path.is_file() else HFSource(path, field)
