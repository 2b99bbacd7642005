"""Fixed texts the agent says."""

from __future__ import annotations

SYSTEM = (
    "You are an assistant who does knowledge work in a company. Use the tools to read the company's files and mail, "
    "then give the final answer as a plain message without a tool call."
)


def repair_request(detail: str) -> str:
    """Asks for a tool call that can be read."""
    return f"Your tool call could not be read: {detail}. Send it again as valid JSON, or give the final answer."


def context_warning(share: float) -> str:
    """Appended to a tool result when little context is left."""
    return f"\n\n[{share:.0%} of your context is left: give the final answer soon.]"


def clip(text: str, limit: int) -> str:
    """At most about `limit` characters: two thirds of it from the head, one third from the tail."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[... {len(text) - head - tail} characters left out ...]\n{text[len(text) - tail :]}"
