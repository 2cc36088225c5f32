"""The one entry to attention over a KV buffer."""

from __future__ import annotations

from triforce_jax.attention import blockwise, reference
from triforce_jax.errors import InputError
from triforce_jax.typing import Array, Float, Int

IMPLEMENTATIONS = ("auto", "reference", "blockwise")


def check_implementation(name: str) -> str:
    """Returns `name`, or raises InputError if there is no such implementation."""
    if name not in IMPLEMENTATIONS:
        raise InputError("attention", repr(name), f"one of {IMPLEMENTATIONS}")
    return name


def attend(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    lengths: Int[Array, "B"],
    *,
    implementation: str = "auto",
    block: int = 1024,
    mass_chunk: int = 0,
    mass_queries: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B K C"] | None]:
    """Attends T new tokens to a row's valid slots and, causally, to each other.

    Args:
      q: rotated queries.
      keys, values: the buffers; the new tokens' own are already at slots lengths..lengths+T-1.
      lengths: valid slots of each row, the new tokens not counted.
      implementation: one of IMPLEMENTATIONS.
      block: slots read at a time by "blockwise"; must divide S where S is larger.
      mass_chunk: if positive, also return the attention probability that falls on each chunk
        of so many slots (must divide S and `block`).
      mass_queries: count only each row's first so many queries in the mass (default all T).

    Returns:
      The output in q's dtype (softmax in float32), and the mass averaged over queries and the
      heads of a group, or None.
    """
    if check_implementation(implementation) == "reference":
        return reference.attend(
            q, keys, values, lengths, mass_chunk=mass_chunk, mass_queries=mass_queries
        )
    return blockwise.attend(
        q,
        keys,
        values,
        lengths,
        block=block,
        mass_chunk=mass_chunk,
        mass_queries=mass_queries,
    )
