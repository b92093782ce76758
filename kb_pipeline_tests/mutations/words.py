"""Rules of searching by words on pgvector."""

from kb_pipeline_tests.mutations.rule import Edit, Rule

ADAPTER = "kb_pipeline/indexes/pgvector.py"
SQL = "kb_pipeline/indexes/pgvector.sql"
SPACES = "kb_pipeline/store/spaces.py"
REBUILD = "kb_pipeline/maintenance/rebuild.py"
TERMS = "kb_pipeline/terms.py"
TESTS = "indexes/test_pgvector_words.py::"
BUILT = "rebuild/test_words.py::"

RULES = (
    Rule(
        "words.beside",
        "an index with words is built beside one without",
        "words are offered before any are there",
        (Edit(REBUILD, " and engine.index(index.ref).capabilities.keyword == capabilities.keyword", ""),),
        (BUILT + "test_a_space_gets_words_and_loses_them_without_an_embedding",),
    ),
    Rule(
        "words.deleted",
        "words go with their vectors",
        "what was erased can be told from the words that are left",
        (Edit(ADAPTER, "                c.execute(SQL.delete_words, where)\n", "                pass\n"),),
        (TESTS + "test_words_go_with_their_vectors_and_a_refused_entry_leaves_none",),
    ),
    Rule(
        "words.dropped",
        "a drop takes the rows of one index",
        "the words of the index that serves are gone with those of the former one",
        (
            Edit(
                SQL,
                "DELETE FROM {table} WHERE shard = %(shard)s::int AND space_id = %(space)s AND index_id = %(index)s AND vec_id = ANY(ARRAY(",
                "DELETE FROM {table} WHERE shard = %(shard)s::int AND vec_id = ANY(ARRAY(",
            ),
        ),
        (BUILT + "test_words_are_gone_when_the_index_that_had_them_is_dropped",),
    ),
    Rule(
        "words.neighbours",
        "matches are asked for their space and index",
        "a key that two spaces share by chance shows one the other's chunks",
        (Edit(SQL, "WHERE w.index_id + 0 = %(index)s AND w.space_id = %(space)s AND (%(acl)s", "WHERE (%(acl)s"),),
        (TESTS + "test_neighbours_whose_keys_are_equal_are_told_apart",),
    ),
    Rule(
        "words.moved",
        "a space takes its words along to a shard of its own",
        "it finds nothing by words any more",
        (Edit(SPACES, "        _copy_words(c, where)\n", "        pass\n"),),
        (TESTS + "test_a_space_takes_its_words_along_to_a_shard_of_its_own_and_they_end_with_it",),
    ),
    Rule(
        "words.single",
        "documents have the single characters of what is written without spaces",
        "a question of one character finds nothing",
        (Edit(TERMS, "        singles.update(run)\n", ""),),
        ("stages/test_terms.py::test_each_character_of_a_run_finds_it",),
    ),
)
