"""KV caches: where a pass writes new keys and values, and what it reads.

Every cache is a frozen dataclass of static-shaped buffers, one a layer. Slots past a row's length
are scratch: a pass first writes the new tokens there and then reads the buffer, so that XLA
updates the donated buffer in place; only a commit moves a length, and roll-back is free.
"""
