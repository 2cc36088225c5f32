"""Logical axes -> mesh axes, with a refusal of what does not fit.

Mesh axes: "data" (batch rows) and "model" (heads, MLP, vocabulary).
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from triforce_jax.errors import InputError

RULES = {"batch": "data", "heads": "model", "kv": "model", "mlp": "model", "vocab": "model"}

# Logical axes of each kind of parameter, by the end of its path.
_PARAMS: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "scale": (None,),
    "q.kernel": (None, "heads", None),
    "k.kernel": (None, "kv", None),
    "v.kernel": (None, "kv", None),
    "o.kernel": ("heads", None, None),
    "q.bias": ("heads", None),
    "k.bias": ("kv", None),
    "v.bias": ("kv", None),
    "o.bias": (None,),
    "gate.kernel": (None, "mlp"),
    "up.kernel": (None, "mlp"),
    "down.kernel": ("mlp", None),
    "gate.bias": ("mlp",),
    "up.bias": ("mlp",),
    "down.bias": (None,),
}


def make_mesh(model: int = 1, data: int = 1) -> Mesh:
    """A mesh of data x model devices. Raises InputError if there are too few."""
    devices = jax.devices()
    if model * data > len(devices):
        raise InputError("mesh", f"{data} x {model}", f"at most {len(devices)} devices")
    return Mesh(np.array(devices[: model * data]).reshape(data, model), ("data", "model"))


def logical_sharding(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh, what: str
) -> NamedSharding:
    """Sharding of an array with logical axes. KV heads fewer than devices are replicated.

    Raises:
      InputError: two dimensions on one mesh axis, or one that does not divide.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        to = RULES.get(axis) if axis else None
        count = mesh.shape[to] if to else 1
        if axis == "kv" and size < count and count % size == 0:
            to = None
        if to and to in spec:
            raise InputError("mesh", f"{what} with two axes on {to!r}", "one at most")
        if to and size % count:
            raise InputError(
                "mesh", f"{what} with {axis} of {size}", f"a multiple of {count} devices"
            )
        spec.append(to)
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_sharding(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Sharding of a parameter, by its path as in models/llama.py."""
    parts = path.split(".")
    axes = _PARAMS.get(".".join(parts[-2:])) or _PARAMS[parts[-1]]
    return logical_sharding(axes, shape, mesh, path)


def cache_shardings(caches: Any, mesh: Mesh) -> Any:
    """Shardings of a tree of `decoding.state.Caches`: rows over data, KV heads over model."""

    def place(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = ("batch", "kv", None, None)[: len(leaf.shape)]
        return logical_sharding(axes, leaf.shape, mesh, "a KV cache")

    return jax.tree.map(place, caches)
