"""Walks over sources: who walks, what outlives a process, and what a page may write."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

SQL = "kb_pipeline/store/walks.sql"
PY = "kb_pipeline/store/walks.py"
WALKER = "kb_pipeline/walk/walker.py"
PLAN = "kb_pipeline/walk/plan.py"
DOCUMENTS = "kb_pipeline/store/documents.sql"

RULES = (
    Rule(
        "sync.lease",
        "a source is walked by one at a time",
        "two walks take each other's pages for the whole",
        (
            Edit(
                SQL,
                "WHERE source_id = %(source)s AND (until < clock_timestamp() OR (owner = %(dead)s AND owner <> '')) RETURNING token",
                "WHERE source_id = %(source)s RETURNING token",
            ),
        ),
        ("flow/test_walks.py::test_a_source_is_walked_by_one_at_a_time",),
    ),
    Rule(
        "sync.token",
        "every transaction of a walk holds the token of its lease",
        "a process that lost its lease ends the walk, with what the walk has seen removed: it hides everything",
        (
            Edit(
                SQL,
                "interval '1 second' WHERE source_id = %(source)s AND token = %(token)s",
                "interval '1 second' WHERE source_id = %(source)s",
            ),
        ),
        ("flow/test_walks.py::test_a_walk_that_lost_its_lease_writes_nothing",),
    ),
    Rule(
        "sync.token_up",
        "every taking of a lease draws a new token",
        "the process before has the same one",
        (Edit(SQL, "SET owner = %(me)s, token = token + 1, until", "SET owner = %(me)s, until"),),
        ("flow/test_walks.py::test_a_walk_that_lost_its_lease_writes_nothing",),
    ),
    Rule(
        "sync.dead_owner",
        "the lease of a process of this host that is dead is free at once",
        "after a kill the next pass waits for the lease",
        (Edit(PY, 'dead = row.owner if row.held and is_dead(row.owner) else ""', 'dead = ""'),),
        ("flow/test_interleavings.py::test_nobody_waits_for_the_lease_of_a_walk_whose_process_is_dead",),
    ),
    Rule(
        "sync.release",
        "a walk that has ended gives its lease back",
        "the next pass waits for the lease",
        (
            Edit(
                SQL, "UPDATE sync_lease SET until = '-infinity', owner = '' WHERE", "UPDATE sync_lease SET owner = owner WHERE"
            ),
        ),
        ("flow/test_walks.py::test_a_source_is_walked_by_one_at_a_time",),
    ),
    Rule(
        "sync.one_open",
        "a source has one open walk",
        "two walks share one checkpoint",
        (Edit("sql/0001_spaces_and_sources.sql", "CREATE UNIQUE INDEX sync_job_one_open", "CREATE INDEX sync_job_one_open"),),
        ("flow/test_interleavings.py::test_a_source_has_one_open_walk_whatever_is_written",),
    ),
    Rule(
        "sync.same_walk",
        "a resumed walk keeps its id",
        "what the pages before the checkpoint had was seen by another walk: it is hidden",
        (
            Edit(
                SQL,
                "SELECT j.id, j.walk_id, j.kind, j.window_from",
                "SELECT j.id, nextval('kb_walk_id') AS walk_id, j.kind, j.window_from",
            ),
        ),
        ("flow/test_walks.py::test_a_killed_walk_goes_on_at_its_checkpoint_under_its_own_id",),
    ),
    Rule(
        "sync.ck_verdict",
        "the verdict so far is stored with the checkpoint",
        "page 0 was PARTIAL, the process dies, and the walk ends as if it were COMPLETE",
        (
            Edit(
                SQL,
                "SET status = %(after)s, verdict = %(verdict)s, reasons = %(reasons)s, counts = %(counts)s\nWHERE",
                "SET status = %(after)s, reasons = %(reasons)s, counts = %(counts)s\nWHERE",
            ),
        ),
        ("flow/test_walks.py::test_a_walk_that_died_after_a_partial_page_removes_nothing",),
    ),
    Rule(
        "sync.seen_tx",
        "what a page has seen is stored in the page's transaction",
        "the process dies behind the checkpoint: the resumed walk hides that page",
        (
            Edit(PLAN, "            walks.mark_seen(c, walk.walk_id, [k.doc_id", "            self.seen = ([k.doc_id"),
            Edit(
                WALKER,
                "                walk.go_on(scope, page.checkpoint)\n                walks.save_progress(c, walk)\n",
                "                walk.go_on(scope, page.checkpoint)\n                walks.save_progress(c, walk)\n"
                "            with transaction(self.engine.pool) as c:\n"
                '                walks.mark_seen(c, walk.walk_id, getattr(plan, "seen", []))\n',
            ),
        ),
        ("flow/test_interleavings.py::test_a_page_that_nobody_noted_as_seen_is_listed_again",),
    ),
    Rule(
        "sync.page_tx",
        "the checkpoint moves in the transaction that stores the page",
        "the process dies between the two: the page is never stored, and the watermark passes it",
        (
            Edit(
                WALKER,
                "            with transaction(self.engine.pool) as c:\n                self._fence(c)\n                if overtaken :=",
                "            walk.go_on(scope, page.checkpoint)\n            with transaction(self.engine.pool) as c:\n"
                "                walks.save_progress(c, walk)\n"
                "            with transaction(self.engine.pool) as c:\n                self._fence(c)\n                if overtaken :=",
            ),
        ),
        ("flow/test_interleavings.py::test_a_page_whose_documents_were_not_stored_is_listed_again",),
    ),
    Rule(
        "sync.fetch_mark",
        "a page writes nothing over what was written after it was asked for",
        "an older content, or a document that is gone, comes back",
        (Edit(PLAN, "if seen <= self.mark and seen == touched[d]}", "if seen == touched[d]}"),),
        ("sources/test_fences.py::test_what_was_hidden_while_a_page_was_read_is_not_shown_by_that_page",),
    ),
    Rule(
        "sync.fetch_row",
        "a page writes over the row that its decisions were made on",
        "a write whose place was drawn before, and which commits later, is lost",
        (Edit(PLAN, "if seen <= self.mark and seen == touched[d]}", "if seen <= self.mark}"),),
        ("sources/test_fences.py::test_a_write_that_commits_only_after_the_page_is_looked_up_is_seen",),
    ),
    Rule(
        "sync.fetch_deleted",
        "a page does not bring back what was deleted after it was asked for",
        "a document that is gone is made again",
        (Edit(PLAN, "        new = [i for i in self.new if i.external_id not in gone]\n", "        new = self.new\n"),),
        ("sources/test_fences.py::test_a_document_deleted_while_its_page_was_read_is_not_made_again_by_that_page",),
    ),
    Rule(
        "sync.stamp",
        "new content draws a place in the order of writes",
        "a page that was read before writes its older content",
        (
            Edit(
                DOCUMENTS,
                "SET last_ver = d.last_ver + 1, seen_seq = nextval('kb_seen_seq'), seen_at = clock_timestamp(),\n               hidden_at = NULL",
                "SET last_ver = d.last_ver + 1,\n               hidden_at = NULL",
            ),
        ),
        ("sources/test_fences.py::test_content_that_somebody_wrote_while_a_page_was_read_is_not_superseded_by_it",),
    ),
    Rule(
        "sync.move_identity",
        "a new name with a known identity is a move",
        "a renamed document is deleted, and made again without its versions",
        (
            Edit(
                PLAN, "        self.moved = snapshot.moved_by_identity(self.new, self._gone(found))", "        self.moved = []"
            ),
        ),
        ("flow/test_interleavings.py::test_a_moved_document_without_a_digest_is_known_by_its_identity",),
    ),
    Rule(
        "sync.move_content",
        "a new name with known bytes is a move",
        "a moved document is deleted, and made again without its versions",
        (Edit(PLAN, "        self.moved += snapshot.moved_by_content(", "        snapshot.moved_by_content("),),
        ("flow/test_sync.py::test_a_file_moved_across_file_systems_keeps_its_document",),
    ),
    Rule(
        "sync.move_gone",
        "a document has moved only if its old place is empty",
        "a copy takes the document away from the original",
        (Edit(PLAN, "zip(here, answers, strict=True) if presence is Presence.GONE]", "zip(here, answers, strict=True)]"),),
        ("flow/test_interleavings.py::test_a_copy_on_another_page_leaves_the_original_alone",),
    ),
    Rule(
        "sync.move_once",
        "a document moves to one name",
        "two copies share one document",
        (Edit(PLAN, "        taken = {k.doc_id for _, k in self.moved}\n", "        taken: set[int] = set()\n"),),
        ("flow/test_interleavings.py::test_of_a_moved_document_and_its_copy_one_is_the_moved_one",),
    ),
    Rule(
        "sync.digest_open",
        "a digest is stored only where every entry was taken in",
        "what must be looked at again is passed by until something else changes",
        (
            Edit(
                WALKER,
                "        if plan.bad or plan.open or self.walk.counts.get(OVERTAKEN):\n            self.digest = None\n",
                "",
            ),
        ),
        ("flow/test_interleavings.py::test_a_listing_that_left_something_to_others_has_no_digest",),
    ),
    Rule(
        "sync.digest_begin",
        "while a walk is open no earlier digest says that nothing changed",
        "the source went back to what it was: the half of a listing is never completed",
        (
            Edit(
                SQL,
                "SET listing_digest = NULL WHERE id = %(source)s AND listing_digest IS NOT NULL)\nINSERT",
                "SET listing_digest = listing_digest WHERE id = %(source)s AND listing_digest IS NOT NULL)\nINSERT",
            ),
        ),
        ("sources/test_sync_states.py::test_the_digest_of_an_earlier_listing_says_nothing_while_a_walk_is_open",),
    ),
)
