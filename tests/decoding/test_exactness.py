"""The output's distribution is the target's: by enumeration, for the very code that decodes.

Models are tables of probabilities by row, position and previous token. One outer step is a
function of its uniforms that is constant on boxes of the unit cube; the oracle here lists those
boxes from the definition of the algorithm (DESIGN 2), independently and in float64. The jitted
step runs on two points of every box; both must emit the same tokens, and the volumes of the boxes
by the tokens emitted there must be the target's distribution, to 1e-6.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from triforce_jax.cache.full import KVCache
from triforce_jax.config import DecodeConfig, SamplingParams
from triforce_jax.decoding import rejection
from triforce_jax.decoding.levels import Levels
from triforce_jax.decoding.loop import outer_step
from triforce_jax.decoding.sampling import RowSampling, probabilities
from triforce_jax.decoding.state import Caches, Counters, DecodeState, Request
from triforce_jax.decoding.verify import VERIFY_ROUND
from triforce_jax.shapes import Shapes

NUM_TOKENS = 3  # whose joint distribution is enumerated
POSITIONS = 16
ROWS = 2  # tables differ from row to row
CHUNK = 2048  # boxes that run at once
PROMPT = (1,)


@dataclasses.dataclass(frozen=True)
class Tables:
    """Logits `[ROWS, POSITIONS, V, V]` of the three levels: row, position, token, next token."""

    p: np.ndarray
    r: np.ndarray
    q: np.ndarray

    @classmethod
    def random(cls, vocab: int, seed: int) -> "Tables":
        """Distributions that resemble each other, with probabilities of zero among them."""
        rng = np.random.default_rng(seed)
        shape = (ROWS, POSITIONS, vocab, vocab)
        base = rng.normal(size=shape)

        def one(noise: float) -> np.ndarray:
            logits = (base + noise * rng.normal(size=shape)).astype(np.float32)
            zero = rng.random(shape) < 0.1
            zero[..., 0] = False
            return np.where(zero, -np.inf, logits).astype(np.float32)

        return cls(one(0.7), one(0.7), one(1.0))

    def levels(self, model_draft: bool) -> Levels:
        def look(table):
            table = jnp.asarray(table)

            def run(caches, tokens, positions, *_):
                at = positions[:, None] + jnp.arange(tokens.shape[1])
                parity = jnp.arange(tokens.shape[0])[:, None] % ROWS
                return table[parity, jnp.minimum(at, POSITIONS - 1), tokens], caches

            return run

        return Levels(
            draft=look(self.q) if model_draft else None,
            retrieval=look(self.r),
            target=look(self.p),
            install=lambda caches, before, after: caches,
            vocab_size=self.p.shape[-1],
        )

    def probabilities(self, params: SamplingParams) -> "Tables":
        """The tables after the sampling transform, float64."""
        sampling = RowSampling.of([params] * ROWS)

        def transform(logits):
            flat = logits.reshape(ROWS, -1, logits.shape[-1])
            probs = np.asarray(probabilities(jnp.asarray(flat), sampling), np.float64)
            return (probs / probs.sum(-1, keepdims=True)).reshape(logits.shape)

        return Tables(transform(self.p), transform(self.r), transform(self.q))


# --- the oracle -----------------------------------------------------------------------------------


def true_residual(p, q):
    rest = np.maximum(p - q, 0)
    return rest if rest.sum() > 1e-12 else p


def draws(weights):
    """Each token of positive weight, and the uniforms that draw it."""
    ends = np.cumsum(weights) / weights.sum()
    for token, weight in enumerate(weights):
        if weight > 0:
            yield token, (ends[token] - weight / weights.sum(), ends[token])


def rejections(p, q, proposals, residual):
    """Outcomes of one rejection step: tokens, uniforms of the coins, uniforms of the last token."""
    coins = []
    for i, x in enumerate(proposals):
        accept = min(1.0, p[i][x] / q[i][x])
        if accept < 1:
            for token, box in draws(residual(p[i], q[i])):
                yield [*proposals[:i], token], [*coins, (accept, 1.0)], box
        if accept == 0:
            return
        coins.append((0.0, accept))
    for token, box in draws(p[len(proposals)]):
        yield [*proposals, token], coins, box


def look_up(tokens, longest):
    """The n-gram draft's next token: after the newest of the longest earlier matches."""
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length]
    return tokens[-1]


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Lists the boxes of one outer step of one row."""

    tables: Tables  # probabilities
    row: int
    config: DecodeConfig
    model_draft: bool
    eos: tuple
    residual: object

    def after(self, table, tokens):
        return table[self.row, len(tokens) - 1, tokens[-1]]

    def proposals(self, tokens, count):
        """The draft's sequences, their distributions, and the uniforms that draw them."""
        if not self.model_draft:
            found = []
            for _ in range(count):
                found.append(look_up([*tokens, *found], self.config.ngram))
            yield found, [np.eye(self.tables.p.shape[-1])[x] for x in found], [(0.0, 1.0)] * count
        else:
            yield from self._drawn(tokens, count)

    def _drawn(self, tokens, count):
        if count == 0:
            yield [], [], []
            return
        q = self.after(self.tables.q, tokens)
        for x, box in draws(q):
            for rest, qs, boxes in self._drawn([*tokens, x], count - 1):
                yield [x, *rest], [q, *qs], [box, *boxes]

    def candidates(self, tokens, wanted):
        """Candidates, their proposal distributions, and the uniforms of each round."""
        if self.config.method == "draft":
            for x, q, boxes in self.proposals(tokens, self.config.gamma):
                yield x[:wanted], q[:wanted], [boxes]
            return
        if wanted <= 0 or self.config.method == "autoregressive":
            yield [], [], []
            return
        num = self.config.draft_gamma if self.config.method == "triforce" else 0
        for x, q, drawn in self.proposals(tokens, num):
            r = [self.after(self.tables.r, [*tokens, *x[:i]]) for i in range(num + 1)]
            for new, coins, last in rejections(r, q, x, self.residual):
                coins = coins + [(0.0, 1.0)] * (num - len(coins))
                this_round = [*drawn, *coins, last]
                left = 0 if set(new) & set(self.eos) else wanted - len(new)
                for rest, rs, rounds in self.candidates([*tokens, *new], left):
                    yield new + rest, r[: len(new)] + rs, [this_round, *rounds]

    def boxes(self, tokens, wanted):
        """(rounds, verification, tokens emitted) of every box."""
        width = Shapes.of(self.config).candidates
        for x, r, rounds in self.candidates(tokens, wanted):
            p = [self.after(self.tables.p, [*tokens, *x[:i]]) for i in range(len(x) + 1)]
            for new, coins, last in rejections(p, r, x, self.residual):
                coins = coins + [(0.0, 1.0)] * (width - len(coins))
                yield rounds, [*coins, last], new


