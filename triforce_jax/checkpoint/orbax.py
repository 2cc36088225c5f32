"""Orbax directories: one small checkpoint a layer, so that writing needs one layer's memory."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator

import jax
import numpy as np
import orbax.checkpoint as ocp

from triforce_jax.errors import InputError

MARKER = "triforce.json"
WEIGHTS = "weights"


def piece_of(path: str) -> str:
    """The Orbax checkpoint a parameter is in: its block, or itself."""
    parts = path.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def write(directory: pathlib.Path, weights: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes parameters that come in the order of the layers, one piece at a time."""
    held: dict[str, np.ndarray] = {}
    current = ""
    with ocp.PyTreeCheckpointer() as writer:
        for path, array in weights:
            if held and piece_of(path) != current:
                writer.save(directory / WEIGHTS / current, held)
                held = {}
            current = piece_of(path)
            held[path] = array
        if held:
            writer.save(directory / WEIGHTS / current, held)


def read(
    directory: pathlib.Path, abstract: dict[str, jax.ShapeDtypeStruct], field: str
) -> Iterator[tuple[str, jax.Array]]:
    """Restores parameters into their dtypes and shardings, piece by piece."""
    pieces: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for path, leaf in abstract.items():
        pieces.setdefault(piece_of(path), {})[path] = leaf
    with ocp.PyTreeCheckpointer() as reader:
        for piece, tree in pieces.items():
            try:
                restored = reader.restore(
                    (directory / WEIGHTS / piece).absolute(),
                    ocp.args.PyTreeRestore(
                        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
                    ),
                )
            except (ValueError, OSError, KeyError) as error:
                text = str(error).splitlines()[0][:200]
                raise InputError(
                    field, f"{directory} ({text})", "a whole converted checkpoint", "convert again"
                ) from None
            yield from restored.items()


@contextlib.contextmanager
def written_whole(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary directory beside the output, renamed to it at the end or removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield temporary
        if output.exists():
            shutil.rmtree(output)
        temporary.chmod(0o755)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def mark(directory: pathlib.Path, **facts: str) -> None:
    """Says that the directory is a converted checkpoint."""
    (directory / MARKER).write_text(json.dumps({"format": 1, **facts}, indent=2))
