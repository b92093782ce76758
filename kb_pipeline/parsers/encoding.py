"""Bytes to text in any encoding, in one piece when small, piece by piece when large.

In order: byte order mark, NUL pattern of UTF-16, strict UTF-8, the encoding the content declares, UTF-8 with a few
damaged bytes, East Asian encodings by how usual the characters are that they give, single-byte encodings.
"""

import codecs
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

from kb_pipeline.errors import Rejected
from kb_pipeline.model import Json

SMALL = 4 << 20  # up to here a document is decoded in one piece
PIECE = 1 << 20
SAMPLE = 64 << 10
FEW = 9  # damaged bytes that do not speak against UTF-8, or a thousandth of the content

BOMS = (  # UTF-32 before UTF-16: its mark begins with the same bytes
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
CONTROLS = bytes(b for b in (*range(32), 127) if chr(b) not in "\t\n\r\f\x1b")  # what text does not hold
HIGH = bytes(range(128, 256))
# browsers read these labels as their supersets (WHATWG Encoding Standard, 4.2)
SUPERSETS = {
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
}
SINGLE_BYTE = ["cp1251", "koi8_r", "cp866", "iso8859_5", "cp1253", "iso8859_7", "cp1255", "cp1256", "tis_620", "cp1252"]

HANZI = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看"
    "定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相"
    "见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总"
    "这個們來為國說時會對於著過發後種經麼學現當沒動還進樣開從實軍無與長機關點業將兩間問並應戰頭體見產話內給門兒東聲員論處義幾認條氣題爾別變總電數報結務場計"
)  # the most frequent characters of Chinese, simplified and traditional: half of any running text
HANGUL = "이다는에을를의가은로한고기도지어서하사나리자시대으해그있인일것수들전보과와정만부아스"
KANA = "".join(map(chr, (*range(0x3041, 0x3097), *range(0x30A1, 0x30FD))))


@dataclass(frozen=True, slots=True)
class Text:
    """The decoded content: ``\\n`` line ends, no NUL, no lone surrogate. Reads ``raw`` again for every iteration."""

    raw: BinaryIO
    encoding: str
    replaced: int = 0  # damaged sequences that became U+FFFD
    removed: int = 0  # NUL characters
    whole: str | None = None  # only when small

    def meta(self) -> Json:
        counts = {"replaced_bytes": self.replaced, "removed_nul": self.removed}
        return {"encoding": self.encoding} | {name: n for name, n in counts.items() if n}

    def pieces(self) -> Iterator[str]:
        if self.whole is not None:
            yield self.whole
            return
        yield from (_clean(piece) for piece in _decoded(_read(self.raw), self.encoding))

    def lines(self) -> Iterable[str]:
        """Without their line ends, as ``str.split("\\n")`` would give them."""
        return self.whole.split("\n") if self.whole is not None else _lines(self.pieces())


@dataclass(frozen=True, slots=True)
class Survey:
    """What an encoding makes of all the bytes."""

    chars: int = 0
    wide: int = 0  # beyond ASCII and readable
    bad: int = 0
    controls: int = 0
    nuls: int = 0


def decode(data: bytes, name: str = "the content", hint: str | None = None) -> tuple[str, str]:
    """(text, encoding). ``hint`` is what the content declares itself. Raises Rejected (code ``binary``)."""
    text = open_text(io.BytesIO(data), name, hint)
    return "".join(text.pieces()), text.encoding


def open_text(raw: BinaryIO, name: str, hint: str | None = None) -> Text:
    """Finds the encoding; needs a seekable file, and reads it once or twice when it is large. Raises Rejected."""
    raw.seek(0)
    head = raw.read(SMALL + 1)
    small = len(head) <= SMALL
    if small and not head.startswith(tuple(bom for bom, _ in BOMS)) and len(head.translate(None, CONTROLS)) == len(head):
        try:
            return Text(raw, "utf-8", whole=_line_ends(head.decode("utf-8")))
        except UnicodeDecodeError:
            pass  # one of the others

    def survey(codec: str) -> Survey:
        return _survey(_decoded([head] if small else _read(raw), codec), codec)

    codec, seen = _detect(head, survey, lambda: _high_lines([head] if small else _read(raw)), hint)
    if _is_binary(seen, unicode=codec.startswith("utf")):
        raise Rejected(f"{name} is binary data, not text in any encoding: exclude it from the source", code="binary")
    whole = _clean("".join(_decoded([head], codec))) if small else None
    return Text(raw, codec, seen.bad, seen.nuls, whole)


def storable(text: str) -> str:
    """Without NUL and lone surrogates, which PostgreSQL refuses: for text made from escapes rather than from bytes."""
    return text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


# --- detection ------------------------------------------------------------------------------------------------------


