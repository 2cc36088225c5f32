"""`triforce-generate`: answers prompts with TriForce, streaming the text as it is verified."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from absl import flags

from triforce_jax.cli import app, options, render
from triforce_jax.config import DecodeConfig

if TYPE_CHECKING:
    from triforce_jax.config import SamplingParams
    from triforce_jax.generator import Generator

DOC = """
triforce-generate: lossless hierarchical speculative decoding of long-context Llama models.

  triforce-generate --target=DIRECTORY --draft=ngram --prompt_file=book.txt \\
      --prompt="Who is the hero?" --chat

The text goes to stdout, on a terminal coloured by where each token came from; a summary goes to
stderr.
"""


def main() -> None:
    """The console script."""
    app.launch(COMMAND)


def define_flags(values: flags.FlagValues) -> None:
    options.define_model_flags(values)
    options.define_sampling_flags(values)
    options.define_prompt_flags(values)
    flags.DEFINE_boolean(
        "json", False, "Print one JSON object a result instead of text.", flag_values=values
    )
    flags.DEFINE_enum(
        "color",
        "auto",
        render.COLOR_MODES,
        "Colour the text by the origin of its tokens; auto: when stdout is a terminal.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "compilation_cache",
        str(_default_cache()),
        "Directory that keeps compiled programs for later runs; empty: keep none.",
        flag_values=values,
    )


def run(values: flags.FlagValues) -> int:
    """Generates for every prompt. What can be checked without JAX or a model is checked first."""
    target = options.target(values)
    config = options.decode_config(values)
    prompts = options.prompts(values)
    as_json = values.json
    color = render.use_color(values.color, sys.stdout, as_json=as_json)
    generator, params = build(values, target, config)
    if not as_json:
        _tolerate_any_character()
    if color:
        _note(render.legend())
    if config.batch_size == 1 and not as_json:
        for i, prompt in enumerate(prompts):
            if len(prompts) > 1:
                _note(f"--- prompt {i + 1} of {len(prompts)}")
            _stream(generator, prompt, params, config, color=color)
        return app.OK
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        output = generator.generate(batch, params)
        for row in range(len(batch)):
            print(render.as_json(output, row, config) if as_json else output.texts[row], flush=True)
        _note(render.summary(output, config))
    return app.OK


COMMAND = app.Command("triforce-generate", DOC, define_flags, run)


def build(
    values: flags.FlagValues, target: str, config: DecodeConfig
) -> tuple[Generator, SamplingParams]:
    """Loads the models. The one place that imports JAX."""
    _use_compilation_cache(values.compilation_cache)
    from triforce_jax.config import SamplingParams

    params = SamplingParams(**options.sampling_fields(values))
    from triforce_jax.generator import Generator

    start = time.perf_counter()
    generator = Generator.from_pretrained(
        target,
        options.draft(values),
        dtype=values.dtype,
        progress=sys.stderr.isatty(),
        **dataclasses.asdict(config),
    )
    _note(f"loaded {target} as {values['dtype'].value} in {time.perf_counter() - start:.1f} s")
    return generator, params


def _stream(
    generator: Generator, prompt: Any, params: SamplingParams, config: DecodeConfig, *, color: bool
) -> None:
    stream = generator.stream(prompt, params)
    for piece in stream:
        print(render.paint(piece.text, piece.origin) if color else piece.text, end="", flush=True)
    print(flush=True)
    _note(render.summary(stream.output, config))


def _default_cache() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "triforce_jax" / "xla"


def _use_compilation_cache(directory: str) -> None:
    if not directory:
        return
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _note(f"compiled programs are not kept: {error}")
        return
    import jax

    jax.config.update("jax_compilation_cache_dir", directory)


def _tolerate_any_character() -> None:
    """Text may hold characters that stdout's encoding lacks: print a replacement, do not fail."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
