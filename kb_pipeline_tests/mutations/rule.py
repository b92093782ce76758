"""One rule of the product, and what its removal looks like."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """``old`` occurs exactly once in ``file`` (a path below the root of the project)."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``edits`` take the rule away; at least one of ``tests`` (below kb_pipeline_tests) fails then.

    ``beside``: keys of rules that protect the same. Alone its removal shows nothing, so they are removed together with it.
    ``redundant``: why this one is kept all the same; without ``beside`` it is not run.
    """

    key: str
    name: str
    harm: str  # what goes wrong without it
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    redundant: str = ""
