"""space_lifecycle: partitions equal the spaces in the database. Called as a function, as its tick calls it."""

import pytest
from dagster import DagsterInstance, DefaultSensorStatus, SensorResult, build_sensor_context

from kb_pipeline.errors import Fatal
from kb_pipeline.maintenance.delete_space import delete_space
from kb_pipeline.orchestration.definitions import build_defs
from kb_pipeline.orchestration.forget import forget
from kb_pipeline.orchestration.partitions import SPACE
from kb_pipeline.orchestration.resources import KbResource
from kb_pipeline.orchestration.sensors import space_lifecycle
from kb_pipeline.store import removal, spaces
from kb_pipeline.store.database import connection, transaction
from kb_pipeline_tests.fakes import FakedApp


def tick(instance: DagsterInstance, kb: KbResource) -> str:
    """One tick with what the daemon makes of its result. The message that people see."""
    with build_sensor_context(instance=instance, resources={"kb": kb}) as context:
        result = space_lifecycle(context)
    assert isinstance(result, SensorResult)
    assert not result.run_requests
    for request in result.dynamic_partitions_requests or ():
        assert request.partitions_def_name == SPACE
        if type(request).__name__.startswith("Add"):
            instance.add_dynamic_partitions(SPACE, list(request.partition_keys))
        else:
            for key in request.partition_keys:
                instance.delete_dynamic_partition(SPACE, key)
    assert result.skip_reason is not None
    return str(result.skip_reason.skip_message)


def keys(instance: DagsterInstance) -> set[str]:
    return set(instance.get_dynamic_partitions(SPACE))


def test_partitions_follow_the_spaces_within_a_tick(app: FakedApp, instance: DagsterInstance, kb: KbResource) -> None:
    hr = app.add_space("hr")
    app.add_space("law")
    assert tick(instance, kb) == "added hr, law"
    assert keys(instance) == {"hr", "law"}

    delete_space(app.engine, hr)
    app.add_space("sales")
    assert tick(instance, kb) == "added sales; removed hr"
    assert keys(instance) == {"law", "sales"}
    assert tick(instance, kb) == "nothing to do: 2 spaces, 2 partitions"
    assert keys(instance) == {"law", "sales"}


def test_an_interrupted_deletion_is_finished_by_a_run(app: FakedApp, instance: DagsterInstance, kb: KbResource) -> None:
    doomed = app.add_space("doomed")
    tick(instance, kb)
    with transaction(app.pool) as c:
        removal.begin(c, doomed.id)
    with build_sensor_context(instance=instance, resources={"kb": kb}) as context:
        result = space_lifecycle(context)
    assert isinstance(result, SensorResult)
    (asked,) = result.run_requests or ()
    assert asked.run_key and asked.run_key.startswith("delete:doomed:")
    (partitions,) = result.dynamic_partitions_requests or ()
    assert "doomed" in partitions.partition_keys

    definitions = build_defs({"kb": kb})
    assert definitions.resolve_job_def("delete_spaces").execute_in_process(instance=instance).success
    with connection(app.pool) as c:
        found = spaces.space_by_id(c, doomed.id)
    assert found is not None and found.status == "DELETED"
    instance.delete_dynamic_partition(SPACE, "doomed")
    assert tick(instance, kb).startswith("nothing to do")


def test_partition_that_nobody_made_a_space_for_is_removed(app: FakedApp, instance: DagsterInstance, kb: KbResource) -> None:
    app.add_space("kept")
    instance.add_dynamic_partitions(SPACE, ["typo"])
    tick(instance, kb)
    assert "typo" not in keys(instance)
    assert "kept" in keys(instance)


def test_unreachable_database_fails_the_tick_and_removes_nothing(instance: DagsterInstance, kb: KbResource) -> None:
    instance.add_dynamic_partitions(SPACE, ["hr"])
    down = KbResource(home=kb.home, database_url="postgresql://kb@127.0.0.1:1/kb")
    with pytest.raises(Fatal, match="database unreachable"):
        tick(instance, down)
    assert keys(instance) == {"hr"}


def test_it_runs_without_being_switched_on() -> None:
    assert space_lifecycle.default_status is DefaultSensorStatus.RUNNING


def test_an_index_that_is_being_built_is_gone_on_with_by_a_run(
    app: FakedApp, instance: DagsterInstance, kb: KbResource
) -> None:
    space = app.add_space("growing", embedder="hashing")
    tick(instance, kb)
    assert app.change_index(space, embedder_options={"dimension": 32}) is True
    with build_sensor_context(instance=instance, resources={"kb": kb}) as context:
        result = space_lifecycle(context)
    assert isinstance(result, SensorResult)
    (asked,) = result.run_requests or ()
    assert (asked.job_name, asked.partition_key) == ("rebuild_index", "growing")
    done = (
        build_defs({"kb": kb}).resolve_job_def("rebuild_index").execute_in_process(instance=instance, partition_key="growing")
    )
    assert done.success
    assert app.space("growing").dimension == 32
    assert "building" not in tick(instance, kb)


def test_a_deleted_space_is_taken_out_of_the_partitions_at_once(instance: DagsterInstance) -> None:
    instance.add_dynamic_partitions(SPACE, ["gone", "stays"])
    assert forget(instance, "gone") == 0
    assert keys(instance) == {"stays"}
    assert forget(instance, "gone") == 0
