"""What a generation returns."""

from __future__ import annotations

import dataclasses
from dataclasses import fields


@dataclasses.dataclass(frozen=True)
class Stats:
    """Times in seconds; counts are sums over the rows of the batch.

    A pass counts once for each row that needed it, so `new tokens / target_passes` is the number
    of tokens a verification yields, whatever the batch.

    Attributes:
      prefill_seconds: reading the prompts.
      decode_seconds: everything after that.
      first_token_seconds: until the first token was there, prefill included.
      target_passes, retrieval_passes, draft_passes: passes of each level (an n-gram draft has
        none).
      target_accepted, target_proposed: candidates the target accepted, of those proposed to it.
      retrieval_accepted, retrieval_proposed: the same for the draft's proposals at the
        retrieval level.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    target_passes: int = 0
    retrieval_passes: int = 0
    draft_passes: int = 0
    target_accepted: int = 0
    target_proposed: int = 0
    retrieval_accepted: int = 0
    retrieval_proposed: int = 0

    def __add__(self, other: Stats) -> Stats:
        """Sums of two groups that ran one after the other; the first token is the first's."""
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)
        }
        sums["first_token_seconds"] = self.first_token_seconds or other.first_token_seconds
        return Stats(**sums)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of streamed text whose tokens were all verified, and all came the same way.

    Attributes:
      text: the new text; may be empty while a character is incomplete.
      origin: "draft" (proposed by the draft, accepted twice), "retrieval" (the retrieval level's,
        accepted by the target), "target" (the target's correction) or "bonus" (the target's own
        token after a block that it accepted whole).
      token_ids: the tokens.
    """

    text: str
    origin: str
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class GenerationOutput:
    """Results in the order of the prompts.

    Attributes:
      texts: the outputs, without special tokens; empty without a tokenizer.
      token_ids: the outputs' tokens, without the prompt; EOS is kept if emitted.
      finish_reasons: "eos", "stop" or "length".
      prompt_lengths: tokens of each prompt.
      origins: where each token came from, see `Piece.origin`.
      stats: times and counts of the whole call.
    """

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    prompt_lengths: list[int]
    origins: list[list[str]]
    stats: Stats

    def __add__(self, other: GenerationOutput) -> GenerationOutput:
        """The results of two groups that ran one after the other."""
        return GenerationOutput(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )
