"""triforce-generate with a generator that is not a model: input, output, exit codes."""

import ast
import dataclasses
import io
import json
import pathlib
import subprocess
import sys
import types

import pytest
from absl import flags

from triforce_jax.cli import app, generate, options, render
from triforce_jax.config import DecodeConfig, SamplingParams

ROOT = pathlib.Path(__file__).resolve().parents[2]
PIECES = [("draft", "It ", (5, 6)), ("retrieval", "was\n", (7,)), ("target", "é", (8,))]
PIECES += [("bonus", ".", (9,))]


@dataclasses.dataclass(frozen=True)
class Stats:
    prefill_seconds: float = 2.0
    decode_seconds: float = 0.5
    first_token_seconds: float = 2.25
    target_passes: int = 2
    retrieval_passes: int = 4
    draft_passes: int = 6
    target_accepted: int = 3
    target_proposed: int = 4
    retrieval_accepted: int = 2
    retrieval_proposed: int = 8


def result(rows=1, stats=None):
    ids = [i for _, _, some in PIECES for i in some]
    origins = [origin for origin, _, some in PIECES for _ in some]
    return types.SimpleNamespace(
        texts=["".join(text for _, text, _ in PIECES)] * rows,
        token_ids=[ids] * rows,
        origins=[origins] * rows,
        finish_reasons=["eos", "length", "stop"][:rows],
        prompt_lengths=[1234, 7, 8][:rows],
        stats=stats or Stats(),
    )


class Stream:
    def __iter__(self):
        for origin, text, ids in PIECES:
            yield types.SimpleNamespace(text=text, origin=origin, token_ids=ids)
        self.output = result()


class Fake:
    """Stands for a Generator and remembers what it was asked."""

    def __init__(self):
        self.prompts = []
        self.output = result

    def stream(self, prompt, params):
        self.prompts.append(prompt)
        return Stream()

    def generate(self, prompts, params):
        self.prompts.append(prompts)
        return self.output(len(prompts))


@pytest.fixture
def fake(monkeypatch):
    generator = Fake()

    def build(values, target, config):
        generator.target, generator.config = target, config
        generator.params = options.sampling_fields(values)
        return generator, generator.params

    monkeypatch.setattr(generate, "build", build)
    return generator


def run(*args):
    return app.execute(generate.COMMAND, ["triforce-generate", *args])


def test_streams_text_and_summarises(fake, capsys):
    assert run("--target=t", "--prompt=Why?", "--draft=ngram") == app.OK
    shown = capsys.readouterr()
    assert shown.out == "It was\né.\n"
    assert fake.prompts == ["Why?"]
    lines = dict(line.split("  ", 1) for line in shown.err.splitlines())
    assert {name: figure.strip() for name, figure in lines.items()} == {
        "prompt tokens": "1,234",
        "new tokens": "5",
        "finish reason": "eos",
        "time to first token": "2.25 s",
        "decoding": "100.0 ms/token",
        "end to end": "2.50 s (prefill 2.00 s, decoding 0.50 s)",
        "accepted, draft -> retrieval": "25.0% (2 of 8)",
        "accepted, retrieval -> target": "75.0% (3 of 4)",
        "tokens per target pass": "2.50",
        "tokens by origin": "draft-accepted 40%, retrieval-corrected 20%, target-corrected 20%, "
        "bonus 20%",
    }


@pytest.mark.parametrize(
    ("args", "method", "shown", "hidden"),
    [
        ([], "retrieval", ["retrieval -> target"], ["draft ->"]),
        (["--draft=None"], "retrieval", ["retrieval -> target"], ["draft ->"]),
        (["--draft=d"], "triforce", ["draft -> retrieval", "retrieval -> target"], []),
        (["--draft=d", "--method=draft"], "draft", ["draft -> target"], ["retrieval ->"]),
        (["--method=autoregressive"], "autoregressive", [], ["accepted,"]),
    ],
)
def test_method_and_its_levels(fake, capsys, args, method, shown, hidden):
    assert run("--target=t", "--prompt=x", *args) == app.OK
    assert fake.config.method == method
    text = capsys.readouterr().err
    assert all(words in text for words in shown)
    assert not any(words in text for words in hidden)


def test_summary_of_nothing(fake):
    nothing = result(stats=Stats(0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0))
    nothing.token_ids, nothing.origins = [[]], [[]]
    text = render.summary(nothing, DecodeConfig())
    assert "none (0 of 0)" in text
    assert "tokens per target pass         none" in text
    assert json.loads(render.as_json(nothing, 0, DecodeConfig()))["stats"]["ms_per_token"] is None


