"""What the model is shown: the release's prompt, then the client's messages."""

from __future__ import annotations

from gearshift.platform.config import Prompt
from gearshift.platform.request import Message


def assemble(prompt: Prompt, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt's system text leads. A system message of the client's is joined to it, since many chat templates take one
    system message, and only as the first."""
    if not prompt.system:
        return messages
    if messages and messages[0].role in ("system", "developer"):
        return Message("system", f"{prompt.system}\n\n{messages[0].content}"), *messages[1:]
    return Message("system", prompt.system), *messages
