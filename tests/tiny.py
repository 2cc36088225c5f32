"""Small random models and engines for tests."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from triforce_jax.config import DecodeConfig, ModelConfig, SamplingParams
from triforce_jax.decoding.programs import Programs
from triforce_jax.engine import ALL_STEPS, Engine, Row
from triforce_jax.models.llama import Llama

MODEL = ModelConfig(
    vocab_size=61,
    embed_dim=32,
    mlp_dim=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=2048,
)
DRAFT = dataclasses.replace(MODEL, embed_dim=16, mlp_dim=24, num_layers=1, num_kv_heads=4)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, seed=0)
# Small enough that a hundred tokens go through selection, the ring and several windows.
DECODE = DecodeConfig(
    max_length=256,
    gamma=3,
    budget=32,
    chunk_size=4,
    recent_window=8,
    draft_budget=16,
    draft_sinks=4,
    prefill_chunk=64,
)


def llama(config=MODEL, seed=0, dtype=jnp.float32) -> Llama:
    """A random model; twice the usual scale, so that its texts do not fall into a loop at once."""
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(seed))
    nnx.update(model, nnx.map(lambda _, leaf: leaf * 2, nnx.state(model)))
    return model


def engine(method="triforce", draft=DRAFT, config=DECODE, target=None, **changes) -> Engine:
    """An engine of random models; `draft` is a config, a model or None (n-gram)."""
    config = dataclasses.replace(config, method=method, **changes)
    target = target or llama()
    if isinstance(draft, ModelConfig):
        draft = llama(draft, seed=1)
    return Engine(Programs(target, draft if config.uses_draft else None, config), progress=False)


def row(prompt, eos_ids=(), params=GREEDY, **changes) -> Row:
    return Row(tuple(int(i) for i in prompt), dataclasses.replace(params, **changes), eos_ids)


@dataclasses.dataclass
class Result:
    token_ids: list
    origins: list
    finish_reasons: list
    stats: object


def decode(engine: Engine, rows, block=ALL_STEPS) -> Result:
    """Decodes one batch to its end."""
    run = engine.run(rows)
    token_ids, origins = [[] for _ in rows], [[] for _ in rows]
    while not all(run.done):
        new = run.step(block)
        for i in range(len(rows)):
            token_ids[i] += new.token_ids[i]
            origins[i] += new.origins[i]
    run.close()
    return Result(token_ids, origins, run.finish_reasons(), run.stats())
