"""Text to tokens and back: an HF tokenizer, chat templates, incremental detokenizing."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from triforce_jax.errors import InputError

# A directory with any of these has a tokenizer.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What is copied along with a checkpoint.
ALL_FILES = (
    *FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class Tokenizer:
    """Wraps an HF tokenizer.

    Args:
      wrapped: a `transformers.PreTrainedTokenizerBase`.
      name: what error messages call it.
    """

    def __init__(self, wrapped: Any, name: str):
        self._wrapped = wrapped
        self.name = name
        self.vocab_size = len(wrapped)
        eos = wrapped.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else (int(eos),)

    @classmethod
    def from_directory(cls, path: pathlib.Path, name: str = "") -> Tokenizer | None:
        """Loads the tokenizer of a checkpoint directory; None if it has none.

        Raises:
          InputError: its files cannot be read.
        """
        if not any((path / file).is_file() for file in FILES):
            return None
        import transformers

        try:
            config = path / "tokenizer_config.json"
            kind = json.loads(config.read_text()).get("tokenizer_class") if config.exists() else ""
            known = kind and hasattr(transformers, kind)
            if (path / "tokenizer.json").is_file() and not known:
                wrapped = transformers.PreTrainedTokenizerFast.from_pretrained(path)
            else:
                wrapped = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(
                "tokenizer", f"{path} ({str(error)[:200]})", "tokenizer files that HF can read"
            ) from None
        wrapped.model_max_length = int(1e30)  # no warning at long prompts: our limit is checked
        return cls(wrapped, name or path.name)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer itself adds."""
        return list(self._wrapped.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        Raises:
          InputError: no chat template, or messages that are not of `role` and `content`.
        """
        if not self._wrapped.chat_template:
            raise InputError(
                "prompt", "a chat", f"text or token ids, as {self.name} has no chat template"
            )
        for message in messages:
            fields = [
                message.get(key) if isinstance(message, Mapping) else None
                for key in ("role", "content")
            ]
            if not all(isinstance(field, str) for field in fields):
                raise InputError(
                    "prompt", repr(message)[:80], "messages with the strings 'role' and 'content'"
                )
        try:
            text = self._wrapped.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like
            raise InputError(
                "prompt",
                f"a chat ({str(error)[:200]})",
                f"a chat that {self.name}'s template takes",
            ) from None
        return list(self._wrapped.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._wrapped.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def detokenizer(self) -> Detokenizer:
        """A new incremental detokenizer."""
        return Detokenizer(self)

    def vocabulary(self) -> dict[str, int]:
        """Tokens and their ids, added ones included."""
        return self._wrapped.get_vocab()

    def check_same(self, other: Tokenizer) -> None:
        """Raises InputError unless both map the same tokens to the same ids.

        Added tokens that only one of them has, past the other's last id, are padding.
        """
        mine, theirs = self.vocabulary(), other.vocabulary()
        shared = min(self.vocab_size, other.vocab_size)
        cut = [{t: i for t, i in v.items() if i < shared} for v in (mine, theirs)]
        if cut[0] != cut[1]:
            different = sum(cut[1].get(token) != i for token, i in cut[0].items())
            raise InputError(
                "draft",
                f"the tokenizer of {other.name}, in which {different} of {shared} tokens differ",
                f"the tokenizer of {self.name}",
                "use a draft of the same model family, 'ngram' or no draft",
            )


class Detokenizer:
    """Text of tokens that come one after the other: the pieces together are `decode` of all.

    Only the newest tokens are decoded again: those since the last place where the text was
    complete, and those before them that it may depend on.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # context, then tokens whose text is not out yet
        self._context = 0
        self._shown = ""  # text of the context

    def push(self, ids: Sequence[int]) -> str:
        """Takes tokens; returns new text, holding back a character that is not complete."""
        out = ""
        for token in ids:
            self._ids.append(int(token))
            text = self._tokenizer.decode(self._ids)
            if text.endswith("\ufffd") or len(text) <= len(self._shown):
                continue
            out += self._advance(text)
        return out

    def flush(self) -> str:
        """The text held back."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        # What was not out yet is the context of what comes.
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._shown = self._tokenizer.decode(self._ids)
        return new
