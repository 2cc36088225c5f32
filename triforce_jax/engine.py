"""Runs one batch of token prompts through the compiled programs: prefill, then decode in blocks.

All that happens on the host between two compiled calls is here: which passes a prompt needs,
progress, times, and taking new tokens from the device once a block.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from triforce_jax.config import SamplingParams
from triforce_jax.decoding import prefill
from triforce_jax.decoding.programs import Programs
from triforce_jax.decoding.sampling import RowSampling
from triforce_jax.decoding.state import (
    FINISH_REASONS,
    ORIGINS,
    Caches,
    Counters,
    DecodeState,
    Request,
)
from triforce_jax.outputs import Stats

# More outer steps than any row can take.
ALL_STEPS = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch: a prompt of at least one token, its parameters and EOS ids.

    Attributes:
      prompt: token ids.
      params: sampling parameters.
      eos_ids: ids that end the row; none with `ignore_eos`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    eos_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block of outer steps brought: for each row the new tokens and their origins."""

    token_ids: list[list[int]]
    origins: list[list[str]]


def random_key(seed: int | None) -> np.ndarray:
    """The key of one row, from its seed alone; None draws a fresh seed from the system."""
    value = secrets.randbits(63) if seed is None else int(seed)
    return np.array([value >> 32, value & 0xFFFFFFFF], np.uint32)


