"""Takes a deleted space out of Dagster's partitions, now: ``python -m kb_pipeline.orchestration.forget SPACE``.

A process of its own, because the command line works without Dagster. `space_lifecycle` does the same at its next tick.
Prints how many partitions of that name are left, 0.
"""

import sys

from dagster import DagsterInstance

from kb_pipeline.orchestration.partitions import SPACE


def forget(instance: DagsterInstance, space: str) -> int:
    """Idempotent."""
    if instance.has_dynamic_partition(SPACE, space):
        instance.delete_dynamic_partition(SPACE, space)
    return int(instance.has_dynamic_partition(SPACE, space))


if __name__ == "__main__":
    with DagsterInstance.get() as instance:
        print(forget(instance, sys.argv[1]))