# --- the jitted step ------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Step:
    """The step under test: distributions of what it emits after given tokens."""

    tables: Tables
    params: SamplingParams
    config: DecodeConfig
    model_draft: bool = True
    eos: tuple = ()
    residual: object = staticmethod(true_residual)

    def __post_init__(self):
        self.shapes = Shapes.of(self.config)
        self.probs = self.tables.probabilities(self.params)
        self.widths = (
            max(self.config.gamma, 1),
            max(2 * self.shapes.draft_proposals + 1, 1),
            self.shapes.candidates + 1,
        )
        levels = self.tables.levels(self.model_draft)

        def run(state, rounds, verification):
            def draw(index, count):
                if isinstance(index, int) and index == VERIFY_ROUND:
                    return verification[:, :count]
                return jnp.take(rounds, index, axis=1)[:, :count]

            return outer_step(levels, self.config, self.shapes, state, draw)

        self.run = jax.jit(run)

    def state(self, tokens, first: bool) -> DecodeState:
        history = np.zeros((CHUNK, self.shapes.token_slots), np.int32)
        history[:, : len(tokens)] = tokens
        rows = np.ones((CHUNK,), np.int32)
        return DecodeState(
            tokens=jnp.asarray(history),
            origins=jnp.zeros(history.shape, jnp.int8),
            lengths=jnp.asarray(rows * (len(tokens) - 1)),
            done=jnp.zeros((CHUNK,), bool),
            finish=jnp.zeros((CHUNK,), jnp.int8),
            step=jnp.int32(0 if first else 3),
            caches=Caches(KVCache((), ()), None, None),
            counters=Counters.zeros(CHUNK),
            request=Request(
                sampling=RowSampling.of([self.params] * CHUNK),
                keys=jnp.zeros((CHUNK, 2), jnp.uint32),
                prompt_lengths=jnp.asarray(rows * len(PROMPT)),
                limits=jnp.asarray(rows * (len(PROMPT) + NUM_TOKENS)),
                eos_ids=jnp.asarray(np.tile((*self.eos, -1), (CHUNK, 1)).astype(np.int32)),
            ),
        )

    def emitted(self, tokens, first, rounds, verification):
        """What the jitted step emits for uniforms `[X, ...]`; every row has a table's parity."""
        out = []
        state = self.state(tokens, first)
        for start in range(0, len(rounds), CHUNK):
            pieces = [a[start : start + CHUNK] for a in (rounds, verification)]
            count = len(pieces[0])
            pieces = [np.pad(a, [(0, CHUNK - count)] + [(0, 0)] * (a.ndim - 1)) for a in pieces]
            end = self.run(state, *(a.astype(np.float32) for a in pieces))
            lengths, got = np.asarray(end.lengths), np.asarray(end.tokens)
            out += [tuple(got[i, len(tokens) : lengths[i] + 1].tolist()) for i in range(count)]
        return out

    @functools.cache  # noqa: B019
    def distribution(self, row, tokens, first):
        """{tokens emitted: probability} of one step after `tokens`."""
        room = len(PROMPT) + NUM_TOKENS - len(tokens)
        wanted = min(max(room - 1, 0), self.config.gamma)
        if first and self.config.uses_retrieval:
            wanted = 0
        oracle = Oracle(self.probs, row, self.config, self.model_draft, self.eos, self.residual)
        boxes = list(oracle.boxes(list(tokens), wanted))
        bounds = [
            np.tile([0.0, 1.0], (len(boxes), *w, 1)) for w in (self.widths[:2], self.widths[2:])
        ]
        for i, (rounds, verification, _) in enumerate(boxes):
            for j, one_round in enumerate(rounds):
                bounds[0][i, j, : len(one_round)] = one_round
            bounds[1][i] = verification
        volume = np.prod(bounds[0][..., 1] - bounds[0][..., 0], axis=(1, 2))
        volume *= np.prod(bounds[1][..., 1] - bounds[1][..., 0], axis=1)
        np.testing.assert_allclose(volume.sum(), 1, atol=1e-9)  # they fill the cube

        rng = np.random.default_rng(0)

        def at(share):
            # Alternating rows hold the other table, with uniforms of their own.
            points = [b[..., 0] + (b[..., 1] - b[..., 0]) * share(b[..., 0].shape) for b in bounds]
            wide = []
            for a in points:
                both = rng.random((ROWS * len(a), *a.shape[1:]))
                both[row::ROWS] = a
                wide.append(both)
            return self.emitted(tokens, first, *wide)[row::ROWS]

        middle = at(lambda shape: np.full(shape, 0.5))
        elsewhere = at(lambda shape: rng.uniform(0.05, 0.95, shape))
        differing = sum(v for v, a, b in zip(volume, middle, elsewhere, strict=True) if a != b)
        assert differing < 1e-7, "not constant on a box"
        result = {}
        for some, mass in zip(middle, volume, strict=True):
            result[some] = result.get(some, 0.0) + mass
        return result

    def joint(self, row):
        """{first NUM_TOKENS tokens, fewer after EOS: probability}, over as many steps as needed."""
        result = {}

        def go(tokens, mass, first):
            new = tokens[len(PROMPT) :]
            if len(new) == NUM_TOKENS or (new and new[-1] in self.eos):
                result[new] = result.get(new, 0.0) + mass
                return
            for some, share in self.distribution(row, tokens, first).items():
                assert some, "a step emits at least one token"
                go(tokens + some, mass * share, False)

        go(PROMPT, 1.0, True)
        return result

    def truth(self, row):
        """The target's own distribution."""
        result = {}

        def go(tokens, mass):
            new = tokens[len(PROMPT) :]
            if len(new) == NUM_TOKENS or (new and new[-1] in self.eos):
                result[new] = mass
                return
            p = self.probs.p[row, len(tokens) - 1, tokens[-1]]
            for token, share in enumerate(p):
                if share > 0:
                    go((*tokens, token), mass * share)

        go(PROMPT, 1.0)
        return result

    def error(self):
        """Largest difference between the probabilities of any output."""
        worst = 0.0
        for row in range(ROWS):
            got, want = self.joint(row), self.truth(row)
            worst = max(worst, *(abs(got.get(k, 0) - want.get(k, 0)) for k in got | want))
        return worst


