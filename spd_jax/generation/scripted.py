"""Drafts by script: right or wrong where the script says so, to demonstrate and test exact cycle counts.

A scripted draft is made of the tokens that autoregressive decoding gave, so it is data of a run
(`Options.forced_drafts`) and one compilation serves all scripts. It knows neither models nor pipelines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_PREFIX = "script:"


@dataclasses.dataclass(frozen=True)
class Script:
    """Which drafts are right: `bits[i]` for generated token i, `beyond` for tokens after the last bit.

    Token 0 comes from the prefill and is never drafted, so its bit has no effect.
    """

    bits: tuple[bool, ...] = ()
    beyond: bool = True

    def drafts(self, ids: Sequence[int], vocab_size: int) -> list[int]:
        """What to draft at each generated position whose right token is `ids[i]`: that, or that + 1 mod V."""
        right = [self.bits[i] if i < len(self.bits) else self.beyond for i in range(len(ids))]
        return [token if good else (token + 1) % vocab_size for token, good in zip(ids, right, strict=True)]


def parse_script(head: str) -> Script | None:
    """The script that `oracle`, `anti` or `script:1101...` stands for; None for every other head.

    Raises:
        ValueError: a script that is not a text of 0 and 1.
    """
    if head == "oracle":
        return Script()
    if head == "anti":
        return Script(beyond=False)
    if not head.startswith(_PREFIX):
        return None
    bits = head.removeprefix(_PREFIX)
    if not bits or set(bits) - {"0", "1"}:
        raise ValueError(f"a scripted head is {_PREFIX} and digits 0 and 1, for example {_PREFIX}1101, found {head!r}")
    return Script(tuple(bit == "1" for bit in bits))
