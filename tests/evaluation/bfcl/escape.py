"""How code gets at Python's builtins where none are at hand: what stands behind that is to be tested, too."""

from __future__ import annotations

BUILTINS = (
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'catch_warnings'][0]()._module.__builtins__"
)


def escaped(text: str) -> str:
    """Code that finds Python's builtins although none are at hand, and evaluates `text` with them."""
    return f"(lambda found: found['eval']({text!r}, {{'__builtins__': found}}))({BUILTINS})"