def _detect(head: bytes, survey: Callable[[str], Survey], sample: Callable[[], bytes], hint: str | None) -> tuple[str, Survey]:
    marked = next((codec for bom, codec in BOMS if head.startswith(bom)), None) or _utf16_by_nul(head[:SAMPLE])
    if marked:
        return marked, survey(marked)
    utf8 = survey("utf-8")
    if not utf8.bad:
        return "utf-8", utf8
    if (declared := _codec(hint)) and not (seen := survey(declared)).bad and not _is_binary(seen, unicode=False):
        return declared, seen
    # a few bad bytes in ASCII say nothing (Latin-1 looks like that); among many good sequences they are damage
    if utf8.bad <= max(FEW, utf8.chars // 1000) and utf8.wide >= 4 * utf8.bad:
        return "utf-8", utf8
    for codec in _east_asian(sample(), head[:SAMPLE]):
        seen = survey(codec)
        if seen.bad * 50 <= seen.wide:
            return codec, seen
    codec = _single_byte(sample())
    return codec, survey(codec)


def _codec(label: str | None) -> str | None:
    try:
        name = codecs.lookup(label or "").name
    except LookupError:
        return None
    return None if name.startswith("utf") else SUPERSETS.get(name, name)  # UTF-8 was tried; a UTF-16 page has a mark


def _utf16_by_nul(sample: bytes) -> str | None:
    """ASCII characters in UTF-16 have their NUL on one side only."""
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if len(sample) % 2 or max(even, odd) * 20 < len(sample) or min(even, odd) * 20 > max(even, odd):
        return None
    return "utf-16-be" if even > odd else "utf-16-le"


def _east_asian(lines: bytes, head: bytes) -> list[str]:
    """Encodings under which the characters are usual ones, best first."""
    scores: dict[str, float] = {}
    for codec in ("gb18030", "big5hkscs", "cp932", "euc_jp", "cp949", "utf-16-le", "utf-16-be"):
        utf16 = codec.startswith("utf")
        text = codecs.getincrementaldecoder(codec)("replace").decode(head if utf16 else lines)
        count = Counter(text)
        bad = count.pop("\ufffd", 0)
        total = sum(n for c, n in count.items() if utf16 or c > "\x7f")
        if not total or bad * 50 > total:
            continue
        common, usual = _usual(codec)
        scores[codec] = sum(n * (1.0 if c in common else 0.5) for c, n in count.items() if c in common or c in usual) / total
    return sorted((c for c in scores if scores[c] >= 0.4), key=lambda c: -scores[c])


@lru_cache(maxsize=8)
def _usual(codec: str) -> tuple[frozenset[str], frozenset[str]]:
    """Very frequent characters, and the first level of the national standard: nearly all of a running text."""
    base, leads, common = {
        "big5hkscs": ("big5", range(0xA4, 0xC7), HANZI),
        "cp932": ("euc_jp", range(0xB0, 0xD0), KANA),
        "euc_jp": ("euc_jp", range(0xB0, 0xD0), KANA),
        "cp949": ("euc_kr", range(0xB0, 0xC9), HANGUL),
    }.get(codec, ("gb2312", range(0xB0, 0xD8), HANZI))
    trails = (*range(0x40, 0x7F), *range(0xA1, 0xFF)) if base == "big5" else range(0xA1, 0xFF)
    rows = b"".join(bytes((lead, trail)) for lead in (0xA1, 0xA3, *leads) for trail in trails)
    usual = set(rows.decode(base, "ignore"))
    if codec.startswith("utf"):
        usual |= set(map(chr, range(32, 127))) | {"\n", "\t", "\r"} | set(KANA)
    return frozenset(common), frozenset(usual)


def _single_byte(lines: bytes) -> str:
    ascii_letters = sum(1 for b in lines if chr(b).isalpha() and b < 128)
    high = len(lines) - len(lines.translate(None, HIGH))
    if high <= ascii_letters:  # a Latin script; others hardly hold ASCII letters. Detectors confuse these (cp1250, cp1254)
        return "cp1252"
    from charset_normalizer import from_bytes

    best = from_bytes(lines, cp_isolation=SINGLE_BYTE).best()
    return best.encoding if best is not None else "cp1252"


def _is_binary(seen: Survey, *, unicode: bool) -> bool:
    """A stray control character is damage; one in fifty is not text. Where bytes only guess at an encoding, one in 200."""
    if unicode:
        return seen.controls > 8 + seen.chars // 50 or seen.bad * 20 > seen.chars + 180
    return (seen.controls + seen.bad) * 200 > seen.chars


# --- reading --------------------------------------------------------------------------------------------------------


def _read(raw: BinaryIO) -> Iterator[bytes]:
    raw.seek(0)
    while piece := raw.read(PIECE):
        yield piece


def _decoded(pieces: Iterable[bytes], codec: str) -> Iterator[str]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(codec)("replace"), translate=True)
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def _line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _clean(text: str) -> str:
    return text.replace("\0", "") if "\0" in text else text


def _survey(pieces: Iterable[str], codec: str) -> Survey:
    chars = wide = bad = controls = nuls = 0
    for text in pieces:
        marks = text.count("\ufffd")
        chars += len(text)
        wide += len(text) - len(text.encode("ascii", "ignore")) - marks
        bad += marks
        nuls += text.count("\0")
        controls += sum(text.count(chr(b)) for b in CONTROLS)
    return Survey(chars, wide, bad, controls, nuls)


def _high_lines(pieces: Iterable[bytes]) -> bytes:
    """The first lines that are not ASCII. No East Asian multi-byte encoding uses the line feed as a second byte."""
    out, size, rest = [], 0, b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if not line.isascii():
                out.append(line[:SAMPLE])
                size += len(out[-1])
        if size >= SAMPLE:
            break
    return b"\n".join([*out, rest[:SAMPLE] if not rest.isascii() else b""])[:SAMPLE]


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    rest: list[str] = []
    for piece in pieces:
        first, *others = piece.split("\n")
        rest.append(first)
        if others:
            yield "".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    yield "".join(rest)
