from __future__ import annotations

import pytest

from gearshift.guardrails.verdict import Span


class Raises:
    """A rule that can't run."""

    name = "broken"

    def find(self, text: str) -> list[Span]:
        raise RuntimeError("the rule is broken")

    def open_from(self, text: str) -> int:
        raise RuntimeError("the rule is broken")


@pytest.fixture
def broken() -> Raises:
    return Raises()
