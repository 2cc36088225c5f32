"""What all commands share: absl flags, a config file under them, and exit codes.

Exit codes: 0 done; 2 bad usage or input (one line on stderr says what was wrong, what was expected
and what to do); 130 interrupted; 141 the reader of stdout went away; 1 anything else. Tracebacks
appear with --debug only.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_dict, config_flags

from triforce_jax.errors import InputError

OK, ERROR, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 128 + 2, 128 + 13

# Flags of the command line itself, which a config file cannot set.
_NOT_IN_CONFIG = ("config", "debug", "help")


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
      name: what the user types.
      doc: what --help says above the list of flags.
      define: defines the command's flags in a FlagValues.
      run: does the work and returns the exit code.
    """

    name: str
    doc: str
    define: Callable[[flags.FlagValues], None]
    run: Callable[[flags.FlagValues], int]


def launch(command: Command) -> None:
    """Runs the command on sys.argv through absl.app and ends the process with its exit code."""

    def absl_flags(argv: Sequence[str]) -> Sequence[str]:
        # absl's own flags get no arguments: a command has a FlagValues of its own. Without an
        # explicit verbosity, absl would show libraries' INFO logs.
        flags.FLAGS([argv[0], "--verbosity=-1"])
        return argv

    app.run(lambda argv: execute(command, argv), flags_parser=absl_flags)


def execute(command: Command, argv: Sequence[str]) -> int:
    """Parses argv (program name first), runs the command and returns the exit code."""
    try:
        values = parse(command, argv)
        if values.help:
            print(f"{command.doc.strip()}\n{values.get_help(include_special_flags=False)}")
            code = OK
        else:
            code = command.run(values)
        # Here rather than at the interpreter's end, so that a broken pipe is still ours to handle.
        sys.stdout.flush()
        return code
    except (InputError, flags.Error) as error:
        return _fail(command, argv, _one_line(error), USAGE)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # leaves the half-written line of text
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except Exception as error:
        message = f"{type(error).__name__}: {_one_line(error, first=True)}"
        return _fail(command, argv, message, ERROR)


def parse(command: Command, argv: Sequence[str]) -> flags.FlagValues:
    """Flags from the command line, over those of --config, over the defaults.

    Raises:
      InputError: a config file that cannot be used, or an argument that is no flag.
      flags.Error: an unknown flag or a bad value.
    """
    values = flags.FlagValues()
    command.define(values)
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Python file whose get_config() returns an ml_collections ConfigDict of flag names and "
        "values; flags given on the command line override it.",
        flag_values=values,
        sys_argv=list(argv),
    )
    flags.DEFINE_boolean("debug", False, "Show the traceback of an error.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this help.", short_name="h", flag_values=values)
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        name = f"--{error.flagname}"
        raise InputError(
            name, "an unknown flag", "a flag that --help lists", _similar(error.flagname, values)
        ) from None
    except flags.Error:
        raise
    except Exception as error:  # whatever running the config file may raise
        raise _config_error(_one_line(error, last=True)) from None
    if len(rest) > 1:
        raise InputError(
            "arguments", repr(rest[1]), "flags only", "write --flag=value; --help lists the flags"
        )
    _apply_config(values)
    return values


def _apply_config(values: flags.FlagValues) -> None:
    """Gives each flag that the command line left alone the value of the config file."""
    config: Any = values.config
    if config is None:
        return
    try:
        fields = dict(config.items())
    except Exception as error:  # config_flags hands out a config that raises when it is used
        raise _config_error(_one_line(error, last=True)) from None
    if not isinstance(config, config_dict.ConfigDict):
        raise _config_error(f"a {type(config).__name__}")
    for name, value in fields.items():
        if name not in values or name in _NOT_IN_CONFIG:
            raise InputError(
                "--config", f"a field {name!r}", "the names of flags", _similar(name, values)
            )
        flag = values[name]
        if flag.present or value is None:
            continue
        try:
            if isinstance(flag, flags.MultiFlag):
                items = [value] if isinstance(value, str) else list(value)
                flag.value = [flag.parser.parse(item) for item in items]
            else:
                flag.value = flag.parser.parse(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"--config field {name}", repr(value), f"a value of --{name}", _one_line(error)
            ) from None


def _config_error(got: str) -> InputError:
    return InputError(
        "--config", got, "a Python file whose get_config() returns an ml_collections ConfigDict"
    )


def _similar(name: str, values: flags.FlagValues) -> str:
    near = difflib.get_close_matches(name, list(values), n=1)
    return f"did you mean --{near[0]}?" if near else "see --help"


def _one_line(error: Exception, *, first: bool = False, last: bool = False) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if first:
        lines = lines[:1]
    if last:
        lines = lines[-1:]
    return " ".join(" ".join(lines).split())


def _fail(command: Command, argv: Sequence[str], message: str, code: int) -> int:
    if "--debug" in argv:
        traceback.print_exc()
    print(f"{command.name}: error: {message}", file=sys.stderr)
    return code


def _discard_stdout() -> None:
    """Lets the interpreter flush what is left into nothing instead of into the broken pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a stdout without a file descriptor has nothing to flush
        return
