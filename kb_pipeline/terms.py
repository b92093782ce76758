"""Text to terms, for a keyword index of our own: Chinese and English alike, and product terms such as ``KB-2041``.

A word is a term as a whole and in its parts (``KB-2041``: kb-2041, kb, 2041). What is written without spaces becomes
overlapping pairs of characters; documents have the single characters too, so that a question of one character finds. Nothing
is stemmed.
Stored terms are made by this module: a change of it needs indexes to be built anew.
"""

import math
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

ASKED = 256  # terms of a question, the first ones
TITLE_WEIGHT = 2  # what an occurrence in the title counts

# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana, Han, Hangul.
_DENSE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_LETTERS = f"[^\\W_{_DENSE}]+"
_TERM = re.compile(rf"([{_DENSE}]+)|{_LETTERS}(?:[-._]+{_LETTERS})*(?:\+\+|\#)?")
_PART = re.compile(r"[^\W\d_]+|\d+")


def document_keys(text: str, title: str, salt: int) -> list[int]:
    """A key for each occurrence of a term; how many there are is the length of the document."""
    once, again = _document_terms(text), _document_terms(title)
    return [_key(t, salt) for t in (*once, *again * TITLE_WEIGHT)]


def question_keys(question: str, salt: int) -> list[int]:
    """Each term once, in the order of the question."""
    return list(dict.fromkeys(_key(t, salt) for t in islice(dict.fromkeys(_terms(question, _pairs)), ASKED)))


def _document_terms(text: str) -> list[str]:
    singles: set[str] = set()

    def dense(run: str) -> list[str]:
        singles.update(run)
        return [] if len(run) == 1 else _pairs(run)

    return [*_terms(text, dense), *singles]


def _terms(text: str, dense: Callable[[str], list[str]]) -> Iterator[str]:
    for match in _TERM.finditer(unicodedata.normalize("NFKC", text).casefold()):
        if match[1]:
            yield from dense(match[1])
            continue
        yield match[0]
        parts = _PART.findall(match[0])
        if parts != [match[0]]:
            yield from parts


def _pairs(run: str) -> list[str]:
    return [run] if len(run) == 1 else list(map(str.__add__, run, run[1:]))


def _key(term: str, salt: int) -> int:
    """32 bits, signed. Among a million terms of an index one in 4,300 shares its key with another."""
    return zlib.crc32(term.encode("utf-8", "surrogatepass"), salt) - 2**31


# --- ranking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frequency:
    """In how many documents a key is: counted up to a limit, and in a sample."""

    key: int
    counted: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Question:
    """Keys with their weights, the rarest first, and whose documents are looked at."""

    keys: list[int]
    weights: list[float]
    rare: list[int]  # every document with one of them
    frequent: list[tuple[int, int]]  # some with both; a pair of equals is one key


def weighed(found: Sequence[Frequency], total: float, sample: int, most: int) -> Question:
    """BM25's inverse document frequency, and where to look: every document with a rare term, as many rare terms as have
    ``most`` documents together; then up to ``most`` with both of the next two terms, and up to ``most`` with the next.

    ``total``: documents, of which ``sample`` were looked at.
    """
    number = {f.key: f.counted if f.counted <= most else max(f.counted, total * f.sampled / sample) for f in found if f.counted}
    keys = sorted(number, key=lambda k: (number[k], k))
    weights = [math.log(1 + (max(total - number[k], 0) + 0.5) / (number[k] + 0.5)) for k in keys]
    together = accumulate(number[k] for k in keys)
    rare = len(keys) if total <= most else sum(1 for n in together if n <= most)
    next_two = keys[rare : rare + 2]
    frequent = [(next_two[0], k) for k in reversed(next_two)]
    return Question(keys, weights, keys[:rare], frequent)
