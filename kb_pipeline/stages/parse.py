"""Content -> blocks, and blocks -> the stored parse result: an Arrow stream, written and read batch by batch."""

import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import PurePosixPath
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Block, BlockKind, Json, Parsed
from kb_pipeline.ports import Parser

if TYPE_CHECKING:
    import pyarrow as pa

HEAD_BYTES = 64 << 10  # what detect_format looks at
BATCH_CHARS = 1 << 19  # about 1 MB
MEMORY_BYTES = 8 << 20  # a larger result goes to a temporary file
KINDS = tuple(BlockKind)  # stored as their position: append only
KIND_IDS = {kind: i for i, kind in enumerate(KINDS)}

FORMATS = {
    **dict.fromkeys(("md", "markdown", "mdx", "mkd"), "markdown"),
    **dict.fromkeys(("html", "htm", "xhtml", "shtml"), "html"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(
        ("txt", "text", "log", "json", "jsonl", "yaml", "yml", "toml", "ini", "cfg", "conf", "xml", "rst", "adoc"), "text"
    ),
    **dict.fromkeys(
        ("py", "js", "ts", "go", "rs", "java", "c", "h", "cpp", "cs", "rb", "php", "sh", "sql", "tex", "org"), "text"
    ),
}
MAGIC = (  # (offset, bytes, what it is); what text could begin with as well counts only where the rest is not text
    (0, b"\x89PNG\r\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"RIFF", "a RIFF media file"),
    (4, b"ftyp", "an MP4 or HEIF media file"),
    (0, b"ID3", "an MP3 file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (0, b"BZh", "a bzip2 archive"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (0, b"\xfd7zXZ\0", "an xz archive"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (0, b"Rar!\x1a", "a RAR archive"),
    (257, b"ustar", "a tar archive"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document of the old binary kind (.doc, .xls, .ppt)"),
    (0, b"\x7fELF", "an ELF program"),
    (0, b"MZ", "a Windows program"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"PAR1", "a Parquet file"),
    (0, b"ARROW1", "an Arrow file"),
)
ZIPPED = (
    (b"word/", "a Word document (.docx)"),
    (b"xl/", "an Excel workbook (.xlsx)"),
    (b"ppt/", "a PowerPoint presentation (.pptx)"),
    (b"application/epub+zip", "an EPUB book"),
    (b"application/vnd.oasis.opendocument", "an OpenDocument file"),
)
BOMS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
CONTROLS = bytes(b for b in (*range(32), 127) if chr(b) not in "\t\n\r\f\x1b")
# possessive: a head full of comments must not be tried in every combination
HTML_START = re.compile(r"(?>\s+|<!--.*?-->|<\?xml[^>]*>)*+<(?:!doctype\s+html|html[\s>])", re.IGNORECASE | re.DOTALL)
ANY_TAG = re.compile(r"<[A-Za-z!/?]")


# how parsers fail on content that nobody foresaw
DAMAGE = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A stored parse result. ``data`` is complete and at its start; whoever takes it closes it."""

    data: BinaryIO
    size_bytes: int
    title: str | None
    meta: Json
    blocks: int
    characters: int
    text_sha256: bytes  # over the title and every block: the same where only the bytes of the source changed


# --- what is it -----------------------------------------------------------------------------------------------------


def detect_format(head: bytes, name: str) -> str:
    """The parser's name, from the first HEAD_BYTES; the name only decides between kinds of text. Raises Rejected
    (code ``empty``, ``binary``, ``unsupported_format``)."""
    if not head.removeprefix(codecs.BOM_UTF8).strip():
        raise Rejected(f"{name} is empty: nothing to index", code="empty")
    text = _as_text(head)
    if what := _unsupported(head, is_text=text is not None):
        raise Rejected(
            f"{name} is {what}: no parser reads that; convert it to text, Markdown or HTML", code="unsupported_format"
        )
    suffix = PurePosixPath(name).suffix[1:].lower()
    by_name = FORMATS.get(suffix)
    if text is None and not _could_be_text(head):
        raise _binary(head, name, known=by_name is not None)
    if text is not None and not text.strip("\ufeff \t\r\n\f"):
        raise Rejected(f"{name} is empty: nothing to index", code="empty")
    start = text if text is not None else head.decode("latin-1")
    if by_name != "text" or suffix in ("txt", "text"):
        if HTML_START.match(start.lstrip("\ufeff")):
            return "html"
        if by_name == "html":
            return "html" if ANY_TAG.search(start) else "text"
    return by_name or _asked(head)


def _as_text(head: bytes) -> str | None:
    """Decoded where that is certain: a byte order mark or strict UTF-8, and no control characters."""
    codec = next((codec for bom, codec in BOMS if head.startswith(bom)), "utf-8")
    if codec == "utf-8" and len(head.translate(None, CONTROLS)) != len(head):
        return None
    try:
        text = codecs.getincrementaldecoder(codec)().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _could_be_text(head: bytes) -> bool:
    """Hardly a control character, as in any old encoding; or UTF-16 without a mark. The parser looks more closely."""
    controls = len(head) - len(head.translate(None, CONTROLS))
    return controls <= 8 + len(head) // 50 or any(_is_utf16(head, codec) for codec in ("utf-16-le", "utf-16-be"))


def _is_utf16(head: bytes, codec: str) -> bool:
    """Nearly all of it ASCII, Latin, kana, Chinese characters and their punctuation: of random units a third would be."""
    text = codecs.getincrementaldecoder(codec)("replace").decode(head)
    usual = sum(
        1 for c in text if c in "\t\n\r" or " " <= c <= "\u00ff" or "\u3000" <= c <= "\u9fff" or "\uff00" <= c <= "\uffef"
    )
    return usual * 10 >= len(text) * 9


def _unsupported(head: bytes, *, is_text: bool) -> str | None:
    if b"%PDF-" in head[:1024] and (head.startswith(b"%PDF-") or not is_text):
        return "a PDF document"
    if head.startswith(b"{\\rtf"):
        return "an RTF document"
    if is_text:
        return None
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return next((what for mark, what in ZIPPED if mark in head), "a ZIP archive")
    return next((what for at, magic, what in MAGIC if head.startswith(magic, at)), None)


def _binary(head: bytes, name: str, *, known: bool) -> Rejected:
    """A name that promises text makes other content damage; else the model may know what it is."""
    if not known:
        found = _magika().identify_bytes(head)
        if found.score >= 0.9 and found.output.label not in ("unknown", "empty") and not found.output.is_text:
            message = f"{name} is {found.output.description} data: no parser reads that; convert it to text, Markdown or HTML"
            return Rejected(message, code="unsupported_format")
    return Rejected(f"{name} is binary data, not text in any encoding: exclude it from the source", code="binary")


def _asked(head: bytes) -> str:
    """Text under a name that says nothing."""
    label = str(_magika().identify_bytes(head).output.label)
    return {"markdown": "markdown", "html": "html", "csv": "csv", "tsv": "csv"}.get(label, "text")


@lru_cache(maxsize=1)
def _magika() -> Any:
    from magika import Magika  # a model of 50 MB in memory: only where cheap signs do not decide

    return Magika()


# --- parse ----------------------------------------------------------------------------------------------------------


def recipe(format_name: str, parser: Parser) -> str:
    """What made a parse result: another recipe parses again."""
    return f"{format_name}/{parser.version}"


def parse_document(raw: BinaryIO, name: str, parser_for: Callable[[str], Parser]) -> Parsed:
    """Blocks of one document; ``raw`` is seekable and stays open until they are consumed. ``meta`` gets ``format`` and
    ``recipe``. Raises Rejected, also while the blocks are consumed."""
    raw.seek(0)
    format_name = detect_format(raw.read(HEAD_BYTES), name)
    raw.seek(0)
    parser = parser_for(format_name)
    try:
        parsed = parser.parse(raw, name)
    except DAMAGE as e:
        raise _corrupt(name, format_name, e) from e
    meta = {**parsed.meta, "format": format_name, "recipe": recipe(format_name, parser)}
    return replace(parsed, blocks=_guarded(parsed.blocks, name, format_name), meta=meta)


def _guarded(blocks: Iterable[Block], name: str, format_name: str) -> Iterator[Block]:
    try:
        yield from blocks
    except DAMAGE as e:
        raise _corrupt(name, format_name, e) from e


def _corrupt(name: str, format_name: str, cause: Exception) -> Rejected:
    return Rejected(f"{name} cannot be read as {format_name} ({type(cause).__name__}): repair or exclude it", code="corrupt")


# --- store and read back --------------------------------------------------------------------------------------------


def encode_blocks(parsed: Parsed) -> ParsedFile:
    """Consumes the blocks. Holds one batch of about BATCH_CHARS, or one block, in memory."""
    import pyarrow as pa

    title = _storable(parsed.title) if parsed.title else None
    meta = _storable(dict(parsed.meta))
    schema = _schema().with_metadata({"title": json.dumps(title), "meta": json.dumps(meta, allow_nan=False)})
    digest = hashlib.sha256(json.dumps(title).encode())
    file = cast(BinaryIO, SpooledTemporaryFile(max_size=MEMORY_BYTES))  # noqa: SIM115 - whoever takes the result closes it
    blocks = characters = 0
    try:
        codec = "zstd" if pa.Codec.is_available("zstd") else None
        with pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            for batch in _batches(parsed.blocks):
                texts = [_storable(block.text) for block in batch]
                data = [text.encode() for text in texts]
                for block, text in zip(batch, data, strict=True):
                    digest.update(b"\n%s %d %d %d\n%s" % (block.kind.encode(), block.level, block.page, len(text), text))
                writer.write_batch(_record_batch(batch, data, schema))
                blocks += len(batch)
                characters += sum(map(len, texts))
            writer.write_batch(_record_batch([], [], schema))  # the end mark: a cut file must not be a short document
        size = file.tell()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return ParsedFile(file, size, title, meta, blocks, characters, digest.digest())


def decode_blocks(raw: BinaryIO) -> Parsed:
    """What encode_blocks wrote, batch by batch; ``raw`` stays open until the blocks are consumed. Raises Rejected (code
    ``parse_result_damaged``), also while the blocks are consumed."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(raw, memory_pool=pa.system_memory_pool())  # gives memory back, unlike the default
        named = reader.schema.metadata or {}
        title, meta = json.loads(named[b"title"]), json.loads(named[b"meta"])
    except (pa.ArrowException, OSError, ValueError, LookupError) as e:
        raise _damaged(str(e)) from e
    return Parsed(_read_batches(reader), title, meta)


def _read_batches(reader: "pa.RecordBatchReader") -> Iterator[Block]:
    import pyarrow as pa

    rows = -1
    while rows:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
            kinds, levels, pages, texts = (batch.column(i).to_pylist() for i in range(4))
            rows = batch.num_rows
            blocks = [Block(KINDS[k], t, n, p) for k, n, p, t in zip(kinds, levels, pages, texts, strict=True)]
        except StopIteration:
            raise _damaged("its end is missing") from None
        except (pa.ArrowException, OSError, ValueError, LookupError) as e:
            raise _damaged(str(e)) from e
        yield from blocks


def _batches(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    batch: list[Block] = []
    size = 0
    for block in blocks:
        batch.append(block)
        size += len(block.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1)
def _schema() -> "pa.Schema":
    import pyarrow as pa

    fields = {"kind": pa.int8(), "level": pa.int8(), "page": pa.int32(), "text": pa.string()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


def _record_batch(blocks: list[Block], texts: list[bytes], schema: "pa.Schema") -> "pa.RecordBatch":
    """From buffers: pa.array() would import pandas, where that is installed, for 50 MB of memory."""
    import pyarrow as pa

    offsets = array("i", accumulate(map(len, texts), initial=0))
    ints = (
        array("b", [KIND_IDS[b.kind] for b in blocks]),
        array("b", [b.level for b in blocks]),
        array("i", [b.page for b in blocks]),
    )
    columns = [pa.Array.from_buffers(f.type, len(blocks), [None, pa.py_buffer(x)]) for f, x in zip(schema, ints, strict=False)]
    columns.append(pa.StringArray.from_buffers(len(blocks), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _storable(value: Any) -> Any:
    """JSON without NUL and lone surrogates, which PostgreSQL refuses, whatever a parser lets through."""
    if isinstance(value, str):
        if value.isascii() and "\0" not in value:
            return value
        return value.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_storable(str(k)): _storable(v) for k, v in value.items()}
    return [_storable(v) for v in value] if isinstance(value, list | tuple) else value


def _damaged(cause: str) -> Rejected:
    return Rejected(f"the stored parse result cannot be read ({cause}): parse the document again", code="parse_result_damaged")
