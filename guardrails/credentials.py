"""Secrets: keys and tokens that tell themselves by their form, and what is called a secret and looks random.

The second kind has no form of its own: a value that follows a word such as key, token or password, is long enough, mixes
letters and digits, and is as disordered as a random string is (Shannon entropy a character). Placeholders and words are none.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from typing import Any

import re2

from gearshift.guardrails.patterns import Patterns
from gearshift.guardrails.verdict import Span

FORMS = (
    r"sk-[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and those who copied the form
    r"gs-[A-Za-z0-9_-]{20,}",  # our own API keys
    r"gh[pousr]_[A-Za-z0-9]{36,}",  # GitHub
    r"github_pat_[A-Za-z0-9_]{22,}",
    r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct)-[A-Za-z0-9_-]{20,}|GR1348941[A-Za-z0-9_-]{20,}",  # GitLab
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[0-9]-[A-Za-z0-9-]{10,}",  # Slack
    r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{40,}",
    r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA)[0-9A-Z]{16}",  # AWS access key id
    r"AIza[0-9A-Za-z_-]{35}|ya29\.[0-9A-Za-z_-]{20,}",  # Google
    r"hf_[A-Za-z0-9]{30,}|api_org_[A-Za-z0-9]{30,}",  # Hugging Face
    r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9]{20,}",  # Stripe
    r"SG\.[A-Za-z0-9_=-]{16,64}\.[A-Za-z0-9_=-]{16,}|xkeysib-[a-f0-9]{64}|key-[a-f0-9]{32}",  # SendGrid, Brevo, Mailgun
    r"npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}|rubygems_[a-f0-9]{48}|oy2[a-z0-9]{43}",  # package registries
    r"do[opr]_v1_[a-f0-9]{64}|dckr_(?:pat|oat)_[A-Za-z0-9_-]{20,}|fm[12]_[A-Za-z0-9+/=_-]{40,}",
    r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|sq0(?:atp|csp)-[A-Za-z0-9_-]{20,}|EAAA[A-Za-z0-9_-]{50,}",  # Shopify, Square
    r"lin_api_[A-Za-z0-9]{40}|ntn_[A-Za-z0-9]{40,}",  # Linear, Notion, Airtable
    r"secret_[A-Za-z0-9]{43}|pat[A-Za-z0-9]{14}\.[a-f0-9]{64}",
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9]{20,}|dapi[a-f0-9]{32}|pscale_(?:tkn|oauth|pw)_[A-Za-z0-9=._-]{30,}",
    r"hv[sbr]\.[A-Za-z0-9_-]{20,}|atlasv1\.[A-Za-z0-9_=-]{60,}",  # HashiCorp, Atlassian
    r"ATATT3[A-Za-z0-9_=-]{60,}|ATCTT3[A-Za-z0-9_=-]{60,}",
    r"NR(?:AK|JS|II|RA)-[A-Za-z0-9-]{19,}|PMAK-[a-f0-9]{24}-[a-f0-9]{34}",
    r"gl(?:sa|c)_[A-Za-z0-9+/=_-]{32,}|eyJrIjoi[A-Za-z0-9]{60,}",
    r"sntry[su]_[A-Za-z0-9+/=_-]{40,}|phc_[A-Za-z0-9]{40,}|figd_[A-Za-z0-9_-]{40,}",
    r"gsk_[A-Za-z0-9]{40,}|r8_[A-Za-z0-9]{37}|xai-[A-Za-z0-9]{70,}",
    r"pplx-[A-Za-z0-9]{40,}|sm_(?:pat|aat|sat)_[A-Za-z0-9]{16}",
    r"ops_eyJ[A-Za-z0-9+/=]{100,}|A3-[A-Z0-9]{6}-[A-Z0-9]{6,11}-[A-Z0-9-]{15,}",
    r"LTAI[A-Za-z0-9]{17,}|AGE-SECRET-KEY-1[A-Z0-9]{58}|EZ[AT]K[A-Za-z0-9]{54}",
    r"shippo_(?:live|test)_[a-fA-F0-9]{40}|CLOJARS_[a-z0-9]{60}",
    r"FLWSECK(?:_TEST)?-[A-Za-z0-9-]{12,}|FLWPUBK(?:_TEST)?-[A-Za-z0-9-]{12,}",
    r"duffel_(?:test|live)_[A-Za-z0-9_=-]{43}|p8e-[a-z0-9]{32}",
    r"rdme_[a-z0-9]{70}|tfp_[A-Za-z0-9]{40,}|pul-[a-f0-9]{40}",
    r"dt0c01\.[A-Z0-9]{24}\.[A-Z0-9]{64}|sgp_[A-Za-z0-9_]{40,}|HRKU-AA[A-Za-z0-9_-]{50,}",
    r"AKC[A-Za-z0-9]{10,}|\bAP[0-9A-F][A-Za-z0-9]{8,}",  # Artifactory, Twilio, Facebook
    r"\b(?:AC|SK)[a-z0-9]{32}|EAA[A-Za-z0-9]{60,}",
    r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}|[MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,38}",  # Telegram, Discord
    r"[A-Za-z0-9_~.]{3}[0-9]Q~[A-Za-z0-9_~.-]{31,34}|s-s4t2(?:ud|af)-[a-f0-9]{64}",  # Azure, 42
    r"eyJ[A-Za-z0-9_-]{8,180}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?",  # JSON Web Token
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[A-Za-z0-9+/=\s]*(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?",
)
PEM_BEGIN = "-----BEGIN "
PEM_ALPHABET = string.ascii_letters + string.digits + "+/=-" + string.whitespace

_CALLED = (  # the word, what joins it to the value, the value
    r"(?i)(?:key|token|secret|password|passwd|pwd|passphrase|credentials?|auth|bearer|apikey|client_?id|access|webhook)"
    r"""[A-Za-z0-9_.-]{0,40}["'\]`]{0,2}"""
    r"""(?:\s{0,4}(?::=|=>|==|=|:|,|\|\|)\s{0,4}|\s{1,4}(?:is|are|was)?:?\s{0,4})["'`]?(?:Bearer |Basic |Token )?"""
    r"""([A-Za-z0-9_.:+/=~!@#$%^&*-]{10,512})"""
)
_HEADER = r"""uthorization["']?: ?["']?(?:Basic|Bearer|Token) ([A-Za-z0-9+/_=.-]{8,})"""
_LOGIN = r"""(?:-u|--user)[ =]["']?[^\s"':]{1,80}["']?:["']?([^\s"']{3,120})"""
_IN_ADDRESS = r"[a-z][a-z0-9+.-]{1,20}://[^\s:@/\"'<>]{0,80}:([^\s@/\"'<>]{3,120})@[A-Za-z0-9.-]+"
LEAST_ENTROPY = 3.0
"""Bits a character; a random hexadecimal string of 16 has about 3.2, an English word of that length about 3."""
_PLACEHOLDERS = ("example", "xxxx", "your", "****", "....", "changeme", "placeholder", "<", "${", "{{")