def config(method, gamma, draft_gamma=1) -> DecodeConfig:
    return DecodeConfig(
        method=method,
        gamma=gamma,
        draft_gamma=draft_gamma,
        max_length=POSITIONS - 4,
        budget=16,
        chunk_size=4,
        recent_window=4,
        draft_budget=8,
        draft_sinks=2,
        prefill_chunk=8,
    )


PLAIN = SamplingParams(temperature=1.0, top_p=1.0)
SHAPED = SamplingParams(temperature=0.7, top_p=0.85, top_k=3, min_p=0.05)
CASES = [
    ("triforce", gamma, draft_gamma) for gamma, draft_gamma in itertools.product((1, 2, 3), (1, 2))
]
CASES += [("retrieval", gamma, 1) for gamma in (1, 2, 3)]
CASES += [("draft", gamma, 1) for gamma in (1, 2, 3)]
CASES += [("autoregressive", 1, 1)]


@pytest.mark.parametrize(("method", "gamma", "draft_gamma"), CASES)
def test_first_tokens_are_distributed_as_the_target(method, gamma, draft_gamma):
    vocab = 3 if gamma + draft_gamma < 5 else 2
    tables = Tables.random(vocab, seed=gamma)
    assert Step(tables, PLAIN, config(method, gamma, draft_gamma)).error() < 1e-6