def test_colours_only_when_asked(fake, capsys, monkeypatch):
    assert run("--target=t", "--prompt=x", "--color=always") == app.OK
    shown = capsys.readouterr()
    assert shown.out == ("\033[32mIt \033[0m\033[36mwas\n\033[0m\033[33mé\033[0m\033[35m.\033[0m\n")
    assert "draft-accepted" in shown.err.splitlines()[0]
    for mode in ("auto", "never"):
        assert run("--target=t", "--prompt=x", f"--color={mode}") == app.OK
        shown = capsys.readouterr()
        assert "\033" not in shown.out + shown.err


def test_colours_on_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render.use_color("auto", terminal, as_json=False)
    assert not render.use_color("auto", terminal, as_json=True)
    assert not render.use_color("never", terminal, as_json=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not render.use_color("auto", terminal, as_json=False)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not render.use_color("auto", terminal, as_json=False)


def test_json(fake, capsys):
    assert run("--target=t", "--prompt=x", "--prompt=y", "--json", "--draft=ngram") == app.OK
    shown = capsys.readouterr()
    first, second = map(json.loads, shown.out.splitlines())
    assert first == second
    assert fake.prompts == [["x"], ["y"]]
    stats = first.pop("stats")
    assert first == {
        "text": "It was\né.",
        "token_ids": [5, 6, 7, 8, 9],
        "origins": ["draft", "draft", "retrieval", "target", "bonus"],
        "finish_reason": "eos",
        "prompt_tokens": 1234,
        "new_tokens": 5,
        "method": "triforce",
    }
    assert stats == dataclasses.asdict(Stats()) | {
        "total_seconds": 2.5,
        "ms_per_token": 100.0,
        "tokens_per_target_pass": 2.5,
        "target_acceptance": 0.75,
        "retrieval_acceptance": 0.25,
    }


def test_batches(fake, capsys):
    args = ["--target=t", "--batch_size=2", *(f"--prompt={p}" for p in "abc")]
    assert run(*args, "--json") == app.OK
    assert fake.prompts == [["a", "b"], ["c"]]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["eos", "length", "eos"]
    assert run(*args) == app.OK
    shown = capsys.readouterr()
    assert shown.out == "It was\né.\n" * 3
    assert "1,234, 7\n" in shown.err
    assert "eos, length\n" in shown.err


def test_several_prompts_stream_one_after_the_other(fake, capsys):
    assert run("--target=t", "--prompt=a", "--prompt=b") == app.OK
    assert fake.prompts == ["a", "b"]
    assert "prompt 2 of 2" in capsys.readouterr().err


def test_file_comes_before_the_questions(fake, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("A long text.\n", encoding="utf-8")
    assert run("--target=t", f"--prompt_file={book}") == app.OK
    assert run("--target=t", f"--prompt_file={book}", "--prompt=Why?", "--prompt=How?") == app.OK
    assert fake.prompts == ["A long text.", "A long text.\n\nWhy?", "A long text.\n\nHow?"]


def test_chat(fake, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("A long text.")
    args = ["--target=t", "--chat", "--prompt=Why?"]
    assert run(*args) == app.OK
    assert run(*args, f"--prompt_file={book}", "--system=Be brief.") == app.OK
    assert fake.prompts == [
        [{"role": "user", "content": "Why?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A long text.\n\nWhy?"},
        ],
    ]


def test_stdin(fake, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Où ?\n".encode())))
    assert run("--target=t", "--prompt_file=-") == app.OK
    assert fake.prompts == ["Où ?"]


def test_sampling_and_decoding_flags_reach_the_generator(fake):
    flags_given = ["--temperature=0", "--top_p=1", "--top_k=5", "--min_p=0.1", "--seed=3"]
    flags_given += ["--max_new_tokens=9", "--stop=a", "--stop=b", "--ignore_eos"]
    fields = {"gamma": 4, "draft_gamma": 2, "budget": 128, "chunk_size": 16, "recent_window": 32}
    fields |= {"refresh_interval": 0, "draft_budget": 64, "draft_sinks": 4, "ngram": 2}
    fields |= {"prefill_chunk": 256, "max_length": 999, "scoring": "attention_mass"}
    fields |= {"attention": "reference"}
    given = [f"--{name}={value}" for name, value in fields.items()]
    assert run("--target=some/where", "--prompt=x", "--draft=d", *flags_given, *given) == app.OK
    assert fake.target == "some/where"
    assert fake.config == DecodeConfig(method="triforce", **fields)
    assert fake.params == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.1,
        "max_new_tokens": 9,
        "seed": 3,
        "stop": ("a", "b"),
        "ignore_eos": True,
    }


def test_defaults_are_those_of_the_configs():
    values = flags.FlagValues()
    generate.define_flags(values)
    values(["triforce-generate"])
    assert options.decode_config(values) == DecodeConfig(method="retrieval")
    assert SamplingParams(**options.sampling_fields(values)) == SamplingParams()


BAD = {
    "no target": (["--prompt=x"], "target: got nothing"),
    "no prompt": (["--target=t"], "prompt: got nothing"),
    "empty prompt": (["--target=t", "--prompt= "], "prompt: got an empty text"),
    "unknown flag": (["--target=t", "--promt=x"], "did you mean --prompt?"),
    "no number": (["--target=t", "--prompt=x", "--gamma=six"], "--gamma=six"),
    "gamma": (["--target=t", "--prompt=x", "--gamma=0"], "gamma: got 0"),
    "budget": (["--target=t", "--prompt=x", "--budget=1001"], "budget: got 1001"),
    "method": (["--target=t", "--prompt=x", "--method=magic"], "method"),
    "scoring": (["--target=t", "--prompt=x", "--scoring=luck"], "scoring"),
    "dtype": (["--target=t", "--prompt=x", "--dtype=int3"], "dtype"),
    "json in colour": (["--target=t", "--prompt=x", "--json", "--color=always"], "color: got"),
    "system": (["--target=t", "--prompt=x", "--system=y"], "add --chat"),
    "no file": (["--target=t", "--prompt_file=/no/file"], "No such file"),
    "argument": (["--target=t", "--prompt=x", "word"], "'word'"),
    "config": (["--config=/no/config.py", "--prompt=x"], "/no/config.py"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_is_one_line(fake, capsys, name):
    args, words = BAD[name]
    assert run(*args) == app.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert words in shown.err


@pytest.mark.parametrize(
    "flag", ["--temperature=-1", "--top_p=0", "--min_p=2", "--max_new_tokens=-1", "--stop="]
)
def test_bad_sampling_parameter_is_told_before_loading(capsys, flag):
    assert run("--target=/no/model", "--prompt=x", "--compilation_cache=", flag) == app.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert flag[2:].split("=")[0] in shown.err


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"])
def test_bad_prompt_file(fake, capsys, tmp_path, content):
    path = tmp_path / "prompt"
    path.write_bytes(content)
    assert run("--target=t", f"--prompt_file={path}") == app.USAGE
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "prompt_file: got" in shown.err


def process(*args, **kwargs):
    code = "from triforce_jax.cli.generate import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
        **kwargs,
    )


@pytest.mark.parametrize("name", ["no target", "unknown flag", "no number", "gamma"])
def test_bad_usage_as_a_process(name):
    args, words = BAD[name]
    done = process(*args)
    assert (done.returncode, done.stdout) == (app.USAGE, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr


def test_help_as_a_process_lists_the_flags():
    done = process("--help")
    assert (done.returncode, done.stderr) == (app.OK, "")
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    names += ["target", "draft", "dtype", "prompt", "prompt_file", "system", "color", "seed"]
    names += ["compilation_cache", "temperature", "top_p", "top_k", "min_p", "stop", "config"]
    names += ["[no]chat", "[no]json", "[no]ignore_eos", "max_new_tokens"]
    assert [name for name in names if f"--{name}:" not in done.stdout] == []


def test_commands_do_not_import_jax_before_they_need_it():
    """Neither --help nor a bad flag should wait for JAX: its imports stand inside functions."""
    for path in (ROOT / "triforce_jax" / "cli").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            modules = [getattr(node, "module", None) or "", *names]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not any(m.split(".")[0] in ("jax", "flax") for m in modules), path


def test_demo_configuration_is_valid(fake):
    assert run(f"--config={ROOT / 'configs' / 'smollm2_cpu.py'}") == app.OK
    (prompt,) = fake.prompts
    assert prompt[0]["content"].startswith("Persuasion")
    assert fake.config.max_length == 8192
    assert run(f"--config={ROOT / 'configs' / 'smollm2_cpu.py'}", "--gamma=2") == app.OK
    assert fake.config.gamma == 2
