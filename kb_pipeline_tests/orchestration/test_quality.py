"""Every expectation can fail: each is shown the damage it is there for, and nothing else turns red."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from kb_pipeline.engine import Engine
from kb_pipeline.errors import StateError
from kb_pipeline.orchestration.checks import frames
from kb_pipeline.orchestration.checks.frames import FRAMES
from kb_pipeline.orchestration.checks.quality import SUITES, Verified, validator
from kb_pipeline.settings import Settings
from kb_pipeline.store import spaces
from kb_pipeline.store.database import Pool, transaction
from kb_pipeline.store.migrations import migrations
from kb_pipeline.store.spaces import Space
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import FakedApp, MemoryIndex, MemorySource
from kb_pipeline_tests.flow.scenario import article
from kb_pipeline_tests.orchestration.conftest import Materialise

DOC = "(SELECT min(id) FROM kb_doc WHERE space_id = %(space)s)"
CHUNK = "(SELECT min(id) FROM kb_chunk_state WHERE space_id = %(space)s)"
HASH = f"(SELECT content_hash FROM kb_chunk WHERE id = {CHUNK})"
A_DOC, A_VERSION, A_CHUNK = f"WHERE id = {DOC}", f"WHERE doc_id = {DOC}", f"WHERE id = {CHUNK}"

REWRITTEN = f"UPDATE kb_chunk SET prefix = '', content = {{0}}, content_hash = sha256(convert_to({{0}}, 'UTF8')) {A_CHUNK}"
IN_INDEX = ("index", "vector is in the index")  # the damage is done to the index itself

# By stage and expectation: what does the damage.
DAMAGES: dict[tuple[str, str], str] = {
    ("documents", "external id is not blank"): f"UPDATE kb_doc SET external_id = ' ' {A_DOC}",
    ("documents", "title is not blank"): f"UPDATE kb_doc SET title = '' {A_DOC}",
    ("documents", "address is not blank"): f"UPDATE kb_doc SET uri = '' {A_DOC}",
    ("documents", "current version is not above the newest"): f"UPDATE kb_doc SET last_ver = 0 {A_DOC}",
    ("documents", "available documents have a version"): f"UPDATE kb_doc SET current_ver = 0 {A_DOC}",
    ("documents", "current version is ready"): f"UPDATE kb_doc_version SET status = 'PROCESSING' {A_VERSION}",
    ("documents", "published documents say since when"): f"UPDATE kb_doc SET published_at = NULL {A_DOC}",
    ("documents", "current version is the open one of the history"): f"UPDATE kb_publication SET to_at = now() {A_VERSION}",
    ("documents", "source is not removed"): "UPDATE kb_source SET status = 'REMOVED' WHERE space_id = %(space)s",
    ("documents", "not seen in the future"): f"UPDATE kb_doc SET seen_at = now() + interval '1 day' {A_DOC}",
    ("versions", "original is stored"): f"UPDATE kb_doc_version SET raw_path = NULL {A_VERSION}",
    ("versions", "original is not empty"): f"UPDATE kb_doc_version SET raw_bytes = NULL {A_VERSION}",
    ("versions", "sha256 of the original is whole"): f"UPDATE kb_doc_version SET raw_sha256 = '\\x00' {A_VERSION}",
    ("versions", "blocks are stored"): f"UPDATE kb_doc_version SET parsed_path = NULL {A_VERSION}",
    ("versions", "sha256 of the text is whole"): f"UPDATE kb_doc_version SET text_sha256 = NULL {A_VERSION}",
    ("versions", "parser said what it read"): f"UPDATE kb_doc_version SET parse_result = '{{}}' {A_VERSION}",
    ("versions", "recipe is known"): f"UPDATE kb_doc_version SET recipe = NULL {A_VERSION}",
    ("versions", "at least one chunk is listed"): f"UPDATE kb_doc_version SET chunk_ids = NULL {A_VERSION}",
    ("versions", "no chunk is listed twice"): f"UPDATE kb_doc_version SET chunk_ids = chunk_ids || chunk_ids[1] {A_VERSION}",
    ("versions", "listed chunks are there"): f"DELETE FROM kb_chunk {A_CHUNK}",
    ("chunks", "text is not blank"): REWRITTEN.format("' '"),
    ("chunks", "text is not mojibake"): REWRITTEN.format("U&'\\FFFD'"),
    ("chunks", "size is one that an embedder takes"): f"UPDATE kb_chunk SET tokens = 0 {A_CHUNK}",
    ("chunks", "pages run forwards"): f"UPDATE kb_chunk SET page_from = 7, page_to = 3 {A_CHUNK}",
    ("chunks", "hash is that of the text"): f"UPDATE kb_chunk SET content = 'another text' {A_CHUNK}",
    ("chunks", "text and state are of one hash"): f"UPDATE kb_chunk_state SET hash = gen_random_uuid(), vec_id = kb_vec_id(id, hash, incarnation) {A_CHUNK}",
    ("chunks", "text and state are of one document"): f"UPDATE kb_chunk SET doc_id = doc_id + 1 {A_CHUNK}",
    ("embeddings", "text has a vector"): f"DELETE FROM kb_embedding WHERE content_hash = {HASH}",
    ("embeddings", "vector is of the model's length"): f"UPDATE kb_embedding SET vector = substring(vector FROM 1 FOR 500) || '\\x00000000' WHERE content_hash = {HASH}",
    ("embeddings", "vector is of numbers"): f"UPDATE kb_embedding SET vector = set_byte(set_byte(vector, 1, 126), 0, 1) WHERE content_hash = {HASH}",
    ("embeddings", "vector is of length one"): f"UPDATE kb_embedding SET vector = decode(repeat('003c', octet_length(vector) / 2), 'hex') WHERE content_hash = {HASH}",
    ("embeddings", "different texts have different vectors"): "UPDATE kb_embedding SET vector = (SELECT min(vector) FROM kb_embedding)",
    ("index", "permissions in the index are not behind"): f"UPDATE kb_chunk_state SET acl_seq = acl_seq + 1 {A_CHUNK}",
    ("index", "vector is marked as indexed"): f"UPDATE kb_chunk_state SET vec_status = 0 {A_CHUNK}",
    ("index", "name is made of row, text and incarnation"): f"UPDATE kb_chunk_state SET incarnation = 9 {A_CHUNK}",
    ("index", "bucket is the name's"): f"UPDATE kb_chunk_state SET bucket = (bucket + 1) %% 4096 {A_CHUNK}",
    ("index", "checksum is that of name and permissions"): f"UPDATE kb_chunk_state SET ck = ck # 1 {A_CHUNK}",
    ("index", "current vector is not condemned"): (
        "INSERT INTO vector_tombstone (index_id, vec_id, space_id, doc_id, chunk_id, state) SELECT i.id, s.vec_id, s.space_id, s.doc_id, s.id, 'E' "
        f"FROM kb_chunk_state s JOIN kb_index i ON i.space_id = s.space_id WHERE s.id = {CHUNK}"
    ),
    ("index", "no name is used twice"): (
        f"UPDATE kb_chunk_state SET vec_id = (SELECT vec_id FROM kb_chunk_state s WHERE s.id = {CHUNK}) "
        f"WHERE id = (SELECT max(id) FROM kb_chunk_state WHERE space_id = %(space)s)"
    ),
}  # fmt: skip

# Damage that cannot be done without another expectation breaking with it.
WITH_IT: dict[tuple[str, str], set[tuple[str, str]]] = {
    ("chunks", "text is not blank"): {("chunks", "text and state are of one hash"), ("embeddings", "text has a vector")},
    ("chunks", "text is not mojibake"): {("chunks", "text and state are of one hash"), ("embeddings", "text has a vector")},
    ("chunks", "text and state are of one hash"): {("index", "name is made of row, text and incarnation")},
    ("index", "no name is used twice"): {
        ("index", "name is made of row, text and incarnation"),
        ("index", "bucket is the name's"),
        ("index", "checksum is that of name and permissions"),
    },
}


class Undo(RuntimeError):
    """Rolls a test's damage back."""