@pytest.mark.parametrize("method", ["triforce", "retrieval", "draft"])
def test_with_the_sampling_transform(method):
    assert Step(Tables.random(6, seed=5), SHAPED, config(method, 1)).error() < 1e-6
    assert Step(Tables.random(4, seed=6), SHAPED, config(method, 2)).error() < 1e-6


@pytest.mark.parametrize("method", ["triforce", "retrieval", "draft"])
def test_with_eos_inside_a_block(method):
    step = Step(Tables.random(3, seed=7), PLAIN, config(method, 3), eos=(2,))
    assert any(len(k) < NUM_TOKENS for k in step.truth(0))
    assert step.error() < 1e-6


@pytest.mark.parametrize(("method", "gamma"), [("triforce", 1), ("triforce", 3), ("draft", 3)])
def test_with_the_ngram_draft(method, gamma):
    step = Step(Tables.random(3, seed=8), PLAIN, config(method, gamma), model_draft=False)
    assert step.error() < 1e-6


@pytest.mark.parametrize("method", ["triforce", "retrieval", "draft"])
def test_the_proof_sees_a_wrong_residual(monkeypatch, method):
    """What the published code does: sample the verifier itself where the residual belongs."""
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    step = Step(Tables.random(3, seed=2), PLAIN, config(method, 2), residual=lambda p, q: p)
    assert step.error() > 1e-3
