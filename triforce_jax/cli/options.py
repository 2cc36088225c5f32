"""The flags that say what to load, how to decode and how to sample, and reading them.

Commands that run a model share these. Nothing here imports JAX, so that --help and most bad flags
are answered at once.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

from absl import flags

from triforce_jax.config import METHODS, SCORINGS, DecodeConfig
from triforce_jax.errors import InputError

DTYPES = ("bfloat16", "float16", "float32")

# Help of the fields of DecodeConfig, which gives their types and defaults.
DECODE_HELP = {
    "max_length": "Most tokens of one row, prompt and output together.",
    "batch_size": "Rows decoded together; more than one prints each text when all are done.",
    "gamma": "Tokens proposed to the target in one outer step.",
    "draft_gamma": "Tokens the draft proposes to the retrieval level in one inner round.",
    "budget": "KV slots of the retrieval level, recent window included.",
    "chunk_size": "Tokens of one selectable chunk.",
    "recent_window": "Newest tokens that the retrieval level always keeps.",
    "refresh_interval": "Outer steps between two selections of chunks; 0: select once.",
    "scoring": "How chunks are scored.",
    "draft_budget": "KV tokens that the draft sees, attention sinks included.",
    "draft_sinks": "First tokens that the draft always sees.",
    "ngram": "Longest suffix that the n-gram draft looks up.",
    "prefill_chunk": "Tokens of one pass over the prompt.",
    "attention": "Implementation of attention: auto, reference or blockwise.",
}


def define_model_flags(values: flags.FlagValues) -> None:
    """What to load and how to decode: --target, --draft, --dtype and DecodeConfig's fields."""
    flags.DEFINE_string(
        "target",
        None,
        "Model to generate with: a directory (Hugging Face safetensors or Orbax), a .gguf file or "
        "a hub id.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "draft",
        None,
        "Model that proposes: the same kinds as --target, or 'ngram' (look-up in the text so far), "
        "or 'none' (retrieval level only).",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "method",
        None,
        METHODS,
        "Levels to use; by default triforce with a draft and retrieval without.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "dtype", "bfloat16", DTYPES, "Type of weights and KV cache.", flag_values=values
    )
    for field in dataclasses.fields(DecodeConfig):
        if field.name == "method":
            continue
        text, default = DECODE_HELP[field.name], field.default
        if field.name == "scoring":
            flags.DEFINE_enum(field.name, str(default), SCORINGS, text, flag_values=values)
        elif isinstance(default, int):
            flags.DEFINE_integer(field.name, default, text, flag_values=values)
        else:
            flags.DEFINE_string(field.name, str(default), text, flag_values=values)


def define_sampling_flags(values: flags.FlagValues) -> None:
    """The fields of SamplingParams. Their defaults stand here again, as that class needs JAX."""
    number, whole = flags.DEFINE_float, flags.DEFINE_integer
    number(
        "temperature", 0.6, "Sampling temperature; 0: the most likely token.", flag_values=values
    )
    number("top_p", 0.9, "Nucleus sampling; 1: off.", flag_values=values)
    whole("top_k", 0, "Sample from this many tokens at most; 0: off.", flag_values=values)
    number("min_p", 0.0, "Least probability, relative to the largest; 0: off.", flag_values=values)
    whole("max_new_tokens", 256, "Tokens to generate at most.", flag_values=values)
    whole("seed", None, "Seed of the random numbers; by default a fresh one.", flag_values=values)
    flags.DEFINE_multi_string(
        "stop", [], "Text that ends the output; may be given again.", flag_values=values
    )
    flags.DEFINE_boolean(
        "ignore_eos", False, "Generate on past the end-of-sequence token.", flag_values=values
    )


def define_prompt_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("prompt", [], "Prompt; may be given again.", flag_values=values)
    flags.DEFINE_string(
        "prompt_file",
        None,
        "Text file (- is stdin) to put before each prompt, or the prompt if none is given.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "chat",
        False,
        "Send the prompt as a user's message through the model's chat template.",
        flag_values=values,
    )
    flags.DEFINE_string("system", None, "System message of the chat.", flag_values=values)


def draft(values: flags.FlagValues) -> str | None:
    name = values.draft
    return None if name is None or name.lower() in ("", "none") else name


def decode_config(values: flags.FlagValues) -> DecodeConfig:
    """Raises InputError when a value is out of range."""
    fields = {f.name: getattr(values, f.name) for f in dataclasses.fields(DecodeConfig)}
    if fields["method"] is None:
        fields["method"] = "triforce" if draft(values) else "retrieval"
    return DecodeConfig(**fields)


def sampling_fields(values: flags.FlagValues) -> dict[str, Any]:
    """Keyword arguments of SamplingParams."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "ignore_eos")
    return {name: getattr(values, name) for name in names} | {"stop": tuple(values.stop)}


def target(values: flags.FlagValues) -> str:
    if not values.target:
        raise InputError(
            "target", "nothing", "a checkpoint directory, a .gguf file or a hub id", "use --target"
        )
    return values.target


def prompts(values: flags.FlagValues) -> list[str | list[dict[str, str]]]:
    """The prompts: strings, or with --chat lists of messages.

    Raises:
      InputError: no prompt, an empty one, or a file that cannot be read as UTF-8.
    """
    texts, path = list(values.prompt), values.prompt_file
    system, chat = values.system, values.chat
    if system is not None and not chat:
        raise InputError("system", repr(system), "--chat along with it", "add --chat")
    if not texts and path is None:
        raise InputError("prompt", "nothing", "--prompt, --prompt_file or both")
    if any(not text.strip() for text in texts):
        raise InputError("prompt", "an empty text", "a text of at least one word")
    if path is not None:
        document = _read(path)
        texts = [f"{document}\n\n{text}" for text in texts] or [document]
    if not chat:
        return list(texts)
    head = [] if system is None else [{"role": "system", "content": system}]
    return [[*head, {"role": "user", "content": text}] for text in texts]


def _read(path: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read() if sys.stdin else b""
        else:
            data = pathlib.Path(path).read_bytes()
        text = data.decode("utf-8").strip("\r\n")
    except OSError as error:
        raise InputError(
            "prompt_file", repr(path), "a readable file", str(error.strerror)
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            "prompt_file", repr(path), "UTF-8 text", f"byte {error.start} is not"
        ) from None
    if not text.strip():
        raise InputError("prompt_file", f"{path!r}, which is empty", "a text")
    return text