@dataclass(frozen=True)
class Library:
    engine: Engine
    space: Space
    index: MemoryIndex
    validate: Callable[[str, Any], list[Verified]]

    def broken(self, damage: str = "") -> set[tuple[str, str]]:
        """Do the damage and read every frame, in a transaction that is rolled back. What does not hold, by stage and name."""
        read = {}
        with suppress(Undo), transaction(self.engine.pool) as c:
            shard = spaces.lock_shared(c, self.space)
            assert shard is not None
            if damage:
                done = c.execute(damage, {"space": self.space.id})  # type: ignore[arg-type]
                assert done.rowcount > 0
            read = {stage: frame(c, self.engine, self.space, shard) for stage, frame in FRAMES.items()}
            raise Undo
        return {
            (stage, v.expectation.name) for stage, frame in read.items() for v in self.validate(stage, frame) if not v.holds
        }


@pytest.fixture(scope="module")
def library(pool: Pool, database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Library:
    index = MemoryIndex()
    settings = Settings(home=tmp_path_factory.mktemp("kb"), database_url=database_url, embedder="hashing")
    app = FakedApp(settings, pool, migrations()[-1].version, index=index)
    space = app.add_space("judged")
    app.add_fake_source(space, MemorySource({f"{n}.md": article(f"Paper{n}") for n in range(3)}))
    sync_space(app.engine, space)
    return Library(app.engine, space, index, validator(space))


def test_every_expectation_has_its_damage() -> None:
    named = {(stage, x.name) for stage, suite in SUITES.items() for x in suite}
    assert len(named) == sum(map(len, SUITES.values())) >= 20
    assert named == {*DAMAGES, IN_INDEX}


def test_sound_space_is_green(library: Library) -> None:
    assert library.broken() == set()


@pytest.mark.parametrize(("stage", "name"), sorted(DAMAGES))
def test_damage_breaks_the_expectation_that_is_there_for_it(library: Library, stage: str, name: str) -> None:
    assert library.broken(DAMAGES[stage, name]) == {(stage, name), *WITH_IT.get((stage, name), ())}


def test_vector_that_the_index_lost_breaks_its_expectation(library: Library) -> None:
    (held,) = (h for h in library.index.indexes.values() if h)
    lost = held.pop(next(iter(held)))
    try:
        assert library.broken() == {IN_INDEX}
    finally:
        held[lost.vec_id] = lost


def test_verdict_names_the_documents_and_the_command(library: Library) -> None:
    with suppress(Undo), transaction(library.engine.pool) as c:
        c.execute(DAMAGES["chunks", "size is one that an embedder takes"], {"space": library.space.id})  # type: ignore[arg-type]
        shard = spaces.lock_shared(c, library.space)
        assert shard is not None
        frame = FRAMES["chunks"](c, library.engine, library.space, shard)
        raise Undo
    (red,) = (v for v in library.validate("chunks", frame) if not v.holds)
    assert (red.looked_at, red.broken, red.documents) == (len(frame), 1, ("0.md",))
    assert red.expectation.repair == "kb doc delete ID, then kb sync judged --full"


def test_expectation_that_cannot_be_evaluated_is_an_error_and_no_verdict(library: Library) -> None:
    from pandas import DataFrame

    with pytest.raises(StateError, match="could not be evaluated"):
        library.validate("chunks", DataFrame({"external_id": ["a.md"]}))


def test_asset_shows_red_and_fails_no_run(filled: Space, app: FakedApp, materialise: Materialise) -> None:
    assert materialise(filled.key).success
    green = materialise(filled.key, job="check_quality")
    assert green.success and green.metadata["data_quality"] == {"expectations": len(DAMAGES) + 1, "broken": 0}
    assert {c.name: (c.passed, c.partition) for c in green.checks} == dict.fromkeys(SUITES, (True, filled.key))
    with transaction(app.pool) as c:
        c.execute(DAMAGES["documents", "title is not blank"], {"space": filled.id})  # type: ignore[arg-type]
    run = materialise(filled.key, job="check_quality")
    assert run.success
    (red,) = (c for c in run.checks if not c.passed)
    assert red.name == "documents"
    assert "guide-0.md" in red.metadata["documents"]
    assert red.metadata["repair"] == f"kb sync {filled.key} --full"
    rows = {r.data["expectation"]: r.data["holds"] for r in red.metadata["expectations"]}
    assert [name for name, holds in rows.items() if not holds] == ["title is not blank"]


def test_empty_space_is_green(app: FakedApp, space: Space, materialise: Materialise) -> None:
    run = materialise(space.key, job="check_quality")
    assert run.success
    assert all(c.passed for c in run.checks)


def test_frames_are_bounded(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "NEWEST", 2)
    with transaction(library.engine.pool) as c:
        shard = spaces.lock_shared(c, library.space)
        assert shard is not None
        assert [len(frame(c, library.engine, library.space, shard)) for frame in FRAMES.values()] == [2] * 5


def test_definitions_load_without_the_heavy_libraries() -> None:
    code = (
        "import sys, kb_pipeline.orchestration.definitions; "
        "print([m for m in ('great_expectations', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
