"""Which stamps an incremental walk asks for, when everything is listed instead, and what was read too early to be final.

Watermarks, windows and stamps are seconds since the epoch in the source's clock; ours, which may be off, is never used.
What a walk that began at W could not see yet has a stamp of W - skew or later, truncated W - skew - resolution. A walk asks
for stamps from that far behind the watermark on, inclusively: equal stamps are never skipped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kb_pipeline.model import Item, Page
from kb_pipeline.ports import Capabilities
from kb_pipeline.states import WalkKind

MIN_OVERLAP_SECONDS = 60.0
SWEEP_SECONDS = 24 * 3600.0  # a source with changes is listed in full at least this often: only that finds what is gone

Windows = dict[str, float | None]  # per scope: from when on; None lists all of it


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a source when a walk begins. ``listed_ago``: seconds since its last complete listing."""

    clock: float  # the source's, now
    watermark: Mapping[str, float]
    listed_ago: float | None
    deletions_approved: bool  # deletions waited for approval, and have it now


def overlap(capabilities: Capabilities) -> float:
    return max(MIN_OVERLAP_SECONDS, capabilities.resolution_seconds + capabilities.skew_seconds)


def lower_bound(watermark: float, capabilities: Capabilities) -> float:
    """The first stamp that is asked for."""
    resolution = capabilities.resolution_seconds
    floor = math.floor(watermark / resolution) * resolution if resolution > 0 else watermark
    return floor - overlap(capabilities)


def choose(capabilities: Capabilities, scopes: Sequence[str], past: Past, *, full: bool) -> tuple[WalkKind, Windows]:
    """How a new walk goes. A scope without a watermark is listed as a whole within an incremental walk, too."""
    latest = past.clock + overlap(capabilities)  # behind that the source's clock was set back, and stamps repeat
    known = {s: past.watermark[s] for s in scopes if past.watermark.get(s, math.inf) <= latest}
    recently = past.listed_ago is not None and past.listed_ago <= SWEEP_SECONDS
    if full or not capabilities.changes or not known or not recently or past.deletions_approved:
        return WalkKind.FULL, dict.fromkeys(scopes)
    return WalkKind.INCREMENTAL, {s: lower_bound(known[s], capabilities) if s in known else None for s in scopes}


def unsettled(item: Item, clock: float, capabilities: Capabilities) -> bool:
    """Could another edit show the same revision after ``clock``, a moment before the item was listed?"""
    resolution = capabilities.resolution_seconds
    if resolution <= 0 or item.modified_at is None:
        return False
    return item.modified_at.timestamp() + resolution + capabilities.skew_seconds > clock


def provisional(page: Page, clock: float, capabilities: Capabilities) -> Page:
    """The page with its unsettled items marked. They lie within the window of every walk that begins later."""
    if capabilities.resolution_seconds <= 0:
        return page
    return replace(
        page, items=tuple(replace(i, provisional=True) if unsettled(i, clock, capabilities) else i for i in page.items)
    )
