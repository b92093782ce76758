"""Listing a bucket in which nothing changed: a pass of ours beside the bare list calls of boto3.

    python -m kb_pipeline_tests.benchmarks.s3_listing [--objects 100000] [--rounds 3]

The server is moto in a process of its own, with objects of equal content. Prints seconds of the bare calls, of a pass that
compares digests, of a full walk that looks at every document, their ratios, and memory. Goal: a pass takes up to 1.3 times
the bare calls.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from kb_pipeline.settings import load_settings
from kb_pipeline.store.database import transaction
from kb_pipeline.sync import sync_space
from kb_pipeline.wiring import App, open_app
from kb_pipeline_tests import s3
from kb_pipeline_tests.benchmarks.corpus import peak_rss_mb, scratch
from kb_pipeline_tests.benchmarks.unchanged_walk import FILL, settled

BUCKET = "listed"
SERVER = f"""
import sys
from io import BytesIO
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer
store = s3_backends["123456789012"]["aws"]
store.create_bucket("{BUCKET}", "us-east-1")
for number in range(1, int(sys.argv[1]) + 1):
    store.put_object("{BUCKET}", f"folder/{{number:08}}.md", b"x")
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
AS_LISTED = (
    "UPDATE kb_doc_version SET revision = %(revision)s WHERE space_id = %(space)s",
    "UPDATE kb_doc SET uri = %(uri)s || external_id WHERE space_id = %(space)s",
)


@contextmanager
def served(objects: int) -> Iterator[str]:
    command = [sys.executable, "-c", SERVER, str(objects)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def bare(endpoint: str) -> int:
    pages = s3.client(endpoint).get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return sum(len(page.get("Contents", ())) for page in pages)


def filled(app: App, endpoint: str, objects: int) -> object:
    """A space whose documents are those objects, as after a first load."""
    space = app.add_space("walked", embedder_options={"dimension": 8})
    source = app.add_source(space, "bucket", "s3", s3.options(endpoint, BUCKET))
    etag = s3.client(endpoint).head_object(Bucket=BUCKET, Key="folder/00000001.md")["ETag"].strip('"')
    for first in range(1, objects + 1, 50_000):
        with transaction(app.pool) as c:
            for statement in FILL:
                last = min(first + 49_999, objects)
                c.execute(statement, {"space": space.id, "source": source.id, "first": first, "last": last})
    with transaction(app.pool) as c:
        for statement in AS_LISTED:
            c.execute(statement, {"space": space.id, "revision": etag, "uri": f"s3://{BUCKET}/"})
    return space


def timed(work: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--objects", type=int, default=100_000)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    print(f"{options}, load average {os.getloadavg()[0]:.2f}", flush=True)
    with scratch() as work, served(options.objects) as endpoint:
        with open_app(load_settings({}, home=work / "home", embedder="hashing")) as app:
            space = filled(app, endpoint, options.objects)
            settled(app)
            report = sync_space(app.engine, space)  # as every source once: it stores the digest of the listing
            print(
                f"first pass: {[{k: n for k, n in p.counts.items() if n} for p in report.passes]} {report.errors or ''}",
                flush=True,
            )
            before, seconds = peak_rss_mb(), {"bare list calls": [], "a pass": [], "a full walk": []}
            for _ in range(options.rounds):
                seconds["bare list calls"].append(timed(lambda: bare(endpoint))[0])
                seconds["a pass"].append(timed(lambda: sync_space(app.engine, space))[0])
                seconds["a full walk"].append(timed(lambda: sync_space(app.engine, space, full=True))[0])
            floor = median(seconds["bare list calls"])
            for label, each in seconds.items():
                print(f"{label}: {median(each):.1f} s, {median(each) / floor:.2f} x, of {[round(x, 1) for x in each]}")
            print(
                f"peak memory {before} MB before the rounds, {peak_rss_mb()} MB after them, load average {os.getloadavg()[0]:.2f}"
            )


if __name__ == "__main__":
    main()
