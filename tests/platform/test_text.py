from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gearshift.platform.engine.sequence import Sampled, Sequence
from gearshift.platform.engine.text import AnswerText, Detokenizer, StopStrings
from gearshift.platform.request import Delta, SamplingParams


class Bytes:
    """A tokenizer of bytes: most characters outside ASCII take several tokens."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40))
def test_text_comes_out_whole_and_never_in_broken_characters(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.push([byte]) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_an_incomplete_character_at_the_end_is_shown_as_such() -> None:
    detokenizer = Detokenizer(Bytes())
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.flush() == "�"


def cut(text: str, stops: list[str]) -> str:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


@given(st.text("abX", max_size=30), st.lists(st.text("abX", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_never_leaks_a_part_of_itself(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, sent, rest = StopStrings(stops), "", text
    while rest and not matcher.found:
        size = data.draw(st.integers(1, len(rest)))
        sent += matcher.push(rest[:size])
        rest = rest[size:]
        # what has been sent is always a beginning of the final answer, however the text was cut into chunks
        assert not any(stop in sent for stop in stops)
    sent += matcher.flush()
    whole = text[: len(text) - len(rest)]
    assert sent == cut(whole, stops)
    assert matcher.found == any(stop in whole for stop in stops)


def answered(text: str, stops: tuple[str, ...]) -> tuple[AnswerText, Sequence]:
    sequence = Sequence("x", [1], SamplingParams(stop=stops), 1000)
    return AnswerText(Bytes(), sequence), sequence


def told(answer: AnswerText, tokens: bytes, last: bool) -> list[Delta]:
    found = []
    for place, token in enumerate(tokens, 1):
        delta = answer.push(Sampled(token), "length" if last and place == len(tokens) else None)
        if delta is not None:
            found.append(delta)
        if answer.stopped:
            break
    return found


@given(st.text("aé🎨X", min_size=1, max_size=12), st.lists(st.text("aé🎨X", min_size=1, max_size=3), max_size=2))
def test_an_answer_that_goes_on_elsewhere_has_the_same_text_wherever_it_broke(text: str, stops: list[str]) -> None:
    tokens, stop = text.encode(), tuple(stops)
    whole = told(answered(text, stop)[0], tokens, True)
    for cut_at in range(len(whole)):
        begun = whole[:cut_at]
        ids = [token for delta in begun for token in delta.ids]
        answer, _ = answered(text, stop)
        answer.resume(ids, sum(len(delta.text) for delta in begun))
        rest = told(answer, tokens[len(ids) :], True)
        assert "".join(delta.text for delta in begun + rest) == "".join(delta.text for delta in whole)
        assert sum(delta.tokens for delta in begun + rest) == sum(delta.tokens for delta in whole)
