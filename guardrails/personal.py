"""Personal data that has a form: phone numbers, bank accounts, social security numbers and addresses of machines.

Names and postal addresses have none; they need a model that reads. Sources: ISO 13616 (IBAN), ITU-T E.164 (phone numbers), the US
Social Security Administration (numbers since 1936), RFC 791 and 4291 (IP addresses).
"""

from __future__ import annotations

import ipaddress
import re
import string
from typing import Any

import re2

from gearshift.guardrails.patterns import WORD, Patterns, word_start
from gearshift.guardrails.verdict import Span

_PHONE = r"(?:\+|\(\+?|00)?[0-9](?:[ ./()-]{0,2}[0-9]){5,14}(?: ?(?:x|ext\.?) ?[0-9]{1,5})?"
_PHONE_ALONE = re.compile(
    r"(?:\+|00)[1-9][0-9 ./()-]{6,}.*|(?:\+?1[ .-]?)?(?:\([0-9]{3}\) ?|[0-9]{3}[.-])[0-9]{3}[.-][0-9]{4}(?: ?(?:x|ext).*)?",
    re.DOTALL,
)
"""What is a phone number whatever stands before it: international, or as it is written in North America."""
_PHONE_CALLED = re.compile(
    r"(?:phone|mobile|tel|cell|fax|desk|call|dial|ring|reach|contact|whatsapp|sms)\b[^\n0-9]{0,30}$", re.IGNORECASE
)
_NO_PHONE = re.compile(
    r"[0-9]{3}-[0-9]{2}-[0-9]{4}|[0-9]{1,3}(?:\.[0-9]{1,3}){3}"
    r"|[0-9]{1,4}[-./][0-9]{1,2}[-./][0-9]{1,4}(?: [0-9]{1,2})?|[0-9]{4} ?- ?[0-9]{4}"
)
_IBAN = r"\b(?i:[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?)\b"
_IBAN_BEGUN = r"(?i)\b[A-Z]{1,2}(?:[0-9]{1,2}(?: ?[A-Z0-9]{1,4}){0,9} ?)?$"
LONGEST = 64
"""Characters of an account number with its spaces, and what stands before it."""
_SSN = r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b"
_IP = (
    r"\b[0-9]{1,3}(?:\.[0-9]{1,3}){3}\b|(?:[0-9A-Fa-f]{1,4}:){2,7}[0-9A-Fa-f]{1,4}\b"
    r"|(?:[0-9A-Fa-f]{1,4}:){1,6}:(?:[0-9A-Fa-f]{1,4}:?){0,6}"
)


class Phones(Patterns):
    """named: also numbers of no form of their own that follow a word such as phone or call; for whole texts."""

    def __init__(self, named: bool = False) -> None:
        super().__init__("phone", [_PHONE], string.digits + " ()-./+xet")
        self._named = named

    def find(self, text: str) -> list[Span]:
        return [span for span in super().find(text) if self._is_phone(text, span)]

    def _is_phone(self, text: str, span: Span) -> bool:
        number = text[span.start : span.end]
        before = text[max(0, span.start - 40) : span.start]
        if _NO_PHONE.fullmatch(number) or (before and before[-1] in WORD) or _follows(text, span.end):
            return False
        if _PHONE_ALONE.fullmatch(number):
            return True
        return self._named and _PHONE_CALLED.search(before) is not None

    def open_from(self, text: str) -> int:
        end = len(text.rstrip(self._alphabet))
        begins = len(text) - len(text[end:].lstrip(" )-./xet"))  # a number begins with a digit, a plus or a bracket
        return begins if begins == len(text) else word_start(text, begins)


def _follows(text: str, end: int) -> bool:
    """Whether a word goes on after a number."""
    return end < len(text) and text[end] in WORD


class Accounts(Patterns):
    """International bank account numbers with a right checksum."""

    def __init__(self) -> None:
        super().__init__("iban", [_IBAN], "")
        self._begun: Any = re2.compile(_IBAN_BEGUN)

    def find(self, text: str) -> list[Span]:
        return [found for span in super().find(text) if (found := _account(text, span)) is not None]

    def open_from(self, text: str) -> int:
        begun = self._begun.search(text[-LONGEST:])
        return len(text) if begun is None else len(text) - len(begun.group())


def _account(text: str, span: Span) -> Span | None:
    """The longest beginning of what looks like one that is one."""
    for end in range(span.end, span.start + 14, -1):
        if text[end - 1] != " " and not text[end : end + 1].isalnum() and mod97(text[span.start : end]):
            return Span(span.start, end)
    return None


def mod97(text: str) -> bool:
    """Whether an IBAN's check digits are right (ISO 7064, MOD 97-10)."""
    bare = text.replace(" ", "").upper()
    if not 15 <= len(bare) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in bare[4:] + bare[:4])) % 97 == 1


class SocialSecurity(Patterns):
    """US numbers, with their dashes."""

    def __init__(self) -> None:
        super().__init__("ssn", [_SSN], string.digits + "-", mark="-")

    def find(self, text: str) -> list[Span]:
        return [span for span in super().find(text) if not text.startswith(("000", "666"), span.start)]


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_OCTETS = re.compile(rf"{_OCTET}(?:\.{_OCTET})*")


class Machines(Patterns):
    """IPv4 and IPv6 addresses."""

    def __init__(self) -> None:
        super().__init__("ip", [_IP], string.hexdigits + ":.")

    def find(self, text: str) -> list[Span]:
        return [span for span in super().find(text) if _is_address(text[span.start : span.end])]


def _is_address(text: str) -> bool:
    if ":" not in text:
        return _OCTETS.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return sum(map(bool, text.split(":"))) > 2  # `a::` is an address too, and more often none
