"""What stands before and behind the flow, made elsewhere: the source systems, and what answers questions.

One upstream asset per kind of connector, not per configured source: definitions load without a database, and sources come and
go with the spaces. Which sources a space has is in the metadata of its `source_snapshot`.
"""

from dagster import AssetKey, AssetSpec

from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.registry import CONNECTORS

GROUP = "knowledge_base"  # one for all: with a second one the web UI shows closed boxes instead of the flow
OWNERS = ["team:knowledge-base"]
SEARCH_INDEX = AssetKey(["search", "index"])


def source_key(kind: str) -> AssetKey:
    return AssetKey(["sources", kind])


SOURCES = tuple(
    AssetSpec(
        source_key(kind),
        group_name=GROUP,
        owners=OWNERS,
        kinds={"source"},
        tags={"kb/connector": kind},
        description=f"Systems that the connector `{kind}` reads. Documents change there by themselves; `kb source add SPACE "
        f"NAME {kind} ...` makes one a source of a space, and `source_snapshot` finds out what has changed.",
    )
    for kind in sorted(CONNECTORS)
)

SEARCH = AssetSpec(
    SEARCH_INDEX,
    deps=["vector_index"],
    partitions_def=SPACES,
    group_name=GROUP,
    owners=OWNERS,
    kinds={"search"},
    tags={"kb/step": "search"},
    description="What applications search: the vectors of a space's current chunks, and the rows in PostgreSQL that decide "
    "what of them may be shown. `vector_index` publishes into it; nobody materialises it. `kb search SPACE QUESTION` asks it.",
)

EXTERNAL_ASSETS = (*SOURCES, SEARCH)
