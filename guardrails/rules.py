"""The rules of a policy by name."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

import numpy as np

from gearshift.guardrails.credentials import Secrets
from gearshift.guardrails.patterns import Patterns, Rule
from gearshift.guardrails.personal import Accounts, Machines, Phones, SocialSecurity
from gearshift.guardrails.verdict import Span, Stage

EMAIL_PATTERN = r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,63}"  # lengths of RFC 5321, 4.5.3.1
DIGITS_PATTERN = r"[0-9](?:[ -]?[0-9]){11,}"
SHORTEST_CARD, LONGEST_CARD = 12, 19
_CARD = re.compile(  # prefixes and lengths of ISO/IEC 7812 issuers: Visa, Mastercard, Amex, Diners, JCB, Maestro, others
    r"4[0-9]{12}(?:[0-9]{3}){0,2}|5[1-5][0-9]{14}|2[2-7][0-9]{14}|3[47][0-9]{13}|3[0689][0-9]{12}|35[0-9]{14}|(?:1800|2131)[0-9]{11}"
    r"|(?:5018|5020|5038|5893|6304|6759|676[1-3])[0-9]{8,15}|6[0-9]{15,18}"
)


class Cards(Patterns):
    """Payment card numbers, alone or among other numbers: whole groups of digits that together have a card issuer's
    prefix and length, and a right checksum."""

    def __init__(self) -> None:
        super().__init__("card", [DIGITS_PATTERN], string.digits + " -")

    def find(self, text: str) -> list[Span]:
        runs = super().find(text)
        return _cards_in(text, runs) if runs else []

    def open_from(self, text: str) -> int:
        end = super().open_from(text)
        if end == len(text):
            return end
        return len(text) - len(text[end:].lstrip(" -"))  # a number begins with a digit


def _cards_in(text: str, runs: Sequence[Span]) -> list[Span]:
    """The longest card that begins at each group of a run of digits; what is taken is not looked at again."""
    written = np.frombuffer("/".join(text[run.start : run.end] for run in runs).encode(), np.uint8)
    at = np.flatnonzero(written >= ord("0"))  # of each digit; what is between them comes before
    run_at = np.cumsum([0, *(run.end - run.start + 1 for run in runs[:-1])])
    run_of = np.searchsorted(run_at, at, "right") - 1
    places = at - run_at[run_of] + np.array([run.start for run in runs])[run_of]
    run_stops = np.searchsorted(run_of, np.arange(len(runs)), "right")
    digits = written[at].tobytes().decode()
    begins = np.flatnonzero(np.diff(at, prepend=-2) > 1)
    is_stop = np.zeros(len(digits) + 1, dtype=bool)
    is_stop[begins[1:]] = is_stop[-1] = True
    begins = begins[(written[at[begins]] >= ord("1")) & (written[at[begins]] <= ord("6"))]
    lasts = np.minimum(begins + LONGEST_CARD, run_stops[run_of[begins]])
    sums, stops, found, taken = Luhn(digits), is_stop.tolist(), list[Span](), 0
    for begin, last in zip(begins.tolist(), lasts.tolist(), strict=True):
        if begin < taken or (digits[begin] == "1" and not digits.startswith("1800", begin)):
            continue
        for stop in range(last, begin + SHORTEST_CARD - 1, -1):
            if stops[stop] and sums.valid(begin, stop) and _CARD.fullmatch(digits, begin, stop):
                found.append(Span(int(places[begin]), int(places[stop - 1]) + 1))
                taken = stop
                break
    return found


class Luhn:
    """Check digits (ISO/IEC 7812-1, annex B) of all parts of a run of digits, each at the cost of a subtraction."""

    def __init__(self, digits: str) -> None:
        plain = np.frombuffer(digits.encode(), np.uint8).astype(np.int64) - ord("0")
        twice = np.array((0, 2, 4, 6, 8, 1, 3, 5, 7, 9))[plain]
        odd, even = plain.copy(), plain.copy()  # those whose last digit is at an odd or an even place
        odd[0::2], even[1::2] = twice[0::2], twice[1::2]
        self._sums = [[0, *np.cumsum(each).tolist()] for each in (even, odd)]

    def valid(self, begin: int, stop: int) -> bool:
        """Whether the last of the digits [begin, stop) is the right check digit of the others."""
        sums = self._sums[(stop - 1) % 2]
        return bool((sums[stop] - sums[begin]) % 10 == 0)


class Blocklist:
    """Terms, whatever their case. An alternation of literals: linear without RE2, which costs more to call."""

    name = "blocklist"

    def __init__(self, terms: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(re.escape(term) for term in terms), re.IGNORECASE)
        self._beginnings: dict[str, set[str]] = {}
        for term in (term.lower() for term in terms):
            for length in range(1, len(term)):
                self._beginnings.setdefault(term[length - 1], set()).add(term[:length])

    def find(self, text: str) -> list[Span]:
        return [Span(*match.span()) for match in self._pattern.finditer(text)]

    def open_from(self, text: str) -> int:
        candidates = self._beginnings.get(text[-1:].lower())
        if candidates is None:
            return len(text)
        lowered = text.lower()
        return len(text) - max((len(start) for start in candidates if lowered.endswith(start)), default=0)


def make_rule(name: str, terms: Sequence[str], stage: Stage = "output") -> Rule:
    """The rule of a name in the config. Answers are watched while they come, so that what a secret is called may be long gone."""
    if name == "blocklist":
        return Blocklist(terms)
    if name == "card":
        return Cards()
    if name == "email":
        return Patterns("email", [EMAIL_PATTERN], string.ascii_letters + string.digits + "._%+@-", mark="@")
    if name == "phone":
        return Phones(named=stage == "input")
    if name == "iban":
        return Accounts()
    if name == "ssn":
        return SocialSecurity()
    if name == "ip":
        return Machines()
    if name == "secrets":
        return Secrets(named=stage == "input")
    raise ValueError(f"no rule named {name!r}")
