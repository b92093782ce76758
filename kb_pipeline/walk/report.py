"""What a pass tells whoever asked for it."""

from dataclasses import dataclass, field

from kb_pipeline.errors import Transient
from kb_pipeline.model import BadItem, Verdict
from kb_pipeline.states import WalkKind

COUNTS = ("seen", "new", "changed", "unchanged", "moved", "metadata_only", "hidden", "deleted", "failed")


@dataclass(slots=True)
class PassReport:
    """What one pass found and did. ``waiting_deletions``: not seen, but kept until somebody approves."""

    source: str
    kind: WalkKind = WalkKind.FULL
    verdict: Verdict = Verdict.COMPLETE
    reasons: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    waiting_deletions: int = 0
    resumed: bool = False
    bad: list[BadItem] = field(default_factory=list)

    def add(self, counts: dict[str, int]) -> None:
        """Of the walk, with those of the processes that walked before this one."""
        self.counts |= {k: v for k, v in counts.items() if k in COUNTS}


class LeaseLost(Transient):
    code = "lease_lost"