class Secrets(Patterns):
    """Keys and tokens of well-known forms, and private keys in PEM (RFC 7468), which alone go over several lines.

    named: also values that are called a secret; they need their name before them, so they are for whole texts."""

    def __init__(self, named: bool = False) -> None:
        super().__init__("secrets", FORMS, string.ascii_letters + string.digits + "_.-=+/:~")
        self._named: Any = re2.compile(_CALLED) if named else None
        self._shown: tuple[Any, ...] = tuple(map(re2.compile, (_IN_ADDRESS, _HEADER, _LOGIN))) if named else ()

    def find(self, text: str) -> list[Span]:
        found = super().find(text)
        found += [Span(*match.span(1)) for pattern in self._shown for match in pattern.finditer(text)]
        if self._named is not None:
            spans = [Span(*match.span(1)) for match in self._named.finditer(text)]
            found += [span for span in spans if random_like(text[span.start : span.end])]
        return sorted(set(found))

    def open_from(self, text: str) -> int:
        end = super().open_from(text)
        pem = text.rfind(PEM_BEGIN)
        if 0 <= pem < end and not text[pem + len(PEM_BEGIN) :].rstrip(PEM_ALPHABET):
            return pem
        return end


def random_like(value: str) -> bool:
    """Whether a value is as disordered as a generated secret, and no placeholder."""
    bare = value.strip(".,;:!?*-=\"'`")
    letters, digits = sum(c.isalpha() for c in bare), sum(c.isdigit() for c in bare)
    if any(mark in value.lower() for mark in _PLACEHOLDERS):
        return False
    if digits == len(bare):  # the identifiers that come with some secrets; shorter numbers are years and amounts
        return digits >= 15
    if len(bare) < 10 or not letters or digits < 2:
        return False
    return entropy(bare) >= LEAST_ENTROPY


def entropy(text: str) -> float:
    """Shannon's, in bits a character, of the characters as they are distributed in the text."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())
