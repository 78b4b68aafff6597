"""Text as it comes: characters and stop strings across tokens, and nothing told that a stop string takes back."""

import pytest
from engine_tiny import Oracle, boxed, engine, solo

from replayssm.engine import Engine, Params, PromptLookup
from replayssm.engine.text import TextStream


class Pieces:
    """A tokenizer whose tokens are these bytes."""

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, tokens, **_):
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def feed(stream, count):
    told = []
    for token in range(count):
        if stream.stopped:
            break
        stream.push(token)
        told.append(stream.news(stream.stopped))
    stream.end()
    return [*told, stream.news(True)]


def test_characters_of_several_tokens():
    euro = "€".encode()
    stream = TextStream(Pieces("a", euro[:1], euro[1:2], euro[2:], "b", euro[:2]))
    assert feed(stream, 6) == ["a", "", "", "€", "b", "", "\ufffd"]
    assert stream.text == "a€b\ufffd"


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "told"),
    [
        (["ab", "cd", "ef"], ["bcde"], "a", ["a", "", "", ""]),
        (["ab", "c", "x", "y"], ["bcd"], "abcxy", ["a", "", "bcx", "y", ""]),
        (["one two"], ["two", "one"], "", ["", ""]),
        (["x", "END", "y"], ["END"], "x", ["x", "", ""]),
        (["aa", "a", "b"], ["aab"], "a", ["", "a", "", ""]),
    ],
)
def test_stop_strings(pieces, stops, text, told):
    stream = TextStream(Pieces(*pieces), stops)
    assert feed(stream, len(pieces)) == told
    assert stream.text == text
    assert "".join(told) == text


@pytest.mark.parametrize("drafting", [False, True])
def test_stops_in_an_engine(drafting):
    model, tokenizer, found = boxed()
    ids = tokenizer(found[0])["input_ids"][:60]
    wanted = solo(model, ids, 24)
    drafter = Oracle({tuple(ids): wanted}, errs=0.0) if drafting else None  # accepted drafts lie beyond the stop
    text = tokenizer.decode(wanted, skip_special_tokens=True)
    first = len(tokenizer.decode(wanted[:6]))
    stop = text[first - 2 : first + 3]  # lies across a border between tokens
    with Engine(model, tokenizer, max_length=256, drafter=drafter) as served:
        request = served.generate(ids, Params(max_tokens=24, stop=stop))[0]
        assert request.text == text[: text.index(stop)]
        assert request.samples[0].finish == "stop"
        assert request.tokens == wanted[: len(request.tokens)]
        assert stop in tokenizer.decode(request.tokens)
        assert stop not in tokenizer.decode(request.tokens[:-1])
        ended = served.generate(ids, Params(max_tokens=24, stop_tokens=[wanted[5]]))[0]
        assert ended.tokens == wanted[: wanted.index(wanted[5]) + 1]
        assert ended.text == tokenizer.decode(ended.tokens[:-1])


def test_streaming():
    model, tokenizer, found = boxed()
    asked = [text[:100] for text in found[:3]]
    with Engine(model, tokenizer, slots=2, max_length=256, drafter=PromptLookup()) as served:
        whole = served.generate(asked, Params(max_tokens=20))
        seen = {}
        for event in served.stream(asked, Params(max_tokens=20)):
            text, tokens = seen.setdefault(event.request.id, ["", []])
            seen[event.request.id] = [text + event.text, tokens + event.tokens]
        assert list(seen.values()) == [[request.text, request.tokens] for request in whole] or sorted(
            seen.values()
        ) == sorted([request.text, request.tokens] for request in whole)
        for _ in served.stream(asked, Params(max_tokens=20)):
            break  # leaving the loop cancels the rest
        served.step()
        assert served.idle


def test_text_needs_a_tokenizer():
    from engine_tiny import prompts, tiny

    from replayssm import ReplayError

    with engine(tiny()[0]) as served:
        request = served.generate(prompts()[0], Params(max_tokens=2))[0]
        with pytest.raises(ReplayError, match="no tokenizer"):
            _ = request.text
