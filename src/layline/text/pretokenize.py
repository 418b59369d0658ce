"""How byte-level vocabularies in GGUF files cut a text into words before merging.

A GGUF file holds only a name for the rules (``tokenizer.ggml.pre``). A wrong guess gives plausible
but different ids, so a name that is not in ``RULES`` is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, kw_only=True)
class WordRules:
    """Patterns applied one after the other, each to the pieces that the one before left.

    ``composes``: the text is brought to Unicode form C first. ``whole_words_first``: a word that is
    a token is that token, whatever the merges would make of it. ``adds_bos``: a BOS goes before a
    text unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole_words_first: bool = False
    adds_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_A = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED_B = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SYMBOLS_SLASH_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED_A}|{_CASED_B}|\p{{N}}|{_SYMBOLS_SLASH_SPACE}"

_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_by_gpt2 = WordRules(patterns=(_GPT2,))
_by_digit = WordRules(patterns=(r"\p{N}", _GPT2))
_by_llama3 = WordRules(patterns=(_LLAMA3,), whole_words_first=True, adds_bos=True)
_like_llama3 = WordRules(patterns=(_LLAMA3,))
_by_qwen2 = WordRules(patterns=(_QWEN2,), composes=True)

RULES: Mapping[str, WordRules] = MappingProxyType(
    {
        "default": WordRules(
            patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
        ),
        "gpt-2": _by_gpt2,
        "olmo": _by_gpt2,
        "smollm": _by_digit,
        "starcoder": _by_digit,
        "refact": _by_digit,
        "llama-bpe": _by_llama3,
        "llama3": _by_llama3,
        "llama-v3": _by_llama3,
        "falcon3": _by_llama3,
        "dbrx": _like_llama3,
        "smaug-bpe": _like_llama3,
        "qwen2": _by_qwen2,
        # The distilled models kept the words of Qwen2 without its normalisation.
        "deepseek-r1-qwen": WordRules(patterns=(_QWEN2,)),
        "tekken": WordRules(patterns=(_TEKKEN,), whole_words_first=True, adds_bos=True),
        "deepseek-coder": WordRules(
            patterns=(
                r"[\r\n]",
                r"\s?\p{L}+",
                r"\s?\p{P}+",
                "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
                r"\p{N}",
            )
        ),
        "deepseek-v3": WordRules(
            patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)
        ),
    }
)


def pre_tokenizer(rules: WordRules) -> pre_tokenizers.PreTokenizer:
    """The ``tokenizers`` form of ``rules``, ending in the byte alphabet."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.patterns
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])
