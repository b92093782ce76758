"""Every rule, by subject. Switching between two indexes of a space is not built yet: its rules are not here."""

from kb_pipeline_tests.mutations import cache, history, ingest, listings, retries, spaces, tasks, vectors, walks, watermarks
from kb_pipeline_tests.mutations.rule import Rule

RULES: tuple[Rule, ...] = (
    *tasks.RULES,
    *retries.RULES,
    *ingest.RULES,
    *vectors.RULES,
    *cache.RULES,
    *spaces.RULES,
    *walks.RULES,
    *listings.RULES,
    *watermarks.RULES,
    *history.RULES,
)
BY_KEY = {rule.key: rule for rule in RULES}
