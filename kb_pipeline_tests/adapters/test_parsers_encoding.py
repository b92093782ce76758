import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb_pipeline.errors import Rejected
from kb_pipeline.parsers import encoding
from kb_pipeline.parsers.encoding import decode, open_text, storable

ZH = "数据库集群部署完成后，您可以使用以下命令检查服务状态。如果节点离线，请先确认网络连接是否正常。\n"
TW = "資料庫叢集部署完成後，您可以使用以下命令檢查服務狀態。如果節點離線，請先確認網路連線是否正常。\n"
JA = "データベースのクラスタを配置した後、次のコマンドでサービスの状態を確認できます。\n"
KO = "데이터베이스 클러스터를 배포한 후 다음 명령으로 서비스 상태를 확인할 수 있습니다.\n"
RU = "После развертывания кластера вы можете проверить состояние службы с помощью следующей команды.\n"
DE = "Größe und Übung: für die Prüfung müssen Sie die Straße überqueren, süße Äpfel.\n"
PT = "A AÇÃO NÃO É PERMITIDA. A situação da nação não é tão fácil.\n"
EN = "The quick brown fox jumps over the lazy dog. configuration value = 42\n"
CSV = "id,城市,备注\n1,北京,正常\n2,上海,缺货\n"


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("utf-8", ZH),
        ("utf-8-sig", ZH),
        ("utf-16", ZH),
        ("utf-32", ZH),
        ("utf-16-le", ZH),
        ("utf-16-be", ZH),
        ("utf-16-le", EN),
        ("utf-16-be", EN),
        ("utf-16-le", CSV),
        ("gb18030", ZH),
        ("gb18030", EN * 40 + ZH + EN * 40),
        ("gb18030", CSV),
        ("gb18030", "第一章 总则\n"),
        ("gb18030", TW * 3),
        ("big5", TW),
        ("big5", EN * 40 + TW),
        ("shift_jis", JA),
        ("euc_jp", JA * 3),
        ("euc_kr", KO),
        ("cp1251", RU * 3),
        ("latin-1", DE),
        ("latin-1", PT),
        ("latin-1", EN * 40 + "café\n"),
        ("cp1252", "“oui” – L'élève préféré a été reçu à l'école; ça coûte très cher…\n"),
    ],
)
def test_text_is_read_in_its_own_encoding(codec: str, text: str) -> None:
    assert decode(text.encode(codec))[0] == text


@pytest.mark.parametrize("size", [200, 1000, 20000])
def test_random_bytes_are_binary(size: int) -> None:
    with pytest.raises(Rejected) as caught:
        decode(random.Random(size).randbytes(size), "noise.md")
    assert caught.value.code == "binary"
    assert "noise.md" in caught.value.message


def test_a_few_damaged_bytes_are_replaced_and_counted() -> None:
    text = open_text(io.BytesIO(ZH.encode() + b"\xff\xfe" + ZH.encode()), "a.txt")
    assert text.whole == ZH + "\ufffd\ufffd" + ZH
    assert text.meta() == {"encoding": "utf-8", "replaced_bytes": 2}


def test_nul_characters_are_removed_and_counted() -> None:
    text = open_text(io.BytesIO(b"one\0 two\0\n"), "a.txt")
    assert text.whole == "one two\n"
    assert text.meta()["removed_nul"] == 2


def test_many_nul_characters_are_binary() -> None:
    with pytest.raises(Rejected):
        decode(b"\0\0\0\0abcdefgh" * 100)


def test_lone_surrogates_do_not_get_through() -> None:
    utf16 = "\ufeffa".encode("utf-16-le") + b"\x00\xd8" + ("b" * 200).encode("utf-16-le")
    decode(utf16)[0].encode("utf-8")
    assert storable("a\ud800b\0c") == "a\ufffd\ufffd\ufffdbc"
    cesu = b"ok " * 100 + "é".encode() * 20 + b"\xed\xa0\x80"
    decode(cesu)[0].encode("utf-8")


def test_a_declared_encoding_does_not_overrule_utf8() -> None:
    assert decode(ZH.encode(), hint="gb2312") == (ZH, "utf-8")
    assert decode("é".encode("cp1252"), hint="iso-8859-1") == ("é", "cp1252")
    assert decode(ZH.encode("gb18030"), hint="no-such-encoding") == (ZH, "gb18030")


def test_line_ends_become_line_feeds() -> None:
    assert decode(b"a\r\nb\rc\n") == ("a\nb\nc\n", "utf-8")


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "gb18030", "big5"])
def test_large_content_reads_as_small_content_does(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ((TW if codec == "big5" else ZH) * 40 + "tail\r\n\r\nend\r").encode(codec)
    small = open_text(io.BytesIO(data), "a")
    monkeypatch.setattr(encoding, "SMALL", 100)
    monkeypatch.setattr(encoding, "PIECE", 7)
    large = open_text(io.BytesIO(data), "a")
    assert small.whole is not None and large.whole is None
    assert "".join(large.pieces()) == small.whole
    assert list(large.lines()) == list(small.lines()) == list(large.lines())
    assert large.meta() == small.meta()


@given(st.text(), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_marked_or_utf8_text_survives(text: str, codec: str) -> None:
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        text = "".join(c for c in text if ord(c) >= 32 and ord(c) != 127)
    text = text.lstrip("\ufeff").replace("\ufffd", "")
    assert decode(text.encode(codec))[0] == text


@given(st.binary(max_size=400))
def test_any_bytes_are_text_or_rejected(data: bytes) -> None:
    try:
        text, _ = decode(data)
    except Rejected as e:
        assert e.code == "binary"
    else:
        text.encode("utf-8")
        assert "\0" not in text
