"""The rules of a policy by name."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from gearshift.guardrails.credentials import Secrets
from gearshift.guardrails.patterns import Patterns, Rule
from gearshift.guardrails.personal import Accounts, Machines, Phones, SocialSecurity
from gearshift.guardrails.verdict import Span, Stage

EMAIL_PATTERN = r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,63}"  # lengths of RFC 5321, 4.5.3.1
DIGITS_PATTERN = r"[0-9](?:[ -]?[0-9]){11,}"
LONGEST_CARD = 19
_GROUP = re.compile(r"[0-9]+")
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
        return [card for run in super().find(text) for card in _cards_in(text, run)]

    def open_from(self, text: str) -> int:
        end = super().open_from(text)
        if end == len(text):
            return end
        return len(text) - len(text[end:].lstrip(" -"))  # a number begins with a digit


def _cards_in(text: str, run: Span) -> list[Span]:
    """The longest card that begins at each group of a run of digits; what is taken is not looked at again."""
    groups = [Span(*match.span()) for match in _GROUP.finditer(text, run.start, run.end)]
    found: list[Span] = []
    for first, group in enumerate(groups):
        if found and group.start < found[-1].end:
            continue
        digits, end = "", None
        for part in groups[first : first + LONGEST_CARD]:
            digits += text[part.start : part.end]
            if len(digits) > LONGEST_CARD:
                break
            if _CARD.fullmatch(digits) and luhn(digits):
                end = part.end
        if end is not None:
            found.append(Span(group.start, end))
    return found


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


def luhn(text: str) -> bool:
    """Whether the last digit is the right check digit of the others (ISO/IEC 7812-1, annex B)."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = (digit * 2 - 9 if digit > 4 else digit * 2 for digit in digits[1::2])
    return (sum(digits[0::2]) + sum(doubled)) % 10 == 0


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