class Engine:
    """Decodes one batch at a time; the caches live on from batch to batch.

    Args:
      programs: the compiled programs.
      progress: show a progress bar of the prefill on stderr.
    """

    def __init__(self, programs: Programs, *, progress: bool):
        self.programs = programs
        self.progress = progress
        self._caches: Caches | None = None

    def run(self, rows: Sequence[Row]) -> Run:
        """Reads the prompts; the result then decodes them.

        At most `batch_size` rows, whose prompts and limits fit `max_length`.
        """
        return Run(self, rows)

    def score(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Logits `[B, T, V]` float32 of each prompt; a shorter row ends in NaN."""
        shapes = self.programs.shapes
        tokens, lengths = self._padded(prompts)
        longest = int(lengths.max())
        out = np.full((len(prompts), longest, self.programs.model.vocab_size), np.nan, np.float32)
        caches = self.take_caches()
        for start in range(0, longest, shapes.prefill_small):
            piece = tokens[:, start : start + shapes.prefill_small]
            logits, caches = self.programs.score(
                self.programs.weights, caches, piece, np.int32(start), lengths
            )
            for row in range(len(prompts)):
                count = min(max(int(lengths[row]) - start, 0), shapes.prefill_small)
                out[row, start : start + count] = np.asarray(logits[row, :count])
        self.put_caches(caches)
        return out

    def take_caches(self) -> Caches:
        """The caches, which the next program call consumes; new ones if a call failed."""
        caches, self._caches = self._caches, None
        return self.programs.new_caches() if caches is None else caches

    def put_caches(self, caches: Caches) -> None:
        """Gives the caches back for the next batch; not those that a failed call consumed."""
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(caches))
        self._caches = None if lost else caches

    def prefill(self, rows: Sequence[Row]) -> DecodeState:
        """Feeds all but the last token of every prompt and builds the state to decode from."""
        programs, shapes = self.programs, self.programs.shapes
        b = programs.config.batch_size
        tokens, prompt_lengths = self._padded([row.prompt for row in rows])
        fed = prompt_lengths - 1
        passes = prefill.plan(int(fed.max()), shapes)
        caches = self.take_caches()
        bar = tqdm(
            total=int(fed.max()), unit="tok", desc="prefill", disable=not self.progress, leave=False
        )
        with bar:
            for one in passes:
                piece = tokens[:, one.start : one.start + one.width]
                start = np.int32(one.start)
                caches = programs.prefill_target(
                    programs.weights, caches, piece, start, prompt_lengths
                )
                model = programs.draft_model
                if model and prefill.draft_needs(one, fed.tolist(), model, programs.config):
                    real = np.clip(fed - one.start, 0, one.width).astype(np.int32)
                    caches = programs.prefill_draft(programs.weights, caches, piece, start, real)
                if self.progress:
                    jax.block_until_ready(caches.target.keys[-1])
                    bar.update(min(one.width, int(fed.max()) - one.start))
        padding = SamplingParams(temperature=0.0, max_new_tokens=0, seed=0)
        params = [row.params for row in rows] + [padding] * (b - len(rows))
        most_eos = max(1, *(len(row.eos_ids) for row in rows))
        eos_ids = np.full((b, -(-most_eos // 4) * 4), -1, np.int32)
        for i, row in enumerate(rows):
            eos_ids[i, : len(row.eos_ids)] = row.eos_ids
        limits = prompt_lengths + np.array([p.max_new_tokens for p in params], np.int32)
        return DecodeState(
            tokens=jnp.asarray(tokens),
            origins=jnp.zeros(tokens.shape, jnp.int8),
            lengths=jnp.asarray(fed),
            done=jnp.asarray(limits <= prompt_lengths),
            finish=jnp.zeros((b,), jnp.int8),
            step=jnp.int32(0),
            caches=caches,
            counters=Counters.zeros(b),
            request=Request(
                sampling=RowSampling.of(params),
                keys=jnp.asarray(np.stack([random_key(p.seed) for p in params])),
                prompt_lengths=jnp.asarray(prompt_lengths),
                limits=jnp.asarray(limits),
                eos_ids=jnp.asarray(eos_ids),
            ),
        )

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Token history `[B, Z]` and lengths `[B]`; rows without a prompt hold one token."""
        b = self.programs.config.batch_size
        tokens = np.zeros((b, self.programs.shapes.token_slots), np.int32)
        lengths = np.ones((b,), np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        return tokens, lengths


class Run:
    """One batch on its way: call `step` until `done`, then `close`.

    Args:
      engine: its caches are lent to this run until `close`.
      rows: the batch.
    """

    def __init__(self, engine: Engine, rows: Sequence[Row]):
        self._engine = engine
        self._num_rows = len(rows)
        start = time.perf_counter()
        self._state: DecodeState = jax.block_until_ready(engine.prefill(rows))
        self._prefill_seconds = time.perf_counter() - start
        self._decode_seconds = 0.0
        self._first_token_seconds = 0.0
        self._seen = np.array([len(row.prompt) for row in rows])
        self.done = [row.params.max_new_tokens == 0 for row in rows]

    def step(self, max_steps: int) -> Block:
        """Takes outer steps until all rows are done, at most `max_steps`."""
        start = time.perf_counter()
        programs = self._engine.programs
        self._state = programs.decode(programs.weights, self._state, np.int32(max_steps))
        state = self._state
        lengths, done, tokens, origins = jax.device_get(
            (state.lengths, state.done, state.tokens, state.origins)
        )
        self._decode_seconds += time.perf_counter() - start
        if not self._first_token_seconds:
            self._first_token_seconds = self._prefill_seconds + self._decode_seconds
        block = Block([], [])
        for row in range(self._num_rows):
            new = slice(self._seen[row], lengths[row] + 1)
            block.token_ids.append(tokens[row, new].tolist())
            block.origins.append([ORIGINS[code] for code in origins[row, new]])
            self._seen[row] = lengths[row] + 1
        self.done = done[: self._num_rows].tolist()
        return block

    def stop(self, rows: Sequence[bool]) -> None:
        """Ends the rows for which True is given, as a stop string does."""
        ended = np.zeros(self._state.done.shape, bool)
        ended[: self._num_rows] = rows
        self._state = dataclasses.replace(self._state, done=self._state.done | ended)
        self.done = [a or b for a, b in zip(self.done, rows, strict=True)]

    def finish_reasons(self) -> list[str]:
        """ "length" or "eos" of each row that is done of itself."""
        return [FINISH_REASONS[code] for code in self._state.finish[: self._num_rows].tolist()]

    def stats(self) -> Stats:
        """Times and counts so far."""
        counters = {
            field.name: int(getattr(self._state.counters, field.name)[: self._num_rows].sum())
            for field in dataclasses.fields(Counters)
        }
        return Stats(
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            first_token_seconds=self._first_token_seconds or self._prefill_seconds,
            **counters,
        )

    def close(self) -> None:
        """Gives the caches back to the engine."""
        self._engine.put_caches(self._state.caches)
