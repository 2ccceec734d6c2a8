"""`POST /v1/feedback`: what a user says of an answer, in the words of its body."""

from __future__ import annotations

import time
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gearshift.platform.openai import invalid
from gearshift.platform.samples import Feedback

STARS = 5


class FeedbackBody(BaseModel):
    """At least one of thumbs, rating, correction, comment. Only the first feedback on a request counts in experiments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    request_id: Annotated[str, Field(min_length=8, max_length=80)]
    """Of the answer's `x-request-id`, or the id of its completion."""
    thumbs: Literal["up", "down"] | None = None
    rating: Annotated[int, Field(ge=1, le=STARS)] | None = None
    correction: Annotated[str, Field(max_length=20_000)] | None = None
    """What the answer should have been."""
    comment: Annotated[str, Field(max_length=20_000)] | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.thumbs is not None and self.rating is not None:
            raise ValueError("give either thumbs or rating, not both")
        if not (self.thumbs or self.rating or self.correction or self.comment):
            raise ValueError("needs one of thumbs, rating, correction, comment")
        return self

    def feedback(self, tenant: str) -> Feedback:
        value = None
        if self.thumbs is not None:
            value = float(self.thumbs == "up")
        elif self.rating is not None:
            value = (self.rating - 1) / (STARS - 1)
        return Feedback(
            request_id=self.request_id.replace("chatcmpl-", "req_"),
            tenant=tenant,
            at=time.time(),
            value=value,
            correction=self.correction or "",
            comment=self.comment or "",
        )


def parse_feedback(body: bytes) -> FeedbackBody:
    """Raises `InvalidRequest`."""
    try:
        return FeedbackBody.model_validate_json(body)
    except ValidationError as error:
        raise invalid(error) from error
