"""What would go wrong without each rule: takes one rule away at a time and sees a test fail.

    python -m kb_pipeline_tests.mutations [KEY ...] [--jobs N] [--list] [--json]

A KEY names one rule (``tasks.attempt``) or all of a subject (``tasks``). For each rule the package, its tests and the schema
are copied to a temporary folder, the rule's text is replaced there, and the few tests that hold it are run. Rules:

- KILLED: a test failed. The rule is held.
- SURVIVED: every test passed. Nothing would say so if somebody removed the rule.
- ERROR: the text is not found exactly once, the tests fail without the change, or the changed code does not even run.

The exit code is 1 if anything survived or could not be run. Rules that protect the same are removed together, and say so; a
rule that is marked redundant and stands alone is listed with its reason and not run.

One embedded server is started for the whole run. A rule costs a few seconds.
"""
