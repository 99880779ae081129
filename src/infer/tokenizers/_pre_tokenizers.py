"""The pre-tokenizer kinds that a GGUF names in `tokenizer.ggml.pre`: how text is cut before byte-level BPE merges it.

Plain data, read when a tokenizer is built. Patterns are those of the models' own tokenizer.json, in application order.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
PUNCTUATION = r"[\p{P}$+<=>^`|~]+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
CL100K = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{SYMBOLS}|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{SYMBOLS}|{SPACES}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"
)
SEED_CODER = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-"
    "\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-"
    "\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-"
    "\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
DEEPSEEK_LLM_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns applied in turn; matches and what lies between them both become pieces."""

    patterns: tuple[str, ...]
    nfc: bool = False
    """Text is normalised to NFC first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is that token, whatever the merges say."""
    add_bos: bool = False
    """BOS is added when the file does not say."""


def known_pre_tokenizers() -> dict[str, PreTokenizer]:
    """Every supported kind by its name in the file."""
    gpt2 = PreTokenizer((GPT2,))
    gpt2_nfc = PreTokenizer((GPT2,), nfc=True)
    digits = PreTokenizer((DIGIT, GPT2))
    llama3 = PreTokenizer((CL100K,), ignore_merges=True, add_bos=True)
    cl100k = PreTokenizer((CL100K,))
    qwen2 = PreTokenizer((QWEN2,), nfc=True)
    qwen2_plain = PreTokenizer((QWEN2,))
    deepseek_v3 = PreTokenizer((r"\p{N}{1,3}", CJK_KANA, DEEPSEEK_V3))
    o200k = PreTokenizer((O200K,))
    bloom = PreTokenizer((BLOOM,))
    bailing = PreTokenizer((BAILING,))
    return {
        "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        **dict.fromkeys(("gpt-2", "phi-2", "jais", "exaone4", "granite-docling", "trillion"), gpt2),
        **dict.fromkeys(("mpt", "olmo"), gpt2_nfc),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), digits),
        "command-r": PreTokenizer((DIGIT, GPT2), nfc=True),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), llama3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), cl100k),
        **dict.fromkeys(("glm4", "glm5"), PreTokenizer((CL100K,), ignore_merges=True)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), qwen2),
        **dict.fromkeys(("hunyuan", "grok-2", "solar-open"), qwen2_plain),
        "qwen35": PreTokenizer((QWEN35,), nfc=True),
        "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), o200k),
        "falcon": PreTokenizer((PUNCTUATION, GPT2, "[0-9][0-9][0-9]")),
        "deepseek-llm": PreTokenizer(
            (r"[\r\n]", DEEPSEEK_LLM_LETTERS, DEEPSEEK_LLM_PUNCTUATION, r"\s+$", CJK_HANGUL, DIGIT)
        ),
        "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_HANGUL, DIGIT)),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), deepseek_v3),
        "seed-coder": PreTokenizer((SEED_CODER,)),
        **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), bailing),
        **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), bloom),
        "viking": PreTokenizer((BLOOM, DIGIT)),
    }
