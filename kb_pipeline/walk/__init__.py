"""One pass over one source: pages become documents, versions and tasks; what a complete listing lacks is hidden and deleted.

Begin, page and end are transactions under the lease's token: the checkpoint moves with the tasks, a killed walk goes on where
it stopped, with the window and the clock that it began with. Only a COMPLETE full listing that did not shrink removes
anything, and only a walk that completed moves the watermark.
"""

from kb_pipeline.walk.report import COUNTS, LeaseLost, PassReport
from kb_pipeline.walk.walker import change_token, walk_source

__all__ = ["COUNTS", "LeaseLost", "PassReport", "change_token", "walk_source"]
