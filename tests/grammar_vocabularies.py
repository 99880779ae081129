"""Vocabularies for grammar tests: bytes alone, and a byte-level BPE with tokens that cross every boundary of JSON.
Used by the property, conformance and campaign tests; pure."""

from __future__ import annotations

from infer.plugins.grammar import Vocabulary

PIECES = [
    *('{"', '"}', '":', '": "', '","', '", "', '":{"', "}}", "[[", "]]", "[]", "{}", '""', '":[', '],"', '"],'),
    *("true", "false", "null", "tru", "e,", "12", "00", "0.", ".5", "-1", "1e", "e+", "10,", "1]", "2}", "3,\n"),
    *(" ", "  ", "    ", "\n", "\n\n", "\n  ", ",\n  ", " :", ": ", "\t", "\r\n", '\\"', "\\n", "\\u00", "\\\\"),
    *(
        "ab",
        "abc",
        "na",
        "name",
        '"name"',
        "age",
        '"age"',
        "id",
        "the",
        " the",
        "<f",
        "<fn",
        "<fn=",
        "</",
        "</fn>",
        ">x",
    ),
    *("é", "ü", "日", "日本", "😀", "aé", "x😀", "\u200b", "(", ")", "((", "))", "+", "*", "x+", "a*", "==", "!="),
]


def wide_vocabulary() -> Vocabulary:
    """Every byte, the pieces above, broken UTF-8, ids without a token, two special tokens and two ends of sequence."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [piece.encode() for piece in PIECES]
    tokens += ["é".encode()[:1] + b"x", b'"' + "日".encode()[:2], "😀".encode()[1:] + b'"', b"\xff\xfe"]
    first_special = len(tokens)
    tokens += [b"<s>", b"</s>", b"<|end|>", b"<tool>", b"", b""]
    return Vocabulary(
        tokens=tokens,
        special_ids=frozenset(range(first_special, first_special + 4)),
        eos_token_ids=(first_special + 1, first_special + 2),
        encode=lambda text: list(text.encode()),
    )
