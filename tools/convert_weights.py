"""Converts an HF checkpoint or a GGUF file: `--source=… --output=… --dtype=bfloat16`."""

import sys

from absl import flags

from triforce_jax.cli import app, options
from triforce_jax.errors import InputError

DOC = """
convert_weights: Hugging Face directory, hub id or .gguf file -> Orbax directory.
"""


def define_flags(values: flags.FlagValues) -> None:
    for name, text in (("source", "What to convert."), ("output", "Directory to write.")):
        flags.DEFINE_string(name, None, text, flag_values=values)
    flags.DEFINE_enum(
        "dtype", "bfloat16", options.DTYPES, "Type of the weights.", flag_values=values
    )
    flags.DEFINE_boolean("overwrite", False, "Replace the output.", flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Converts and prints where to."""
    for name in ("source", "output"):
        if not values[name].value:
            raise InputError(name, "nothing", "a path", f"use --{name}")
    from triforce_jax import checkpoint

    print(
        checkpoint.convert(
            values.source,
            values.output,
            dtype=values.dtype,
            progress=sys.stderr.isatty(),
            overwrite=values.overwrite,
        )
    )
    return app.OK


COMMAND = app.Command("convert_weights", DOC, define_flags, run)

if __name__ == "__main__":
    app.launch(COMMAND)
