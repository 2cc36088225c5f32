"""How results look: coloured pieces of text, the summary, a JSON object."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from triforce_jax.config import DecodeConfig
from triforce_jax.errors import InputError

if TYPE_CHECKING:
    from triforce_jax.outputs import GenerationOutput, Stats

# Where a token came from: its colour (ANSI) and what the legend calls it.
ORIGINS = {
    "draft": ("32", "draft-accepted"),
    "retrieval": ("36", "retrieval-corrected"),
    "target": ("33", "target-corrected"),
    "bonus": ("35", "bonus"),
}
COLOR_MODES = ("auto", "always", "never")


def use_color(mode: str, stream: IO[str], *, as_json: bool) -> bool:
    """Whether to colour text written to `stream`.

    Raises:
      InputError: colours asked for in JSON.
    """
    if mode == "always" and as_json:
        raise InputError("color", "'always' along with --json", "one of the two", "drop one")
    if mode != "auto" or as_json:
        return mode == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def paint(text: str, origin: str) -> str:
    return f"\033[{ORIGINS[origin][0]}m{text}\033[0m" if text else ""


def legend() -> str:
    return "  ".join(paint(name, origin) for origin, (_, name) in ORIGINS.items())


def as_json(output: GenerationOutput, row: int, config: DecodeConfig) -> str:
    """One row's result as one line. Its stats are those of the whole batch, as measured."""
    tokens = [len(ids) for ids in output.token_ids]
    result = {
        "text": output.texts[row],
        "token_ids": list(output.token_ids[row]),
        "origins": list(output.origins[row]),
        "finish_reason": output.finish_reasons[row],
        "prompt_tokens": output.prompt_lengths[row],
        "new_tokens": tokens[row],
        "method": config.method,
        "stats": dataclasses.asdict(output.stats) | derived(output.stats, sum(tokens)),
    }
    return json.dumps(result)


def derived(stats: Stats, new_tokens: int) -> dict[str, float | None]:
    """Ratios of the counts; None where nothing was counted."""
    return {
        "total_seconds": stats.prefill_seconds + stats.decode_seconds,
        "ms_per_token": _ratio(1000 * stats.decode_seconds, new_tokens),
        "tokens_per_target_pass": _ratio(new_tokens, stats.target_passes),
        "target_acceptance": _ratio(stats.target_accepted, stats.target_proposed),
        "retrieval_acceptance": _ratio(stats.retrieval_accepted, stats.retrieval_proposed),
    }


def summary(output: GenerationOutput, config: DecodeConfig) -> str:
    """What one call of the generator did, as lines of a name and a figure."""
    stats = output.stats
    new_tokens = sum(len(ids) for ids in output.token_ids)
    ratios = derived(stats, new_tokens)
    rows: list[tuple[str, str]] = [
        ("prompt tokens", _list(f"{n:,}" for n in output.prompt_lengths)),
        ("new tokens", _list(f"{len(ids):,}" for ids in output.token_ids)),
        ("finish reason", _list(output.finish_reasons)),
        ("time to first token", f"{stats.first_token_seconds:.2f} s"),
        ("decoding", _figure(ratios["ms_per_token"], "{:.1f} ms/token")),
        (
            "end to end",
            f"{ratios['total_seconds']:.2f} s (prefill {stats.prefill_seconds:.2f} s, "
            f"decoding {stats.decode_seconds:.2f} s)",
        ),
    ]
    accepted = _acceptance(stats.target_accepted, stats.target_proposed)
    if config.uses_retrieval:
        if config.uses_draft:
            inner = _acceptance(stats.retrieval_accepted, stats.retrieval_proposed)
            rows.append(("accepted, draft -> retrieval", inner))
        rows.append(("accepted, retrieval -> target", accepted))
    elif config.uses_draft:
        rows.append(("accepted, draft -> target", accepted))
    per_pass = _figure(ratios["tokens_per_target_pass"], "{:.2f}")
    rows.append(("tokens per target pass", per_pass))
    rows.append(("tokens by origin", _origins(output.origins)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {figure}" for name, figure in rows)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _figure(value: float | None, pattern: str) -> str:
    return "none" if value is None else pattern.format(value)


def _acceptance(accepted: int, proposed: int) -> str:
    share = _figure(_ratio(100 * accepted, proposed), "{:.1f}%")
    return f"{share} ({accepted:,} of {proposed:,})"


def _origins(rows: Sequence[Sequence[str]]) -> str:
    counts: Counter[Any] = Counter(origin for row in rows for origin in row)
    total = sum(counts.values())
    named = (
        f"{name} {100 * counts[origin] / total:.0f}%"
        for origin, (_, name) in ORIGINS.items()
        if counts[origin]
    )
    return ", ".join(named) or "none"


def _list(items: Any) -> str:
    return ", ".join(items)
