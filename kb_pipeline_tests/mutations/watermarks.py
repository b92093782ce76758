"""From when on the next walk asks, and what it reads again."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

PY = "kb_pipeline/store/walks.py"
WALKER = "kb_pipeline/walk/walker.py"
SNAPSHOT = "kb_pipeline/stages/snapshot.py"
WINDOW = "kb_pipeline/stages/window.py"

RULES = (
    Rule(
        "watermark.start",
        "the watermark is the clock when the walk began",
        "what changed while it ran is never asked for",
        (
            Edit(
                WALKER, "dict.fromkeys(walk.window_from, walk.clock)", "dict.fromkeys(walk.window_from, self.connector.clock())"
            ),
        ),
        ("flow/test_interleavings.py::test_what_changes_after_the_walk_began_lies_behind_its_watermark",),
    ),
    Rule(
        "watermark.complete",
        "only a walk that completed moves the watermark",
        "what a folder that could not be read had is never asked for",
        (
            Edit(
                WALKER,
                '                sources.forget_digest(c, self.source.id)\n                walks.fail_walk(c, walk, "; "',
                "                walks.store_watermark(c, self.source.id, dict.fromkeys(walk.window_from, walk.clock))\n"
                '                sources.forget_digest(c, self.source.id)\n                walks.fail_walk(c, walk, "; "',
            ),
        ),
        ("flow/test_deletion.py::test_a_partial_page_deletes_nothing_and_leaves_the_watermark",),
    ),
    Rule(
        "watermark.overlap",
        "the window begins an overlap before the watermark",
        "an item that became visible late has an older stamp",
        (Edit(WINDOW, "    return floor - overlap(capabilities)", "    return floor"),),
        ("sources/test_incremental.py::test_a_commit_that_shows_late_is_found_by_the_next_pass",),
    ),
    Rule(
        "watermark.inclusive",
        "stamps that equal the lower bound are asked for",
        "two edits within one tick of the clock: the second is never seen",
        (Edit(WINDOW, "    return floor - overlap(capabilities)", "    return floor - overlap(capabilities) + 1e-6"),),
        ("stages/test_window.py::test_the_window_begins_the_overlap_before_the_truncated_watermark",),
    ),
    Rule(
        "watermark.resolution",
        "the window begins at a whole tick of the source's stamps",
        "a stamp that was truncated lies before the window",
        (
            Edit(
                WINDOW,
                "    floor = math.floor(watermark / resolution) * resolution if resolution > 0 else watermark\n",
                "    floor = watermark\n",
            ),
        ),
        ("stages/test_window.py::test_the_window_begins_the_overlap_before_the_truncated_watermark",),
    ),
    Rule(
        "watermark.source_clock",
        "the watermark is in the source's clock",
        "a clock that is a quarter of an hour off loses what changed in it",
        (Edit(WALKER, "clock = connector.clock()  #", "clock = __import__('time').time()  #"),),
        ("sources/test_incremental.py::test_a_clock_a_quarter_of_an_hour_off_loses_nothing",),
    ),
    Rule(
        "watermark.same_window",
        "a resumed walk keeps its window and its clock",
        "what changed before it was interrupted, on pages it had read, is never asked for",
        (
            Edit(
                PY,
                "        row.source_started,\n",
                "        __import__('time').time() if row.source_started > 1e9 else row.source_started + 1e5,\n",
            ),
        ),
        ("sources/test_sync_states.py::test_a_pass_whose_process_died_stays_open_with_its_window_and_clock",),
    ),
    Rule(
        "watermark.resumed",
        "a walk resumed in an unstable order stores no watermark",
        "what moved behind the checkpoint is never asked for",
        (
            Edit(
                WALKER,
                "        elif not (overtaken or walk.resumed or missing.omitted):",
                "        elif not (overtaken or missing.omitted):",
            ),
        ),
        ("sources/test_incremental.py::test_a_walk_resumed_in_an_unstable_order_leaves_the_watermark",),
    ),
    Rule(
        "watermark.overtaken",
        "a walk that left something to others stores no watermark",
        "what it passed over is never asked for",
        (
            Edit(
                WALKER,
                "        elif not (overtaken or walk.resumed or missing.omitted):",
                "        elif not (walk.resumed or missing.omitted):",
            ),
        ),
        ("sources/test_fences.py::test_what_was_hidden_while_a_page_was_read_is_not_shown_by_that_page",),
    ),
    Rule(
        "watermark.overtaken_full",
        "behind a full listing that left something to others everything is listed again",
        "a document that the listing showed, and others had hidden, is asked for never again",
        (Edit(WALKER, "        if overtaken and walk.kind is WalkKind.FULL:", "        if False:"),),
        ("sources/test_fences.py::test_what_was_hidden_while_a_page_was_read_is_not_shown_by_that_page",),
    ),
    Rule(
        "watermark.omitted",
        "a listing that omitted what is there stores no watermark",
        "it is not asked for until it changes",
        (
            Edit(
                WALKER,
                "        elif not (overtaken or walk.resumed or missing.omitted):",
                "        elif not (overtaken or walk.resumed):",
            ),
        ),
        ("sources/test_incremental.py::test_an_item_that_a_listing_omits_is_not_hidden_while_it_is_there",),
    ),
    Rule(
        "watermark.sweep",
        "a source with changes is listed in full every day",
        "what was deleted at the source stays for ever",
        (Edit(WINDOW, "past.listed_ago is not None and past.listed_ago <= SWEEP_SECONDS", "past.listed_ago is not None"),),
        ("sources/test_incremental.py::test_a_day_after_the_last_listing_everything_is_listed",),
    ),
    Rule(
        "watermark.provisional",
        "what was listed within its own tick is read again",
        "a second edit within the tick shows the same revision, and is never read",
        (
            Edit(
                WINDOW,
                "    return item.modified_at.timestamp() + resolution + capabilities.skew_seconds > clock",
                "    return False",
            ),
        ),
        ("stages/test_window.py::test_an_item_is_provisional_until_nobody_can_write_the_same_stamp",),
    ),
    Rule(
        "watermark.read_revision",
        "what was read at another revision than the listed one is read again",
        "it was read within its own tick, and a second edit shows the same revision",
        (Edit(SNAPSHOT, "    return fetched if fetched == listed else fetched + PROVISIONAL", "    return fetched"),),
        ("sources/test_incremental.py::test_content_read_at_a_later_revision_than_the_listed_one_is_read_again",),
    ),
)
