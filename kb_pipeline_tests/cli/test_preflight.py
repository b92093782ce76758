"""What ``kb up`` finds before it starts anything: all at once, each with the way out."""

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from kb_pipeline.cli import preflight
from kb_pipeline.cli.preflight import GIB, Finding, examine, refusal
from kb_pipeline.errors import Fatal, Misconfigured
from kb_pipeline.settings import Settings
from kb_pipeline.store import requirements
from kb_pipeline_tests.cli.conftest import Kb
from kb_pipeline_tests.conftest import Server

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as s:
        s.bind((HOST, 0))
        s.listen()
        yield int(s.getsockname()[1])


def free_ports() -> dict[str, int]:
    with socket.socket() as a, socket.socket() as b:
        a.bind((HOST, 0))
        b.bind((HOST, 0))
        return {"--port": a.getsockname()[1], "--service-port": b.getsockname()[1]}


def codes(settings: Settings, **ports: int) -> dict[str, Finding]:
    return {f.error.code: f for f in examine(settings, HOST, ports or free_ports())}


def test_a_good_place_has_no_findings(settings: Settings, kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * GIB, 0, 100 * GIB))  # type: ignore[attr-defined]
    assert codes(settings) == {}
    ports = free_ports()
    found = kb.json("up", "--check", "--port", ports["--port"], "--service-port", ports["--service-port"])
    assert found == {"ok": True, "findings": []}


def test_everything_is_found_at_once(kb: Kb, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KB_BLOBS", f"file:{tmp_path / 'file' / 'objects'}")
    monkeypatch.setenv("KB_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    found = kb.json("up", "--check", "--port", taken, "--service-port", taken, code=1)
    errors = {f["code"]: f["message"] for f in found["findings"] if f["level"] == "error"}
    assert not found["ok"] and set(errors) >= {"port_taken", "database_down", "blob_store_missing"}
    ran = kb("up", "--port", taken, "--service-port", free_ports()["--service-port"])
    assert ran.code == 1 and all(words in ran.err for words in ("--port N", "KB_DATABASE_URL", "KB_BLOBS"))


def test_a_port_given_twice_is_found(settings: Settings) -> None:
    port = free_ports()["--port"]
    found = examine(settings, HOST, {"--port": port, "--service-port": port})
    assert "twice" in found[0].error.message and "--service-port" in found[0].error.message


@pytest.mark.parametrize(("free", "code", "warning"), [(GIB // 2, "disk_full", False), (3 * GIB, "disk_full", True)])
def test_too_little_room_is_an_error_and_little_room_a_warning(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, free: int, code: str, warning: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * GIB, 0, free))  # type: ignore[attr-defined]
    found = codes(settings)
    assert found[code].warning is warning and "KB_HOME" in found[code].error.message


def test_a_data_folder_that_cannot_be_written_is_found_and_no_server_is_started_for_it(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    found = codes(replace(settings, home=tmp_path / "file" / "home", database_url="", blobs=""))
    assert set(found) == {"home_not_writable"} and "--home" in found["home_not_writable"].error.message


def test_a_newer_schema_and_a_missing_right_are_found(
    settings: Settings, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = requirements.migrations()
    with server.database(server.template) as url:
        monkeypatch.setattr(requirements, "migrations", lambda: ours[:1])
        assert "install the newer" in codes(replace(settings, database_url=url))["schema_newer"].error.message
        monkeypatch.undo()
        assert codes(replace(settings, database_url=url)).keys() <= {"disk_full"}


def test_a_database_that_nobody_migrated_yet_is_in_order(settings: Settings, server: Server) -> None:
    with server.database() as url:
        assert codes(replace(settings, database_url=url)).keys() <= {"disk_full"}


@pytest.mark.parametrize(
    ("vector", "installable", "may_extend", "code"),
    [
        (None, None, True, "no_vector_extension"),
        (None, "0.8.0", False, "no_vector_extension"),
        ("0.6.2", "0.8.0", True, "vector_too_old"),
        (None, "0.5.1", True, "vector_too_old"),
        (None, "0.8.0", True, None),
        ("0.7.0", None, False, None),
        ("0.10.1", "0.10.1", False, None),
    ],
)
def test_pgvector_must_be_there_or_installable_and_new_enough(
    vector: str | None, installable: str | None, may_extend: bool, code: str | None
) -> None:
    found = requirements._vector(SimpleNamespace(vector=vector, installable=installable, may_extend=may_extend))
    assert [e.code for e in found] == ([code] if code else [])


def test_an_index_elsewhere_needs_no_pgvector(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "VECTOR", (99, 0))
    assert "vector_too_old" in codes(settings)
    assert "vector_too_old" not in codes(replace(settings, index="elsewhere"))


def test_a_secret_that_is_missing_is_a_warning_for_what_is_active(
    settings: Settings, kb: Kb, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kb("space", "add", "secretive").code == 0
    assert kb("source", "add", "secretive", "docs", "local_dir", f"path={folder}").code == 0
    with psycopg.connect(settings.database_url, autocommit=True) as c:
        c.execute("UPDATE kb_source SET config = config || '{\"token\": \"env:KB_SECRET_NONE\"}' WHERE name = 'docs'")
        found = codes(settings)["missing_secret"]
        assert found.warning and "source secretive/docs" in found.error.message and "env:KB_SECRET_NONE" in found.error.message
        monkeypatch.setenv("KB_SECRET_NONE", "here")
        assert "missing_secret" not in codes(settings)
        monkeypatch.delenv("KB_SECRET_NONE")
        c.execute("UPDATE kb_source SET status = 'PAUSED'")
        assert "missing_secret" not in codes(settings)


def test_a_bucket_that_is_not_there_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    from moto.server import ThreadedMotoServer

    for name, value in (("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")):
        monkeypatch.setenv(name, value)
    server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        found = codes(replace(settings, blobs="s3://absent/prefix", s3_endpoint=endpoint))
        assert "absent" in next(f.error.message for code, f in found.items() if code != "disk_full")
    finally:
        server.stop()


def test_a_channel_that_cannot_be_written_to_is_a_warning_that_keeps_its_secrets(settings: Settings) -> None:
    urls = "nowhere://token@host, json://127.0.0.1:9/hook, env:KB_NO_SUCH_CHANNEL"
    found = [f for f in examine(replace(settings, alert_urls=urls), HOST, free_ports()) if f.error.code == "bad_channel"]
    assert [f.warning for f in found] == [True, True]
    assert "channel 1 (nowhere)" in found[0].error.message and "token" not in found[0].error.message
    assert "KB_NO_SUCH_CHANNEL" in found[1].error.message


def test_the_embedded_server_is_looked_at_and_left_as_it_was(settings: Settings) -> None:
    from kb_pipeline.embedded_postgres import EmbeddedPostgres

    home = settings.home
    assert codes(replace(settings, home=home, database_url="")).keys() <= {"disk_full"}
    assert (home / "postgres" / "data").is_dir() and not EmbeddedPostgres(home).running()


def test_one_error_tells_all_and_is_a_matter_of_settings_only_if_all_are() -> None:
    a, b = Misconfigured("first", code="a"), Fatal("second", code="b")
    assert isinstance(refusal([a, a]), Misconfigured)
    both = refusal([a, b])
    assert isinstance(both, Fatal) and both.code == "a" and both.message.splitlines()[0] == "first" and "second" in both.message


def test_ports_are_looked_at_on_the_address_that_is_asked_for(taken: int) -> None:
    assert preflight._taken(HOST, taken) and not preflight._taken("127.0.0.2", taken)
    assert os.strerror(98) in preflight._taken("0.0.0.0", taken)
