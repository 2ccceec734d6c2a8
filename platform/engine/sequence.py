"""One request inside the engine, and the values that scheduler and runner pass each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gearshift.platform.engine.banned import Banned
from gearshift.platform.request import FinishReason, SamplingParams, ServiceClass


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids of one request and how many of them have keys and values in the cache. Owned by the scheduler."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    tenant: str = ""
    service: ServiceClass = "interactive"
    prompt_text: str | None = None
    """Of a prompt that came as text."""
    banned: Banned | None = None
    salt: bytes = b""
    """Sequences share cached blocks only with those of the same salt."""

    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the first full blocks, as far as they were needed. Owned by the block pool."""
    num_published: int = 0
    """Blocks that others can find by their hash."""
    prompt_scores: dict[int, Scores] = field(default_factory=dict)
    """Of prompt tokens by their place, when they are asked for. Owned by the runner."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache when the sequence was first admitted."""
    admitted: bool = False
    arrival: int = 0
    turn: int = 0
    """Grows each time it gets work: who had the fewest turns lately goes first."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def remaining(self) -> int:
        """Known tokens that are still to be computed; 1 for a sequence that decodes."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Each token of the prompt is to be told with its probability, so all of them are computed."""
        return self.sampling.echo and self.sampling.logprobs is not None

    def tokens(self, start: int, end: int) -> list[int]:
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + self.output_ids[max(0, start - split) : max(0, end - split)]

    def finish_reason(self) -> FinishReason | None:
        """Whether the newest token is the last one."""
        if len(self.output_ids) >= self.sampling.min_tokens and self.output_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.output_ids) >= self.max_tokens else None


class Chunk(NamedTuple):
    """Compute tokens [start, end) of a sequence in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of what is known, so the step yields the next token."""
        return self.end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Places of the prompt tokens that this chunk tells the probabilities of: each follows a token in the chunk."""
        sequence = self.sequence
        if not sequence.scores_prompt:
            return range(0)
        return range(self.start + 1, min(self.end + 1, len(sequence.prompt_ids)))


Step = tuple[Chunk, ...]
"""What the scheduler decided; the runner computes it."""


class Scores(NamedTuple):
    """Natural logarithms of probabilities under the model, before temperature and filters: of a token, and of the likeliest ids
    there and itself, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(NamedTuple):
    """What the runner chose for a sequence. The numbers are there when its sampling asks for `certainty` or `logprobs`."""

    id: int
    logprob: float | None = None
    """Natural logarithm of its probability under the model, before temperature and filters."""
    entropy: float = 0.0
    """Of the model's distribution, in nats."""
    top: tuple[tuple[int, float], ...] = ()
    """As in `Scores`."""


class Token(NamedTuple):
    """What a step gave one sequence. `finish_reason` is set on the last."""

    sequence: Sequence
    sampled: Sampled
    finish_reason: FinishReason | None

    @property
    def id(self) -> int:
        return self.sampled.id
