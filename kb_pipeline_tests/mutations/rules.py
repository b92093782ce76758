"""Every rule, by subject."""

from kb_pipeline_tests.mutations import (
    cache,
    history,
    ingest,
    listings,
    retries,
    spaces,
    switch,
    tasks,
    vectors,
    walks,
    watermarks,
    words,
)
from kb_pipeline_tests.mutations.rule import Rule

RULES: tuple[Rule, ...] = (
    *tasks.RULES,
    *retries.RULES,
    *ingest.RULES,
    *vectors.RULES,
    *cache.RULES,
    *spaces.RULES,
    *switch.RULES,
    *words.RULES,
    *walks.RULES,
    *listings.RULES,
    *watermarks.RULES,
    *history.RULES,
)
BY_KEY = {rule.key: rule for rule in RULES}
