"""The only place where buffer sizes are computed. All of them are static."""

from __future__ import annotations

import dataclasses

from triforce_jax.config import DecodeConfig

# Prefill runs in passes of `prefill_chunk` tokens and, for what is left of a prompt, of an
# eighth of it: two programs, and a short prompt does not pay for a long pass.
_PREFILL_FRACTION = 8
# The blockwise attention reads a cache in blocks of this many slots, at most.
_ATTENTION_BLOCK = 1024


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of every buffer of one compiled decoder.

    Attributes:
      candidates: most tokens proposed to the target in one outer step.
      target_width: tokens of one target verification (the pending token and the candidates).
      draft_proposals: tokens the draft proposes in one inner round (0 without a draft).
      draft_feed: newest tokens the first draft pass of a round feeds. The draft's cache lags
        by the tokens it was never given: one bonus token a level, and the last proposal.
      retrieval_width: tokens of one retrieval pass.
      chunk_size: slots of one selectable chunk.
      attention_block: slots the blockwise attention reads at a time from the full cache.
      full_slots: slots of the full cache, a multiple of chunk_size and of attention_block.
      num_chunks: chunks of the full cache.
      selected_chunks: most chunks a selection holds, recent window aside.
      updated_chunks: chunks whose means may have to be renewed after one outer step.
      retrieval_slots: slots of the retrieval cache, scratch included.
      ring_slots: slots of the draft's ring (its sinks aside), scratch included.
      token_slots: slots of the token history, scratch included.
      prefill_chunk, prefill_small: tokens of the two prefill passes.
    """

    candidates: int
    target_width: int
    draft_proposals: int
    draft_feed: int
    retrieval_width: int
    chunk_size: int
    attention_block: int
    full_slots: int
    num_chunks: int
    selected_chunks: int
    updated_chunks: int
    retrieval_slots: int
    ring_slots: int
    token_slots: int
    prefill_chunk: int
    prefill_small: int

    @classmethod
    def of(cls, config: DecodeConfig) -> Shapes:
        """Computes all sizes from a validated configuration."""
        c = config.chunk_size
        draft_proposals, draft_feed, candidates = 0, 1, 0
        if config.method == "triforce":
            # A round starts with at most gamma - 1 candidates and adds draft_gamma + 1 at most.
            draft_proposals, draft_feed = config.draft_gamma, 3
            candidates = config.gamma + config.draft_gamma
        elif config.method == "retrieval":
            candidates = config.gamma
        elif config.method == "draft":
            draft_proposals, draft_feed, candidates = config.gamma, 2, config.gamma
        target_width = candidates + 1
        retrieval_width = 1 + (draft_proposals if config.method == "triforce" else 0)

        small = round_up(-(-config.prefill_chunk // _PREFILL_FRACTION), c)
        small = min(small, round_up(config.max_length, c))
        chunk = round_up(config.prefill_chunk, small)
        # The last prefill pass and the last verification may reach past max_length.
        least = round_up(config.max_length, small) + target_width
        block = round_up(min(_ATTENTION_BLOCK, least), c)
        full_slots = round_up(least, block)

        recent_chunks = config.recent_window // c
        selected = min(config.budget // c - recent_chunks, full_slots // c)
        # The window starts at a chunk's border, up to c - 1 slots early; the tokens of one
        # verification and of the inner rounds after it follow.
        tail = config.recent_window + (c - 1) + target_width + candidates + retrieval_width
        retrieval_slots = (selected + round_up(tail, c) // c) * c
        # Slack of the ring: one outer step's tokens and proposals must not evict a slot that
        # is still visible once they are rolled back.
        slack = target_width + draft_proposals + draft_feed
        return cls(
            candidates=candidates,
            target_width=target_width,
            draft_proposals=draft_proposals,
            draft_feed=draft_feed,
            retrieval_width=retrieval_width,
            chunk_size=c,
            attention_block=block,
            full_slots=full_slots,
            num_chunks=full_slots // c,
            selected_chunks=selected,
            updated_chunks=round_up(target_width, c) // c,
            retrieval_slots=retrieval_slots,
            ring_slots=config.draft_budget - config.draft_sinks + slack,
            token_slots=full_slots + target_width + retrieval_width + draft_feed,
            prefill_chunk=chunk,
            prefill_small=small,
        )
