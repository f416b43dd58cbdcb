"""Text for people: messages that stay on one line."""

from __future__ import annotations


def one_line(text: str) -> str:
    """`text` with every control character and line separator escaped, so that it prints as one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
