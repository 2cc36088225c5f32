"""Settings of every test: JAX on the CPU, no network, repeatable property tests."""

import os

# For the processes that tests start; this one may have imported JAX already.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jax

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

# Compiling makes the first example of a test slow, so there is no deadline for one example.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")
