"""The one public object: loads checkpoints, takes text, chats or tokens, and gives text back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from triforce_jax import checkpoint
from triforce_jax.attention.dispatch import check_implementation
from triforce_jax.checkpoint import Checkpoint
from triforce_jax.config import DecodeConfig, SamplingParams
from triforce_jax.decoding.programs import Programs
from triforce_jax.engine import ALL_STEPS, Block, Engine, Row, Run
from triforce_jax.errors import InputError
from triforce_jax.outputs import GenerationOutput, Piece, Stats
from triforce_jax.rowtext import RowText
from triforce_jax.tokenizer import Tokenizer

# A text, a chat (messages with "role" and "content"), or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]

NGRAM = "ngram"
# With stop strings, the text is looked at after so many outer steps.
_STOP_BLOCK = 8


class Generator:
    """Generates losslessly with a target model and, if there is one, a draft.

    Args:
      target: the checkpoint whose distribution is sampled.
      draft: a checkpoint of a small model, "ngram" (look-up in the tokens so far), or None.
      config: how to decode.
      mesh: devices to shard over, see sharding.py; None: the default device.
      progress: show progress bars on stderr.

    Raises:
      InputError: the two checkpoints' tokenizers differ, `method="draft"` without a draft, or a
        length beyond the model's limit.
    """

    def __init__(
        self,
        target: Checkpoint,
        draft: Checkpoint | str | None,
        config: DecodeConfig,
        *,
        mesh: Mesh | None = None,
        progress: bool = True,
    ):
        check_decoding(config, draft is not None)
        limit = target.config.context_limit
        if config.max_length > limit:
            raise InputError(
                "max_length",
                config.max_length,
                f"at most {limit}, the context of {target.name}",
                "lower max_length",
            )
        model = None
        if isinstance(draft, Checkpoint):
            if target.tokenizer and draft.tokenizer:
                target.tokenizer.check_same(draft.tokenizer)
            elif target.config.vocab_size != draft.config.vocab_size:
                raise InputError(
                    "draft",
                    f"{draft.name} with {draft.config.vocab_size} tokens",
                    f"the vocabulary of {target.name} ({target.config.vocab_size} tokens)",
                )
            model = draft.model
        self.config = config
        self.tokenizer: Tokenizer | None = target.tokenizer
        self.name = target.name
        self.eos_ids = target.eos_ids
        self.vocab_size = target.config.vocab_size
        self._engine = Engine(Programs(target.model, model, config, mesh), progress=progress)

    @classmethod
    def from_pretrained(
        cls,
        target: str | os.PathLike[str],
        draft: str | os.PathLike[str] | None = None,
        *,
        method: str = "triforce",
        dtype: DTypeLike = "bfloat16",
        mesh: Mesh | None = None,
        progress: bool = True,
        **decode: Any,
    ) -> Generator:
        """Loads checkpoints: HF or Orbax directories, .gguf files or hub ids.

        Args:
          target: the model whose distribution is sampled.
          draft: the same kinds, "ngram", or None (the retrieval level proposes by itself).
          method: "triforce" (without a draft: "retrieval"), "retrieval", "draft" or
            "autoregressive".
          dtype: of weights, activations and caches.
          mesh: devices to shard over.
          progress: show progress bars on stderr.
          **decode: the other fields of `DecodeConfig`. `max_length` is by default 4096 or, if it
            is less, the model's limit.

        Raises:
          InputError: bad input, told in one line.
        """
        config = decode_config(method, draft is not None, decode)
        check_decoding(config, draft is not None)
        loaded = checkpoint.load(target, dtype=dtype, mesh=mesh, progress=progress, field="target")
        if "max_length" not in decode and config.max_length > loaded.config.context_limit:
            decode = {**decode, "max_length": loaded.config.context_limit}
            config = decode_config(method, draft is not None, decode)
        helper: Checkpoint | str | None = None
        if draft is not None and config.uses_draft:
            helper = NGRAM
            if str(draft) != NGRAM:
                helper = checkpoint.load(
                    draft, dtype=dtype, mesh=mesh, progress=progress, field="draft"
                )
        return cls(loaded, helper, config, mesh=mesh, progress=progress)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None
    ) -> GenerationOutput:
        """Generates for every prompt, `batch_size` rows at a time.

        Args:
          prompts: one prompt or a list of them.
          params: for all prompts, or one for each.

        Raises:
          InputError: an empty prompt, a token id out of range, or a prompt whose tokens and
            `max_new_tokens` exceed `max_length`.
        """
        rows = self._rows(prompts, params)
        out = GenerationOutput([], [], [], [], [], Stats())
        for start in range(0, len(rows), self.config.batch_size):
            stream = Stream(self, rows[start : start + self.config.batch_size], block=_STOP_BLOCK)
            out = out + stream.finish()
        return out

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Generates for one prompt; iterate over the result for pieces of text as verified.

        The tokens are those of `generate` with the same seed. Raises InputError as `generate`.
        """
        return Stream(self, self._rows([prompt], params), block=1)

    def score(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
        """The target's logits for every position, through the chunked prefill path.

        Args:
          token_ids: one row of ids, or up to `batch_size` rows.

        Returns:
          float32 `[B, T, V]`; a row shorter than the longest ends in NaN.
        """
        rows = self._token_rows(token_ids)
        if len(rows) > self.config.batch_size:
            raise InputError(
                "token_ids", f"{len(rows)} rows", f"at most batch_size ({self.config.batch_size})"
            )
        for ids in rows:
            self._check_length(len(ids), 0)
        return self._engine.score(rows)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises InputError as `generate` does."""
        if isinstance(prompt, str):
            ids = self._need_tokenizer().encode(prompt) if prompt else []
        elif len(prompt) and isinstance(prompt[0], Mapping):
            ids = self._need_tokenizer().encode_chat(prompt)  # type: ignore[arg-type]
        else:
            ids = [self._check_id(token) for token in prompt]
        if not ids:
            raise InputError("prompt", "an empty prompt", "at least one token")
        return ids

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                "prompt",
                "text",
                f"token ids, as {self.name} has no tokenizer",
                "pass a list of ids",
            )
        return self.tokenizer

    def _check_id(self, token: Any) -> int:
        whole = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not whole or not 0 <= token < self.vocab_size:
            raise InputError(
                "prompt", f"token {token!r}", f"a whole number from 0 to {self.vocab_size - 1}"
            )
        return int(token)

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt + new > self.config.max_length:
            raise InputError(
                "prompt",
                f"{prompt} tokens and max_new_tokens {new}",
                f"at most max_length ({self.config.max_length}) together",
                "raise max_length, shorten the prompt or lower max_new_tokens",
            )

    def _token_rows(self, token_ids: Any) -> list[list[int]]:
        rows = [token_ids] if len(token_ids) and np.ndim(token_ids[0]) == 0 else token_ids
        if not len(rows) or not all(len(row) for row in rows):
            raise InputError("token_ids", "an empty row", "rows of at least one token")
        return [[self._check_id(token) for token in row] for row in rows]

    def _rows(self, prompts: Any, params: Params | None) -> list[Row]:
        if is_one_prompt(prompts):
            prompts = [prompts]
        given = params if params is not None else SamplingParams()
        each = [given] * len(prompts) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(prompts):
            raise InputError(
                "params", f"{len(each)} SamplingParams", f"one, or one a prompt ({len(prompts)})"
            )
        rows = []
        for prompt, row_params in zip(prompts, each, strict=True):
            ids = self.encode(prompt)
            self._check_length(len(ids), row_params.max_new_tokens)
            if row_params.stop:
                self._need_tokenizer()
            eos_ids = () if row_params.ignore_eos else self.eos_ids
            rows.append(Row(tuple(ids), row_params, eos_ids))
        return rows


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt by itself (text, chat or ids) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    return (
        len(prompts) > 0
        and (isinstance(prompts[0], Mapping) or np.ndim(prompts[0]) == 0)
        and (not isinstance(prompts[0], str))
    )


def decode_config(method: str, has_draft: bool, fields: Mapping[str, Any]) -> DecodeConfig:
    """The configuration; without a draft, "triforce" is its retrieval level alone.

    Raises:
      InputError: an unknown field, or a bad value.
    """
    if method == "triforce" and not has_draft:
        method = "retrieval"
    unknown = sorted(set(fields) - set(DecodeConfig.__dataclass_fields__))
    if unknown:
        raise InputError(
            unknown[0], "an unknown argument", f"one of {sorted(DecodeConfig.__dataclass_fields__)}"
        )
    return DecodeConfig(method=method, **fields)  # type: ignore[arg-type]


def check_decoding(config: DecodeConfig, has_draft: bool) -> None:
    """Raises InputError for a method without its draft or an unknown attention."""
    check_implementation(config.attention)
    if config.method == "draft" and not has_draft:
        raise InputError("draft", "None", "a checkpoint or 'ngram' for method 'draft'")


class Stream:
    """Pieces of text as they are verified. Iterate once; `output` is complete after that.

    Args:
      generator: where to generate.
      rows: the batch; pieces are given for its first row.
      block: outer steps between two looks from the host.
    """

    def __init__(self, generator: Generator, rows: Sequence[Row], *, block: int):
        self._generator = generator
        self._rows = rows
        self._block = block
        tokenizer = generator.tokenizer
        self._texts = [
            RowText(tokenizer.detokenizer() if tokenizer else None, row.params.stop) for row in rows
        ]
        self._started = False
        self._output: GenerationOutput | None = None

    @property
    def output(self) -> GenerationOutput:
        """The whole result. Raises RuntimeError before the iteration has ended."""
        if self._output is None:
            raise RuntimeError("the stream has not ended: iterate over it first")
        return self._output

    def finish(self) -> GenerationOutput:
        """Runs to the end without giving pieces."""
        for _ in self:
            pass
        return self.output

    def __iter__(self) -> Iterator[Piece]:
        if self._started:
            raise RuntimeError("a stream can be iterated over once")
        self._started = True
        run = self._generator._engine.run(self._rows)
        try:
            yield from self._pieces(run)
        finally:
            run.close()

    def _pieces(self, run: Run) -> Iterator[Piece]:
        looks = self._block == 1 or any(row.params.stop for row in self._rows)
        first = True
        while not all(run.done):
            # The first step by itself: its end is the time to first token.
            steps = 1 if first else self._block if looks else ALL_STEPS
            first = False
            yield from self._take(run, run.step(steps))
        last = ""
        for row, text in enumerate(self._texts):
            rest = text.finish()
            last = rest if row == 0 else last
        reasons = [
            "stop" if text.stopped else reason
            for text, reason in zip(self._texts, run.finish_reasons(), strict=True)
        ]
        self._output = GenerationOutput(
            texts=[text.text for text in self._texts],
            token_ids=[text.token_ids for text in self._texts],
            finish_reasons=reasons,
            prompt_lengths=[len(row.prompt) for row in self._rows],
            origins=[text.origins for text in self._texts],
            stats=run.stats(),
        )
        if last:
            yield Piece(last, self._texts[0].origins[-1], ())

    def _take(self, run: Run, block: Block) -> list[Piece]:
        pieces: list[Piece] = []
        for row, text in enumerate(self._texts):
            new = text.push(block.token_ids[row], block.origins[row])
            pieces = new if row == 0 else pieces
        stopped = [text.stopped for text in self._texts]
        if any(s and not d for s, d in zip(stopped, run.done, strict=True)):
            run.stop(stopped)
        return pieces
