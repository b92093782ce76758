"""Every command: the JSON keys that scripts rely on, what it does, and how it refuses."""

from pathlib import Path

import pytest

from kb_pipeline.cli.sync import INGESTED, WALKED
from kb_pipeline_tests.cli.conftest import Kb


def test_init_tells_where_everything_is_and_may_be_repeated(kb: Kb, home: Path) -> None:
    for _ in range(2):
        found = kb.json("init")
        assert found["home"] == str(home) and found["database"] == "KB_DATABASE_URL" and found["schema_version"] >= 1


def test_json_is_accepted_before_and_behind_the_command(kb: Kb) -> None:
    assert kb("--json", "space", "list").json == kb("space", "list", "--json").json


def test_json_behind_two_dashes_is_an_argument(kb: Kb, loaded: str) -> None:
    ran = kb("--json", "search", loaded, "--", "--json")
    assert ran.json["question"] == "--json"


# --- spaces ---------------------------------------------------------------------------------------------------------


def test_space_add_takes_every_setting(kb: Kb) -> None:
    made = kb.json(
        *(
            "space",
            "add",
            "full",
            "--name",
            "全部",
            "--index",
            "pgvector",
            "--embedder",
            "hashing",
            "--retain",
            3,
            "--schedule",
            "@daily",
        ),
        *(
            "--audience",
            "staff",
            "--audience",
            "hr",
            "--chunk",
            "max_tokens=200",
            "--chunk",
            "sections=no",
            "--chunk",
            "context=path",
        ),
    )
    assert made["key"] == "full" and made["status"] == "ACTIVE" and made["name"] == "全部"
    assert made["retained_versions"] == 3 and made["schedule"] == "@daily" and made["audience"] == [["staff", "hr"]]
    assert made["chunking"] == {"max_tokens": 200, "sections": False, "context": "path"}
    shown = kb.json("space", "show", "full")
    assert made.items() <= shown.items() and shown["documents"] == {} and shown["sources"] == []
    assert "full" in [s["key"] for s in kb.json("space", "list")["spaces"]]


def test_space_set_changes_what_it_names_and_nothing_else(kb: Kb) -> None:
    before = kb.json("space", "add", "changed", "--schedule", "0 1 * * *", "--audience", "staff")
    after = kb.json("space", "set", "changed", "name=Neu", "retain=2")
    assert [i.pop("state") for i in after["indexes"]] == ["serving"] and after.pop("indexes")
    assert after == before | {"name": "Neu", "retained_versions": 2}
    assert kb.json("space", "set", "changed", "audience=a,b", "schedule=")["audience"] == [["a", "b"]]
    assert kb.json("space", "set", "changed", "audience=")["audience"] is None
    assert kb.json("space", "show", "changed")["schedule"] == ""


@pytest.mark.parametrize(
    "arguments, word",
    [
        (("space", "add", "Not A Key"), "space key"),
        (("space", "add", "x", "--chunk", "max_tokens=many"), "max_tokens=many"),
        (("space", "add", "x", "--chunk", "colour=red"), "colour"),
        (("space", "add", "x", "--chunk", "sections"), "key=value"),
        (("space", "add", "x", "--retain", 0), "--retain"),
        (("space", "add", "x", "--schedule", "every day"), "schedule"),
        (("space", "add", "x", "--embedder", "none"), "unknown embedder"),
        (("space", "add", "x", "--index", "none"), "unknown index"),
        (("space", "add", "x", "--embedder-option", "colour=red"), "colour"),
        (("space", "set", "nosuch", "name=x"), "nosuch"),
        (("space", "set", "nosuch", "embedder=x"), "nosuch"),
        (("space", "set", "changed", "index=none"), "unknown index"),
        (("space", "set", "changed", "index.colour=red"), "colour"),
        (("space", "set", "changed", "embedder.dimension=x"), "dimension"),
        (("space", "set", "changed", "chunking=max_tokens=3"), "max_tokens:300"),
        (("space", "set", "changed", "chunking=max_tokens:3"), "min_tokens"),
        (("space", "build", "changed"), "no index is being built"),
        (("space", "cancel", "changed"), "no index is being built"),
        (("space", "back", "changed"), "no former index is kept"),
        (("search", "changed", "why", "--mode", "magic"), "vector, keyword or hybrid"),
        (("search", "changed", "why", "--mode", "hybrid", "--at", "1h"), "by vectors only"),
        (("search", "changed", "why", "--mode", "keyword"), "does not search by words"),
        (("space", "show", "nosuch"), "nosuch"),
        (("source", "add", "nosuch", "docs", "local_dir"), "nosuch"),
        (("source", "show", "nosuch"), "kb source list"),
        (("source", "show", "a", "b", "c"), "SPACE NAME"),
        (("source", "approve", "nosuch"), "--up-to"),
        (("sync", "nosuch"), "kb space add nosuch"),
        (("search", "nosuch", "why"), "nosuch"),
        (("task", "show", 2**40), "no task"),
        (("task", "show", "x"), "ID"),
        (("task", "list", "nosuch", "--status", "x"), "--status"),
        (("doc", "show", 2**40), "no document"),
        (("doc", "text", 2**40), "no document"),
        (("doc", "show", 2**70), "ID"),
        (("--home", "\udcff", "init"), "not UTF-8"),
        (("nosuch",), "nosuch"),
    ],
)
def test_wrong_input_ends_with_2_and_says_what_is_wrong(kb: Kb, arguments: tuple[object, ...], word: str) -> None:
    ran = kb(*arguments)
    assert ran.code == 2 and word in ran.err and not ran.out
    assert "Traceback" not in ran.err


