"""One partition per space: never per document or bucket, which the web UI could not show."""

from dagster import DynamicPartitionsDefinition

SPACE = "space"  # the name under which Dagster stores the keys
SPACES = DynamicPartitionsDefinition(name=SPACE)
