"""Stop strings and text held back."""

import pytest

from triforce_jax.outputs import Piece
from triforce_jax.rowtext import RowText


class Detokenizer:
    """Text of token i is words[i]; a lone "?" is held back as an incomplete character is."""

    def __init__(self, words):
        self.words, self.held = words, ""

    def push(self, ids):
        text = self.held + "".join(self.words[i] for i in ids)
        self.held = text if text == "?" else ""
        return "" if self.held else text

    def flush(self):
        text, self.held = self.held, ""
        return text


def run(words, stop, blocks=None):
    text = RowText(Detokenizer(words), stop)
    blocks = blocks or [[i] for i in range(len(words))]
    pieces = []
    for block in blocks:
        pieces += text.push(block, ["draft"] * len(block))
    return text, pieces, text.finish()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("words", "stop", "want", "tokens"),
    [
        (["a", "b", "c"], [], "abc", 3),
        (["a", "b", "c"], ["b"], "a", 2),
        (["a", "xSTOPy", "c"], ["STOP"], "ax", 2),
        (["a", "ST", "OP", "c"], ["STOP"], "a", 3),  # spans two tokens
        (["a", "S", "T", "O", "P", "c"], ["STOP"], "a", 5),
        (["S", "ST", "OP"], ["STOP"], "S", 3),  # begins twice
        (["a", "ST", "x"], ["STOP"], "aSTx", 3),  # only looked like one
        (["a", "ST"], ["STOP"], "aST", 2),  # never came
        (["ab", "cd"], ["cd", "b"], "a", 1),  # the first in the text, not in the list
        (["STOP"], ["STOP"], "", 1),
    ],
)
def test_stop_strings(words, stop, want, tokens, together):
    blocks = [list(range(len(words)))] if together else None
    text, pieces, rest = run(words, stop, blocks)
    assert text.text == want
    assert "".join(p.text for p in pieces) + rest == want
    assert text.token_ids == list(range(tokens))
    assert len(text.origins) == tokens
    assert text.stopped == any(s in "".join(words) for s in stop)


def test_text_held_by_the_detokenizer_comes_in_the_end():
    text, _, rest = run(["a", "?"], [])
    assert (text.text, rest) == ("a?", "?")


def test_pieces_join_tokens_of_one_origin():
    text = RowText(Detokenizer(["a", "b", "c"]), ())
    got = text.push([0, 1, 2], ["draft", "draft", "bonus"])
    assert got == [Piece("ab", "draft", (0, 1)), Piece("c", "bonus", (2,))]


def test_without_a_tokenizer():
    text = RowText(None, ())
    assert text.push([5], ["target"]) == [Piece("", "target", (5,))]
    assert (text.text, text.finish(), text.token_ids) == ("", "", [5])
