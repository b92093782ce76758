"""The command: which rules, in how many copies, and what came of each."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import kb_pipeline_tests.mutations
from kb_pipeline.embedded_postgres import EmbeddedPostgres
from kb_pipeline_tests.conftest import Server, migrated
from kb_pipeline_tests.mutations.rule import Rule
from kb_pipeline_tests.mutations.rules import RULES
from kb_pipeline_tests.mutations.runner import Copy, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m kb_pipeline_tests.mutations",
        description=kb_pipeline_tests.mutations.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="rules, or subjects; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are worked in at a time (2)")
    parser.add_argument("--list", action="store_true", help="only say what the rules are")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    chosen = _chosen(options.keys)
    if not chosen:
        parser.error(f"no such rule: {', '.join(options.keys)} (--list shows them)")
    if options.list:
        _list(chosen, options.json)
        return 0
    began = time.monotonic()
    verdicts = []
    for verdict in _judged([r for r in chosen if _is_run(r)], max(1, options.jobs)):
        verdicts.append(verdict)
        print(_line(verdict), file=sys.stderr if options.json else sys.stdout, flush=True)
    _tell(chosen, verdicts, time.monotonic() - began, options.json)
    return int(any(v.outcome != "KILLED" for v in verdicts))


def _chosen(keys: Sequence[str]) -> list[Rule]:
    return [r for r in RULES if not keys or r.key in keys or r.key.partition(".")[0] in keys]


def _is_run(rule: Rule) -> bool:
    return bool(rule.beside) or not rule.redundant


def _judged(rules: Sequence[Rule], jobs: int) -> Iterator[Verdict]:
    """As they come. Each job has a copy of its own; all have one server."""
    with tempfile.TemporaryDirectory(prefix="kb-mutations-") as work, _server(Path(work)) as (url, template):
        copies: SimpleQueue[Copy] = SimpleQueue()
        for n in range(min(jobs, len(rules))):
            copy = Copy(Path(work) / f"copy{n}", url, template)
            if strangers := [p for p in copy.imported_from() if not p.is_relative_to(copy.folder)]:
                raise SystemExit(f"the tests of a copy import {strangers[0]}: nothing that is changed there would be seen")
            copies.put(copy)

        def judge(rule: Rule) -> Verdict:
            copy = copies.get()
            try:
                return copy.judge(rule)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as threads:
            for done in as_completed([threads.submit(judge, r) for r in rules]):
                yield done.result()


@contextmanager
def _server(work: Path) -> Iterator[tuple[str, str]]:
    """A server that keeps nothing it would have to wait for, and a migrated database on it."""
    postgres = EmbeddedPostgres(work / ".kb")
    try:
        postgres.start()
        with (work / ".kb" / "postgres" / "data" / "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write("fsync = off\nfull_page_writes = off\nsynchronous_commit = off\n")
        postgres.stop()
        url = postgres.start()
        with migrated(Server(url, "", True)) as template:
            yield url, template
    finally:
        postgres.stop(mode="immediate")


# --- what is told -----------------------------------------------------------------------------------------------------


def _line(v: Verdict) -> str:
    line = f"{v.key} | {v.test or '-'} | {v.outcome} | {v.seconds:.1f}"
    return f"{line}\n    {v.message}" if v.message else line


def _tell(chosen: Sequence[Rule], verdicts: Sequence[Verdict], seconds: float, as_json: bool) -> None:
    not_run = [r for r in chosen if not _is_run(r)]
    if as_json:
        found = [
            {"key": v.key, "outcome": v.outcome, "test": v.test, "seconds": v.seconds, "message": v.message} for v in verdicts
        ]
        skipped = [{"key": r.key, "redundant": r.redundant} for r in not_run]
        print(json.dumps({"rules": found, "not_run": skipped, "seconds": seconds}, indent=2))
        return
    for r in not_run:
        print(f"{r.key} | not run | {r.redundant}")
    counts = {o: sum(v.outcome == o for v in verdicts) for o in ("KILLED", "SURVIVED", "ERROR")}
    print(f"{len(chosen)} rules: {', '.join(f'{n} {o}' for o, n in counts.items())}, {len(not_run)} not run; {seconds:.0f} s")


def _list(chosen: Sequence[Rule], as_json: bool) -> None:
    if as_json:
        names = ("key", "name", "harm", "tests", "beside", "redundant")
        print(json.dumps([{n: getattr(r, n) for n in names} for r in chosen], indent=2))
        return
    for r in chosen:
        print(f"{r.key}: {r.name}\n    without it: {r.harm}")
        if r.beside:
            print(f"    removed together with {', '.join(r.beside)}: {r.redundant}")
        elif r.redundant:
            print(f"    not run: {r.redundant}")


if __name__ == "__main__":
    sys.exit(main())