def test_a_refusal_is_a_json_document_too(kb: Kb) -> None:
    ran = kb("space", "show", "nosuch", "--json")
    assert ran.code == 2 and ran.json["error"]["code"] == "no_space" and "nosuch" in ran.json["error"]["message"]
    assert ran.err.startswith("kb: no space 'nosuch'")


def test_an_unknown_setting_is_wrong_usage(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_EMBEDER", "local")
    assert kb("status").code == 2


def test_an_unknown_log_level_is_wrong_usage(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_LOG_LEVEL", "LOUD")
    ran = kb("status")
    assert ran.code == 2 and "KB_LOG_LEVEL=LOUD" in ran.err


def test_a_traceback_is_for_debugging_only(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in kb("space", "show", "nosuch").err
    ran = kb("--debug", "space", "show", "nosuch")
    assert ran.code == 2 and "Traceback" in ran.err
    monkeypatch.setenv("KB_LOG_LEVEL", "debug")
    assert "Traceback" in kb("space", "show", "nosuch").err


def test_an_unreachable_database_ends_with_1(kb: Kb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_DATABASE_URL", "postgresql://kb@127.0.0.1:9/kb")
    ran = kb("status")
    assert ran.code == 1 and "KB_DATABASE_URL" in ran.err


def test_removing_a_space_needs_a_yes_and_leaves_nothing(kb: Kb, loaded: str) -> None:
    refused = kb("space", "remove", loaded)
    assert refused.code == 2 and "--yes" in refused.err
    assert kb.json("status", loaded)["spaces"][0]["documents"] == {"AVAILABLE": 2}
    removed = kb.json("space", "remove", loaded, "--yes")
    assert removed["status"] == "DELETED" and removed["residue"] and not any(removed["residue"].values())
    assert kb("space", "show", loaded).code == 2


# --- sources --------------------------------------------------------------------------------------------------------


def test_a_source_by_its_name_alone_where_it_is_unique(kb: Kb, folder: Path) -> None:
    for key in ("one", "two"):
        kb("space", "add", key)
        assert kb.json("source", "add", key, "same", "local_dir", f"path={folder}")["waiting_deletions"] == 0
    kb("source", "add", "two", "only", "local_dir", f"path={folder}")
    assert kb.json("source", "show", "only")["space"] == "two"
    ambiguous = kb("source", "pause", "same")
    assert ambiguous.code == 2 and "one, two" in ambiguous.err
    assert kb.json("source", "show", "one", "same")["space"] == "one"


def test_relative_paths_are_meant_from_here_and_no_path_is_no_path(
    kb: Kb, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    kb("space", "add", "relative")
    made = kb.json("source", "add", "relative", "docs", "local_dir", f"path={folder.name}", "include=*.md, *.txt")
    assert made["config"] == {"path": str(folder), "include": ["*.md", "*.txt"]}
    assert kb("source", "add", "relative", "empty", "local_dir", "path=").code == 2


def test_source_keys_and_its_last_pass(kb: Kb, loaded: str) -> None:
    shown = kb.json("source", "show", loaded, "docs")
    assert (
        shown["name"] == "docs"
        and shown["kind"] == "local_dir"
        and shown["verdict"] == "COMPLETE"
        and shown["waiting_deletions"] == 0
    )
    assert shown["last_pass"]["finished_at"].endswith("+00:00")
    assert shown in kb.json("source", "list", loaded)["sources"]
    assert kb.json("source", "test", loaded, "docs")["check"]["entries"] == 2


def test_a_paused_source_is_not_read(kb: Kb, loaded: str) -> None:
    assert kb.json("source", "pause", loaded, "docs")["status"] == "PAUSED"
    refused = kb("sync", loaded)
    assert refused.code == 2 and "paused" in refused.err
    assert kb.json("source", "resume", loaded, "docs")["status"] == "ACTIVE"
    assert kb("sync", loaded).code == 0


def test_removing_a_source_deletes_its_documents_only(kb: Kb, loaded: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "stays.txt").write_text("it stays")
    kb("source", "add", loaded, "other", "local_dir", f"path={other}")
    kb("sync", loaded)
    refused = kb("source", "remove", loaded, "docs")
    assert refused.code == 2 and "--yes" in refused.err
    removed = kb.json("source", "remove", loaded, "docs", "--yes")
    assert removed["deleted"] == 2 and removed["vectors_deleted"] == 2
    assert [d["external_id"] for d in kb.json("doc", "list", loaded)["documents"]] == ["stays.txt"]
    assert kb.json("status", loaded)["spaces"][0]["vectors"] == {"indexed": 1}
    assert [s["name"] for s in kb.json("source", "list", loaded)["sources"]] == ["other"]
    assert kb("sync", loaded).code == 0


# --- sync -----------------------------------------------------------------------------------------------------------


def test_sync_keys_and_what_it_says(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "leave.md").write_text("# Leave\n\nNew employees have twelve days of leave.\n", encoding="utf-8")
    found = kb.json("sync", loaded)
    numbers = {*WALKED, *INGESTED, "vectors_deleted", "seconds"}
    assert numbers <= found.keys() and found["verdict"] == "COMPLETE" and found["failures"] == [] and found["errors"] == {}
    (only,) = found["passes"]
    assert numbers | {"source", "kind", "verdict", "reasons", "waiting_deletions", "resumed"} <= only.keys()
    assert {k: only[k] for k in numbers} == {k: found[k] for k in numbers}
    assert (found["seen"], found["changed"], found["unchanged"], found["embedded"]) == (2, 1, 1, 1)
    (folder / "new.md").write_text("# New\n\nSomething new.\n", encoding="utf-8")
    ran = kb("sync", loaded)
    assert ran.code == 0 and "docs: 3 seen, 1 new" in ran.out and "1 chunk embedded" in ran.out


def test_numbers_of_several_sources_are_summed(kb: Kb, loaded: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.txt").write_text("b")
    kb("source", "add", loaded, "b", "local_dir", f"path={tmp_path / 'b'}")
    found = kb.json("sync", loaded, "--full")
    assert found["seen"] == 3 and [p["seen"] for p in found["passes"]] == [1, 2] and "embedded" not in found["passes"][0]
    assert kb.json("sync", loaded, "--source", "b")["seen"] == 1


def test_a_document_that_fails_costs_a_3_and_is_named_with_the_way_out(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "empty.md").write_text("")
    ran = kb("sync", loaded)
    assert ran.code == 3 and "failed: empty.md" in ran.err and "kb task show" in ran.err
    (folder / "empty.txt").write_text("")
    found = kb.json("sync", loaded, code=3)
    (failure,) = found["failures"]
    assert (
        failure.keys() >= {"document", "code", "message", "task_id"}
        and failure["document"] == "empty.txt"
        and found["failed"] == 1
    )
    assert kb.json("task", "show", failure["task_id"])["error_code"] == failure["code"]
    later = kb("sync", loaded)
    assert later.code == 0 and "2 documents failed in earlier passes" in later.err


def test_a_source_that_is_gone_costs_a_1_and_deletes_nothing(kb: Kb, loaded: str, folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    found = kb.json("sync", loaded, code=1)
    assert str(folder) in found["errors"]["docs"] and found["verdict"] == "PARTIAL" and found["deleted"] == 0
    assert kb.json("status", loaded)["spaces"][0]["documents"] == {"AVAILABLE": 2}


def test_deletions_beyond_the_guard_cost_a_4_until_they_are_approved(kb: Kb, loaded: str, folder: Path) -> None:
    for n in range(8):
        (folder / f"{n}.txt").write_text(f"number {n}")
    kb("sync", loaded)
    for n in range(8):
        (folder / f"{n}.txt").unlink()
    (folder / "empty.md").write_text("")  # 4 is more urgent than 3
    ran = kb("sync", loaded)
    assert ran.code == 4 and "--up-to 8" in ran.err
    found = kb.json("sync", loaded, code=4)
    assert found["verdict"] == "UNTRUSTED" and found["waiting_deletions"] == 8 and found["deleted"] == 0
    assert kb.json("source", "approve", loaded, "docs", "--up-to", 8)["waiting_deletions"] == 8
    assert kb.json("sync", loaded)["deleted"] == 8
    assert kb.json("source", "show", loaded, "docs")["waiting_deletions"] == 0


# --- search and status ----------------------------------------------------------------------------------------------


def test_search_keys_and_chinese_questions_in_several_words(kb: Kb, loaded: str) -> None:
    answer = kb.json("search", loaded, "新员工", "年假", "-k", 1)
    assert answer["question"] == "新员工 年假" and answer["answer_id"] > 0
    (hit,) = answer["hits"]
    assert hit.keys() >= {"document_id", "external_id", "uri", "title", "title_path", "version", "chunk_id", "score", "text"}
    assert hit["external_id"] == "年假.md"
    assert "年假.md" in kb("search", loaded, "年假").out


def test_search_as_a_principal_finds_what_is_not_public(kb: Kb, loaded: str) -> None:
    kb("space", "set", loaded, "audience=staff,hr")
    assert kb.json("search", loaded, "leave")["hits"] == []
    assert "--as" in kb("search", loaded, "leave").out
    assert len(kb.json("search", loaded, "leave", "--as", "hr", "--as", "nobody")["hits"]) == 2


def test_status_counts_by_status_and_knows_the_next_pass(kb: Kb, loaded: str) -> None:
    (space,) = kb.json("status", loaded)["spaces"]
    assert space["key"] == loaded and space["status"] == "ACTIVE"
    assert space["documents"] == {"AVAILABLE": 2} and space["tasks"] == {"SUCCESS": 2}
    assert space["chunks"] == {"current": 2} and space["vectors"] == {"indexed": 2}
    (source,) = space["sources"]
    assert source["next_pass"] is None and source["last_pass"]["verdict"] == "COMPLETE" and "*" in source["watermark"]
    kb("space", "set", loaded, "schedule=0 3 * * *")
    assert "T03:00:00+00:00" in kb.json("status", loaded)["spaces"][0]["sources"][0]["next_pass"]
    assert loaded in [s["key"] for s in kb.json("status")["spaces"]]
    assert "2 AVAILABLE" in kb("status", loaded).out


# --- tasks and documents --------------------------------------------------------------------------------------------


def test_a_failed_task_is_tried_again_after_retry(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "empty.md").write_text("")
    failed = kb.json("sync", loaded, code=3)["failures"][0]["task_id"]
    (listed,) = kb.json("task", "list", loaded, "--status", "dead")["tasks"]
    assert listed.keys() >= {"task_id", "document_id", "status", "current_node", "retry_count", "error_code", "error_message"}
    assert listed["task_id"] == failed and listed["error_code"] == "empty"
    shown = kb.json("task", "show", failed)
    assert listed.items() <= shown.items() and [n["node"] for n in shown["nodes"]] == ["FETCHER", "PARSER"]
    assert kb.json("task", "retry", failed)["status"] == "PENDING"
    assert kb("sync", loaded).code == 3
    assert f"kb sync {loaded}" in kb("task", "retry", failed).out


def test_a_task_is_cancelled_once(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "empty.md").write_text("")
    failed = kb.json("sync", loaded, code=3)["failures"][0]["task_id"]
    cancelled = kb.json("task", "cancel", failed, "--reason", "not needed")
    assert cancelled["status"] == "CANCELED" and cancelled["cancel_reason"] == "not needed"
    kb("sync", loaded)
    assert kb.json("task", "show", failed)["status"] == "CANCELED"
    for command in ("cancel", "retry"):
        refused = kb("task", command, failed)
        assert refused.code == 2 and "CANCELED" in refused.err


def test_everything_unfinished_of_a_document_or_space_is_cancelled(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "leave.md").write_text("# Leave\n\nTwelve days.\n")
    kb("sync", loaded)
    document = kb.json("doc", "list", loaded)["documents"][0]["document_id"]
    assert kb.json("task", "cancel", "--document", document) == {"space": loaded, "document_id": document, "cancelled": 0}
    assert kb.json("task", "cancel", "--space", loaded)["cancelled"] == 0
    assert "0 tasks are cancelled" in kb("task", "cancel", "--space", loaded).out
    for wrong in ((), (document, "--space", loaded)):
        refused = kb("task", "cancel", *wrong)
        assert refused.code == 2 and "name one of" in refused.err


def test_document_keys_versions_and_text(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "leave.md").write_text("# Leave\n\nTwelve days, see [the law](https://example.com/law).\n", encoding="utf-8")
    kb("sync", loaded)
    listed = kb.json("doc", "list", loaded)["documents"]
    assert all(d.keys() >= {"document_id", "external_id", "version", "status", "published_at", "chunks"} for d in listed)
    (found,) = (d for d in listed if d["external_id"] == "leave.md")
    shown = kb.json("doc", "show", found["document_id"])
    assert shown["version"] == 2 and shown["status"] == "AVAILABLE" and shown["chunks"] == 1 and shown["reused"] == 0
    versions = kb.json("doc", "versions", found["document_id"])["versions"]
    assert [(v["version"], v["current"], v["chunks"], v["reused"]) for v in versions] == [(2, True, 1, 0), (1, False, 1, 0)]
    assert "(https://example.com/law)" in kb("doc", "text", found["document_id"]).out
    old = kb.json("doc", "text", found["document_id"], "--version", 1)
    assert old["version"] == 1 and "ten days" in old["text"]
    assert kb("doc", "text", found["document_id"], "--version", 9).code == 2


def test_documents_are_listed_in_pages(kb: Kb, loaded: str) -> None:
    first = kb.json("doc", "list", loaded, "--limit", 1)
    second = kb.json("doc", "list", loaded, "--limit", 1, "--after", first["next"])
    both = kb.json("doc", "list", loaded)
    assert first["documents"] + second["documents"] == both["documents"] and both["next"] is None


def test_a_rollback_is_current_when_the_command_returns_and_embeds_nothing(kb: Kb, loaded: str, folder: Path) -> None:
    (folder / "leave.md").write_text("# Leave\n\nTwelve days.\n", encoding="utf-8")
    kb("sync", loaded)
    (doc,) = (d["document_id"] for d in kb.json("doc", "list", loaded)["documents"] if d["external_id"] == "leave.md")
    back = kb.json("doc", "rollback", doc, 1)
    assert back["version"] == 3 and back["rolled_back_to"] == 1
    assert "ten days" in kb.json("search", loaded, "leave", "-k", 1)["hits"][0]["text"]
    again = kb.json("sync", loaded)
    assert again["changed"] == 0 and again["embedded"] == 0
    assert kb("doc", "rollback", doc, 3).code == 2 and kb("doc", "rollback", doc, 9).code == 2


def test_a_deleted_document_is_gone_at_once_and_comes_back_with_the_next_sync(kb: Kb, loaded: str) -> None:
    (doc,) = (d["document_id"] for d in kb.json("doc", "list", loaded)["documents"] if d["external_id"] == "leave.md")
    deleted = kb.json("doc", "delete", doc)
    assert deleted["status"] == "DELETED" and deleted["vectors_deleted"] == 1
    assert [h["external_id"] for h in kb.json("search", loaded, "leave")["hits"]] == ["年假.md"]
    assert kb("doc", "delete", doc).code == 2
    assert kb.json("sync", loaded)["new"] == 1


def test_another_model_is_built_and_gone_back_to(kb: Kb, tmp_path: Path) -> None:
    for n in range(5):
        (tmp_path / f"{n}.md").write_text(f"# Page {n}\n\nWhat stands on page {n}.\n", encoding="utf-8")
    kb.json("space", "add", "models")
    kb("source", "add", "models", "docs", "local_dir", f"path={tmp_path}")
    chunks = kb.json("sync", "models")["embedded"]
    changed = kb.json("space", "set", "models", "embedder.dimension=64")
    assert changed["dimension"] == 64 and changed["built"]["embedded"] == changed["built"]["chunks"] == chunks
    assert [i["state"] for i in changed["indexes"]] == ["serving", "kept"]
    assert kb.json("search", "models", "anything")["hits"]
    back = kb.json("space", "back", "models")
    assert (back["embedded"], back["chunks"]) == (0, 0)
    assert kb.json("space", "show", "models")["dimension"] == 256
    begun = kb.json("space", "set", "models", "embedder.dimension=32", "--no-wait")
    assert [i["state"] for i in begun["indexes"]] == ["serving", "building", "kept"]
    assert kb.json("space", "cancel", "models")["status"] == "CANCELED"
    assert [i["state"] for i in kb.json("space", "indexes", "models")["indexes"]] == ["serving", "kept"]
