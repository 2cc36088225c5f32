"""Names of the dimensions, and the array types that public signatures use.

Legend, everywhere in this package:

  B batch rows                 T queries (new tokens) of one pass
  S slots of a KV buffer       N query heads, K KV heads, G = N / K
  H head_dim                   D embed dim, F mlp dim, V vocabulary
  L layers                     C chunks of `chunk_size` slots
  R slots of the retrieval buffer

`position` is what RoPE sees; `slot` is an index into a buffer.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "UInt32"]
