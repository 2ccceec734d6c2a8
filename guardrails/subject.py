"""One text under the eyes of a policy: as it was written, and as it reads when its disguise is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from gearshift.guardrails.normalise import normalise
from gearshift.guardrails.tagger import Entity
from gearshift.guardrails.view import View

Vectors = Mapping[str, Sequence[float] | None]
"""Of texts: None where it did not come in time."""
Entities = Mapping[str, Sequence[Entity] | None]
"""What texts name: None where nobody could tell."""


class Subject:
    """vectors: None where no encoder runs. entities: None where nobody could tell."""

    def __init__(self, text: str, vectors: Vectors | None = None, entities: Sequence[Entity] | None = None) -> None:
        self.text = text
        self.vectors = vectors
        self.entities = entities

    @cached_property
    def view(self) -> View:
        return normalise(self.text)
