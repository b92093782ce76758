"""Great Expectations over what each step has stored. Off the path of a sync: an asset and a job of their own, run at night.

An expectation is data here, and made into one of Great Expectations' classes where a check runs: the library takes seconds
and 150 MB to import.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    Failure,
    MaterializeResult,
    MetadataValue,
    TableColumn,
    TableRecord,
    TableSchema,
    asset,
)

from kb_pipeline.engine import Engine
from kb_pipeline.errors import KbError, Rejected, StateError
from kb_pipeline.orchestration.checks import result, spec
from kb_pipeline.orchestration.checks.frames import FRAMES, NEWEST
from kb_pipeline.orchestration.lineage import GROUP, OWNERS, SEARCH_INDEX
from kb_pipeline.orchestration.partitions import SPACES
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.store import spaces
from kb_pipeline.store.database import transaction
from kb_pipeline.store.spaces import Space

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "data_quality"
SHOWN = 50  # documents of each broken expectation
AGAIN = "kb doc delete ID, then kb sync SPACE --full"
REPARSE, REEMBED, RECONCILE = "kb sync SPACE --reparse", "kb sync SPACE --reembed", "kb reconcile SPACE"
SEARCH_FOR_IT = "compare the row with its backup: this is damage that no command of ours makes"


@dataclass(frozen=True, slots=True)
class Expectation:
    """``kind``: a class of great_expectations.expectations. ``repair``: what to do where it does not hold."""

    name: str
    kind: str
    values: Mapping[str, Any]
    repair: str


def _true(name: str, column: str, repair: str) -> Expectation:
    return Expectation(name, "ExpectColumnValuesToBeInSet", {"column": column, "value_set": [True]}, repair)


def _in(name: str, column: str, values: Sequence[Any], repair: str) -> Expectation:
    return Expectation(name, "ExpectColumnValuesToBeInSet", {"column": column, "value_set": list(values)}, repair)


def _between(name: str, column: str, low: float | None, high: float | None, repair: str) -> Expectation:
    values = {"column": column, "min_value": low, "max_value": high}
    return Expectation(name, "ExpectColumnValuesToBeBetween", values, repair)


def _not_blank(name: str, column: str, repair: str) -> Expectation:
    return Expectation(name, "ExpectColumnValuesToMatchRegex", {"column": column, "regex": r"\S"}, repair)


def _not_null(name: str, column: str, repair: str) -> Expectation:
    return Expectation(name, "ExpectColumnValuesToNotBeNull", {"column": column}, repair)


def _not_below(name: str, column: str, floor: str, repair: str) -> Expectation:
    values = {"column_A": column, "column_B": floor, "or_equal": True}
    return Expectation(name, "ExpectColumnPairValuesAToBeGreaterThanB", values, repair)


SUITES: Mapping[str, Sequence[Expectation]] = {
    "documents": (
        _not_blank("external id is not blank", "external_id", AGAIN),
        _not_blank("title is not blank", "title", "kb sync SPACE --full"),
        _not_blank("address is not blank", "uri", "kb sync SPACE --full"),
        _not_below("current version is not above the newest", "last_ver", "current_ver", AGAIN),
        _between("available documents have a version", "available_version", 1, None, AGAIN),
        _in("current version is ready", "current_status", ["READY"], REPARSE),
        _true("published documents say since when", "has_published_at", REPARSE),
        _true("current version is the open one of the history", "in_history", REPARSE),
        _in("source is not removed", "source_status", ["ACTIVE", "PAUSED"], "kb doc delete ID"),
        _between("not seen in the future", "seen_seconds_ago", -300, None, "set the clock of the database's machine"),
    ),
    "versions": (
        _not_null("original is stored", "raw_path", AGAIN),
        _between("original is not empty", "raw_bytes", 1, None, AGAIN),
        _between("sha256 of the original is whole", "sha256_bytes", 32, 32, AGAIN),
        _not_null("blocks are stored", "parsed_path", REPARSE),
        _between("sha256 of the text is whole", "text_sha256_bytes", 32, 32, REPARSE),
        _not_null("parser said what it read", "format", REPARSE),
        _not_null("recipe is known", "recipe", REPARSE),
        _between("at least one chunk is listed", "chunks", 1, None, REPARSE),
        _between("no chunk is listed twice", "repeated", 0, 0, REPARSE),
        _between("listed chunks are there", "missing", 0, 0, AGAIN),
    ),
    "chunks": (
        _not_blank("text is not blank", "content", AGAIN),
        Expectation(
            "text is not mojibake",
            "ExpectColumnValuesToNotMatchRegex",
            {"column": "content", "regex": "\ufffd", "mostly": 0.99},  # a document may well speak of this character
            REPARSE,
        ),
        _between("size is one that an embedder takes", "tokens", 1, 8192, AGAIN),
        _not_below("pages run forwards", "page_to", "page_from", REPARSE),
        _true("hash is that of the text", "hash_holds", SEARCH_FOR_IT),
        _true("text and state are of one hash", "state_agrees", SEARCH_FOR_IT),
        _true("text and state are of one document", "owner_agrees", SEARCH_FOR_IT),
    ),
    "embeddings": (
        _true("text has a vector", "has_vector", REEMBED),
        Expectation("vector is of the model's length", "ExpectColumnValuesToBeInSet", {"column": "dimension"}, REEMBED),
        _true("vector is of numbers", "finite", REEMBED),
        _between("vector is of length one", "norm", 0.99, 1.01, REEMBED),
        Expectation(
            "different texts have different vectors",
            "ExpectColumnProportionOfUniqueValuesToBeBetween",
            {"column": "digest", "min_value": 0.5},
            REEMBED,
        ),
    ),
    "index": (
        _true("vector is in the index", "in_index", RECONCILE),
        _between("permissions in the index are not behind", "acl_changes_behind", None, 0, RECONCILE),
        _between("vector is marked as indexed", "vec_status", 1, 1, AGAIN),
        _true("name is made of row, text and incarnation", "name_holds", SEARCH_FOR_IT),
        _true("bucket is the name's", "bucket_holds", SEARCH_FOR_IT),
        _true("checksum is that of name and permissions", "checksum_holds", SEARCH_FOR_IT),
        Expectation("no name is used twice", "ExpectColumnValuesToBeUnique", {"column": "vec_id"}, SEARCH_FOR_IT),
        _in("current vector is not condemned", "condemned", [False], RECONCILE),
    ),
}


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of one expectation. ``documents``: the first that break it, where it is about single rows."""

    expectation: Expectation
    holds: bool
    looked_at: int
    broken: int
    documents: tuple[str, ...]


