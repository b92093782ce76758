from kb_pipeline.search import search
from kb_pipeline.sync import sync_space
from kb_pipeline_tests.fakes import *

def test_a(app, space):
    src = MemorySource({f"d{i}.md": f"# Title {i}\n\nThe number {i} is told here, at length.\n" for i in range(5)})
    app.add_fake_source(space, src)
    r = sync_space(app.engine, space)
    print(r)
    a = search(app.engine, space, "number 3 title")
    assert a.hits and a.hits[0].external_id == "d3.md", a
    src.remove("d3.md"); src.put("d1.md", "# other\n\nnow some other text\n")
    r = sync_space(app.engine, space); print(r)

def test_lies(make_app):
    idx, emb, blobs = MemoryIndex(), CountingEmbedder(), MemoryBlobs()
    app = make_app(index=idx, embedder=emb, blobs=blobs)
    space = app.add_space("lies")
    src = MemorySource({"a.md": "hello world"})
    app.add_fake_source(space, src)
    idx.drops_upserts = True
    r = sync_space(app.engine, space)
    assert r.failed >= 1, r
    idx.drops_upserts = False
    r = sync_space(app.engine, space)
    assert search(app.engine, space, "hello").hits
    assert emb.texts, emb.calls
    assert blobs.objects
