"""One text under the eyes of a policy: as it was written, and as it reads when its disguise is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from gearshift.guardrails.normalise import normalise
from gearshift.guardrails.view import View

Vectors = Mapping[str, Sequence[float] | None]
"""Of texts: None where it did not come in time."""


class Subject:
    """vectors: None where no encoder runs."""

    def __init__(self, text: str, vectors: Vectors | None = None) -> None:
        self.text = text
        self.vectors = vectors

    @cached_property
    def view(self) -> View:
        return normalise(self.text)
