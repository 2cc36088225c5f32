"""Flags, config files, exit codes, error lines: what all commands share."""

import subprocess
import sys

import pytest
from absl import flags

from triforce_jax.cli import app
from triforce_jax.errors import InputError


def define(values):
    flags.DEFINE_integer("gamma", 6, "A number.", flag_values=values)
    flags.DEFINE_float("heat", 0.5, "A number.", flag_values=values)
    flags.DEFINE_boolean("chat", False, "A switch.", flag_values=values)
    flags.DEFINE_enum("kind", "a", ["a", "b"], "A choice.", flag_values=values)
    flags.DEFINE_string("name", None, "A text.", flag_values=values)
    flags.DEFINE_multi_string("stop", [], "Texts.", flag_values=values)


def command(run=lambda values: app.OK):
    return app.Command("tool", "What the tool does.", define, run)


def parse(*args):
    return app.parse(command(), ["tool", *args])


@pytest.fixture
def config(tmp_path):
    """Writes a config file with the given body of get_config and returns its flag."""

    def write(body, head="from ml_collections import config_dict"):
        path = tmp_path / "config.py"
        path.write_text(f"{head}\ndef get_config():\n    {body}\n")
        return f"--config={path}"

    return write


def test_config_file_gives_defaults_that_flags_override(config):
    flag = config(
        "return config_dict.ConfigDict(dict(gamma=9, heat=1, chat=True, kind='b', name='x', "
        "stop=['p', 'q']))"
    )
    values = parse(flag)
    assert (values.gamma, values.heat, values.chat, values.kind) == (9, 1.0, True, "b")
    assert (values.name, values.stop) == ("x", ["p", "q"])
    for args in ([flag, "--gamma=3", "--nochat"], ["--gamma=3", "--nochat", flag]):
        values = parse(*args, "--stop=z")
        assert (values.gamma, values.chat, values.kind) == (3, False, "b")
        assert values.stop == ["z"]


def test_config_override_of_a_field(config):
    flag = config("return config_dict.ConfigDict(dict(gamma=9))")
    assert parse(flag, "--config.gamma=4").gamma == 4


def test_config_none_leaves_the_default_and_one_text_is_a_list(config):
    values = parse(config("return config_dict.ConfigDict(dict(name=None, stop='p'))"))
    assert values.name is None
    assert values.stop == ["p"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return config_dict.ConfigDict(dict(gama=9))", ["'gama'", "did you mean --gamma?"]),
        ("return config_dict.ConfigDict(dict(qwxy=9))", ["'qwxy'", "--help"]),
        ("return config_dict.ConfigDict(dict(config='x'))", ["'config'", "names of flags"]),
        ("return config_dict.ConfigDict(dict(gamma='many'))", ["gamma", "'many'"]),
        ("return config_dict.ConfigDict(dict(gamma=1.5))", ["gamma", "1.5"]),
        ("return config_dict.ConfigDict(dict(kind='c'))", ["kind", "'c'", "a|b"]),
        ("return config_dict.ConfigDict(dict(stop=5))", ["stop", "5"]),
        ("return 7", ["--config", "ConfigDict"]),
        ("return undefined_name", ["--config", "undefined_name"]),
        ("syntax error", ["--config", "invalid syntax"]),
    ],
)
def test_bad_config_is_one_line(config, capsys, body, words):
    assert app.execute(command(), ["tool", config(body)]) == app.USAGE
    line = the_line(capsys)
    assert all(word in line for word in words), line


def test_missing_config_file(tmp_path, capsys):
    assert app.execute(command(), ["tool", f"--config={tmp_path}/none.py"]) == app.USAGE
    assert "none.py" in the_line(capsys)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gama=3"], ["--gama", "unknown flag", "did you mean --gamma?"]),
        (["--gamma=many"], ["gamma", "many"]),
        (["--gamma"], ["gamma"]),
        (["--kind=c"], ["kind", "<a|b>"]),
        (["--chat=perhaps"], ["chat", "perhaps"]),
        (["word"], ["arguments", "'word'", "flags only"]),
    ],
)
def test_bad_flag_is_one_line(capsys, args, words):
    assert app.execute(command(), ["tool", *args]) == app.USAGE
    line = the_line(capsys)
    assert all(word in line for word in words), line


def test_help_lists_every_flag(capsys):
    assert app.execute(command(), ["tool", "--help"]) == app.OK
    shown = capsys.readouterr()
    assert shown.out.startswith("What the tool does.")
    assert all(f"{name}:" in shown.out for name in ("--gamma", "--kind", "--config", "--[no]chat"))
    assert shown.err == ""


def test_input_error_of_the_command(capsys):
    def run(values):
        raise InputError("gamma", 0, "a whole number of at least 1")

    assert app.execute(command(run), ["tool"]) == app.USAGE
    assert the_line(capsys) == "tool: error: gamma: got 0; expected a whole number of at least 1"


def test_other_errors_show_a_traceback_only_with_debug(capsys):
    def run(values):
        raise RuntimeError("out of memory\nallocating 9 GiB")

    assert app.execute(command(run), ["tool"]) == app.ERROR
    assert the_line(capsys) == "tool: error: RuntimeError: out of memory"
    assert app.execute(command(run), ["tool", "--debug"]) == app.ERROR
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("tool: error: RuntimeError: out of memory\n")


def test_interrupt_is_quiet(capsys):
    def run(values):
        raise KeyboardInterrupt

    assert app.execute(command(run), ["tool"]) == app.INTERRUPTED
    assert capsys.readouterr().err == "\n"


# A command with enough output to fill any pipe's buffer, run as a process of its own.
ENDLESS = """
import sys
from triforce_jax.cli import app

def run(values):
    while True:
        print("x" * 1000)

app.launch(app.Command("tool", "", lambda values: None, run))
"""


def test_broken_pipe_is_quiet():
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().startswith("xxx")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == app.BROKEN_PIPE


def the_line(capsys):
    """The only line on stderr; nothing is on stdout."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("\n")
    assert shown.err.count("\n") == 1, shown.err
    return shown.err[:-1]