@asset(
    name=NAME,
    partitions_def=SPACES,
    group_name=GROUP,
    owners=OWNERS,
    deps=[SEARCH_INDEX],
    kinds={"pandas", "postgres"},
    tags={"kb/step": "check"},
    check_specs=[
        spec(
            stage,
            NAME,
            f"{len(suite)} expectations over the newest {NEWEST:,} rows: " + "; ".join(x.name for x in suite) + ".",
        )
        for stage, suite in SUITES.items()
    ],
    description="""
What the five steps have stored, looked at row by row by Great Expectations: a check for each step, and in it a table of
expectations with the documents that break one and the command that repairs them.

**A materialisation means:** the newest rows of every step of this space were read and judged. It changes nothing.

**When it fails:** the database or the index cannot be used, see `code` and `message`. A check that does not hold fails no run.
""",
)
def data_quality(context: AssetExecutionContext, kb: KbResource) -> MaterializeResult:
    key = context.partition_key
    try:
        engine, space = kb.space(key)
        judged = judge(engine, space)
    except KbError as e:
        raise Failure(f"space {key}: {e.message}", metadata={"space": key, "code": e.code, "message": e.message}) from e
    checks = [_as_check(space, stage, found) for stage, found in judged.items()]
    broken = sum(not v.holds for found in judged.values() for v in found)
    return MaterializeResult(metadata={"expectations": sum(map(len, judged.values())), "broken": broken}, check_results=checks)


