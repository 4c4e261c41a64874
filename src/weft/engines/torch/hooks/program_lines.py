"""Lines of a user's program, as errors show them."""

from __future__ import annotations


def strategy_line(what: str) -> str:
    """The line with a strategy: "model, ctx = weft.replicate(model, ctx)"."""
    if what == "zero_partition":
        return "model, optimizer, ctx = weft.zero_partition(...)"
    return f"model, ctx = weft.{what}(model, ctx)"


def part_expression(name: str) -> str:
    """A part of the model, by its name: "model.blocks[0].up"."""
    parts = name.split(".") if name else ()
    return "model" + "".join(f".{p}" if p.isidentifier() else f"[{p if p.isdigit() else repr(p)}]" for p in parts)
