from __future__ import annotations

import pytest

from gearshift.eval.canary import Canary, Watched, digest, is_well, take_round
from gearshift.eval.judge import SAME, Preference, agreement, preference, question, verdict


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("A", "first"),
        ("B.", "second"),
        ("**B**", "second"),
        ("Answer A is better than B", "first"),
        ("tie", "tie"),
        ("They are equal", "tie"),
        ("a matter of taste", None),
        ("", None),
    ],
)
def test_a_verdict_is_the_first_word_that_is_one(said: str, found: str | None) -> None:
    assert verdict(said) == found


@pytest.mark.parametrize(
    ("forth", "back", "found"),
    [
        ("A", "B", Preference(1.0, "won")),
        ("B", "A", Preference(0.0, "lost")),
        ("A", "A", Preference(0.5, "order")),
        ("B", "B", Preference(0.5, "order")),
        ("tie", "tie", Preference(0.5, "tie")),
        ("A", "tie", Preference(0.5, "tie")),
        ("A", "hm", Preference(None, "unclear")),
    ],
)
def test_an_answer_wins_only_in_both_places(forth: str, back: str, found: Preference) -> None:
    assert preference(forth, back) == found


def test_the_judge_reads_both_answers_and_no_name() -> None:
    text = question("What is 2 + 2?", "4", "5")
    assert text.index("What is 2 + 2?") < text.index("4\n</answer_A>") < text.index("5\n</answer_B>")


def test_agreement_with_people_counts_what_chance_would_give() -> None:
    won, lost, unclear = Preference(1.0, "won"), Preference(0.0, "lost"), Preference(None, "unclear")
    judged = [won] * 8 + [lost] * 2 + [SAME] * 2 + [unclear]
    people = [1.0] * 7 + [0.0] * 3 + [0.5, 1.0] + [0.0]
    found = agreement(judged, people)
    assert (found.pairs, found.unclear, found.decided) == (13, 1, 10)
    assert found.share[1] == pytest.approx(10 / 12)
    assert found.agreed[1] == pytest.approx(9 / 10)
    assert found.kappa == pytest.approx(2 / 3)  # (10 / 12 - 1 / 2) / (1 - 1 / 2)
    assert agreement([won] * 5, [1.0] * 5).kappa is None
    with pytest.raises(ValueError, match="no verdict"):
        agreement([unclear], [1.0])


def test_a_canary_without_answers_must_stay_as_it_was() -> None:
    fixed, free = Canary("a", "2 + 2?", "number", ("4",)), Canary("b", "Sing!")
    assert is_well(fixed, "It is 4", None)
    assert not is_well(fixed, "It is 5", None)
    assert is_well(free, "la", None)
    assert is_well(free, "la", digest("la"))
    assert not is_well(free, "lo", digest("la"))


@pytest.mark.parametrize(("lost", "won", "alarm"), [(0, 0, False), (6, 0, False), (7, 0, True), (9, 3, False)])
def test_a_round_is_worse_when_surely_more_is_lost_than_won(lost: int, won: int, alarm: bool) -> None:
    watched, usual = Watched(), {f"q{n}": n < 15 for n in range(20)}
    for at in range(3):
        take_round(watched, usual, 0, float(at))
        assert watched.worse == ""
    now = {name: (n >= lost if good else n < 15 + won) for n, (name, good) in enumerate(usual.items())}
    take_round(watched, now, 0, 4.0)
    assert bool(watched.worse) is alarm
    assert (watched.rounds, watched.at) == (4, 4.0)