def judge(engine: Engine, space: Space) -> dict[str, list[Verified]]:
    """Every suite over its frame. Raises Rejected without the space, Transient for an index that is down."""
    validate = validator(space)
    judged = {}
    for stage in SUITES:
        with transaction(engine.pool) as c:
            shard = spaces.lock_shared(c, space)
            if shard is None:
                raise Rejected(f"space {space.key!r} is being removed", code="no_space")
            frame = FRAMES[stage](c, engine, space, shard)
        judged[stage] = validate(stage, frame)
    return judged


def validator(space: Space) -> Callable[[str, "DataFrame"], list[Verified]]:
    """Judges the frame of a stage. Its context is ephemeral: nothing is written anywhere, no bars, no statistics about us."""
    import great_expectations as gx
    import great_expectations.expectations as kinds
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    config = DataContextConfig(
        store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
        analytics_enabled=False,
        progress_bars=ProgressBarsConfig(globally=False),
    )
    source = gx.get_context(mode="ephemeral", project_config=config).data_sources.add_pandas("kb_pipeline")
    number = count()
    wanted = {"result_format": "SUMMARY", "partial_unexpected_count": SHOWN, "unexpected_index_column_names": ["external_id"]}

    def validate(stage: str, frame: "DataFrame") -> list[Verified]:
        suite = [_of_space(x, space) for x in SUITES[stage]]
        if not len(frame):
            return [Verified(x, True, 0, 0, ()) for x in suite]
        sample = source.add_dataframe_asset(f"{stage} {next(number)}")
        batch = sample.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
        made = [getattr(kinds, x.kind)(**x.values, meta={"name": x.name}) for x in suite]
        found = batch.validate(gx.ExpectationSuite(name=stage, expectations=made), result_format=wanted)
        by_name = {r.expectation_config.meta["name"]: r for r in found.results if r.expectation_config is not None}
        return [_verified(x, by_name[x.name], len(frame)) for x in suite]

    return validate


def _of_space(x: Expectation, space: Space) -> Expectation:
    """What is the space's own: its dimension, and its key in the commands."""
    values = {**x.values, "value_set": [space.dimension]} if x.values.get("column") == "dimension" else x.values
    return replace(x, values=values, repair=x.repair.replace("SPACE", space.key))


def _verified(x: Expectation, outcome: Any, rows: int) -> Verified:
    """Raises StateError for an expectation that could not be evaluated: that says nothing about the data."""
    raised = outcome.exception_info
    if raised.get("raised_exception", True):
        raise StateError(f"expectation {x.name!r} could not be evaluated: {raised.get('exception_message')}")
    told = outcome.result
    names = dict.fromkeys(str(row["external_id"]) for row in told.get("partial_unexpected_index_list") or ())
    broken = 0 if outcome.success else int(told.get("unexpected_count") or 1)
    return Verified(x, bool(outcome.success), rows, broken, tuple(names)[:SHOWN])


def _as_check(space: Space, stage: str, found: Sequence[Verified]) -> AssetCheckResult:
    failed = [v for v in found if not v.holds]
    schema = TableSchema(
        [
            TableColumn("expectation"),
            TableColumn("holds", "bool"),
            TableColumn("rows", "int"),
            TableColumn("broken", "int"),
            TableColumn("repair"),
        ]
    )
    records = [
        TableRecord(
            {"expectation": v.expectation.name, "holds": v.holds, "rows": v.looked_at, "broken": v.broken,
             "repair": "" if v.holds else v.expectation.repair}
        )
        for v in found
    ]  # fmt: skip
    return result(
        stage,
        space,
        passed=not failed,
        says=f"{'; '.join(v.expectation.name for v in failed)}: not so" if failed else f"all {len(found)} expectations hold",
        repair="; ".join(dict.fromkeys(v.expectation.repair for v in failed)),
        columns=("expectation", "document"),
        rows=[(v.expectation.name, name) for v in failed for name in v.documents],
        counts={"rows": found[0].looked_at, "broken": len(failed), "expectations": MetadataValue.table(records, schema)},
    )
