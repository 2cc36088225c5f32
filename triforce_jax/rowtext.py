"""Text of one row as its tokens arrive: incremental detokenizing and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from triforce_jax.outputs import Piece

if TYPE_CHECKING:
    from triforce_jax.tokenizer import Detokenizer


class RowText:
    """Collects a row's tokens, and cuts the text at the first stop string.

    Args:
      detokenizer: None where the checkpoint has no tokenizer: text stays empty.
      stop: strings at which the output ends; never part of it.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str]):
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""  # text that may yet turn out to begin a stop string
        self.text = ""
        self.token_ids: list[int] = []
        self.origins: list[str] = []
        self.stopped = False

    def push(self, token_ids: Sequence[int], origins: Sequence[str]) -> list[Piece]:
        """Takes new tokens; returns the pieces that are final. Tokens after a stop are dropped."""
        pieces: list[Piece] = []
        for token, origin in zip(token_ids, origins, strict=True):
            if self.stopped:
                break
            self.token_ids.append(token)
            self.origins.append(origin)
            new = self._detokenizer.push([token]) if self._detokenizer else ""
            text = self._release(new)
            self.text += text
            if pieces and pieces[-1].origin == origin:
                last = pieces.pop()
                pieces.append(Piece(last.text + text, origin, (*last.token_ids, token)))
            else:
                pieces.append(Piece(text, origin, (token,)))
        return pieces

    def finish(self) -> str:
        """The text held back to the end."""
        if self.stopped:
            return ""
        rest = self._release(self._detokenizer.flush() if self._detokenizer else "")
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        self.text += rest
        return rest

    def _release(self, new: str) -> str:
        """Adds text; returns what cannot become part of a stop string any more."""
        self._held += new
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max(
            (
                n
                for s in self._stop
                for n in range(1, min(len(s), len(self._held) + 1))
                if self._held.endswith(s[:n])
            ),
            default=0,
        )
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text
