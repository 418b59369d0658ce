"""Which degrees fit a model, said before any weight is read, and what each rank then holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layline.errors import UsageError
from layline.models.config import DecoderConfig
from layline.models.parallel import Shards, check_degrees
from layline.models.registry import family_of
from layline.topology import Topology

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def model(**changes: Any) -> DecoderConfig:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, **SMOLLM2, **changes}
    return family_of(config).parse(config)


def refused(config: DecoderConfig, **degrees: int) -> str:
    with pytest.raises(UsageError) as caught:
        check_degrees(config, Topology(**degrees))
    with pytest.raises(UsageError):
        Shards(config, Topology(**degrees))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_tp_2_of_smollm2_names_1_3_and_9() -> None:
    text = refused(model(), tp=2)
    assert "tp 2 (attention TP 2)" in text
    assert "9 heads and 3 KV heads" in text
    listed = re.search(r"expected attention TP ([\d, or]+?) \(", text)
    assert listed is not None
    assert re.findall(r"\d+", listed[1]) == ["1", "3", "9"]
    assert "(9 with --dense-tp 1)" in text
    assert text.endswith("or --attn-dp 2")
    check_degrees(model(), Topology(tp=2, attn_dp=2))


@pytest.mark.parametrize("heads", [(12, 4), (12, 12), (12, 1), (8, 2), (9, 3), (30, 6)])
def test_accepted_degrees_are_exactly_those_of_the_rule(heads: tuple[int, int]) -> None:
    """Attention TP divides the heads, and divides or is divided by the KV heads."""
    config = model(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=64,
        intermediate_size=64 * 27 * 25,
    )
    wanted = [
        tp
        for tp in range(1, heads[0] + 1)
        if heads[0] % tp == 0 and (heads[1] % tp == 0 or tp % heads[1] == 0)
    ]
    for tp in range(1, 33):
        if tp in wanted:
            check_degrees(config, Topology(tp=tp, dense_tp=1))
            continue
        text = refused(config, tp=tp, dense_tp=1)
        listed = text.split("expected attention TP ")[1].split(", or --")[0]
        assert [int(number) for number in re.findall(r"\d+", listed)] == wanted


def test_every_listed_degree_is_accepted_and_the_hint_works() -> None:
    config = model(num_attention_heads=12, num_key_value_heads=4, head_dim=64)
    text = refused(config, tp=24)  # 12 heads: attention TP 24 is too many
    degrees = re.search(r"attention TP ([\d, ]+ or \d+)", text)
    assert degrees is not None
    assert re.findall(r"\d+", degrees[1]) == ["1", "2", "4", "12"]
    for degree in (1, 2, 4, 12):
        check_degrees(config, Topology(tp=degree))
    assert text.endswith("or --attn-dp 2")
    check_degrees(config, Topology(tp=24, attn_dp=2))


def test_an_intermediate_size_that_does_not_divide() -> None:
    text = refused(model(), tp=9)
    assert text == (
        "tp 9 does not divide the intermediate size 1536; expected tp 1 or 3, or --dense-tp 1"
    )
    check_degrees(model(), Topology(tp=9, dense_tp=1))
    # With attention DP 5 no tp divides 1536, so there is only one way out, and no false hint.
    assert refused(model(), tp=5, attn_dp=5).endswith("1536; expected --dense-tp 1")
    assert "--attn-dp" not in refused(model(), tp=5)
    check_degrees(model(), Topology(tp=5, attn_dp=5, dense_tp=1))


def test_experts_that_are_not_there() -> None:
    assert "ep 2 needs experts" in refused(model(), tp=2, attn_dp=2, ep=2)


@pytest.mark.parametrize("vocab_size", [1, 5, 7, 49152])
def test_no_vocabulary_is_refused(vocab_size: int) -> None:
    config = model(vocab_size=vocab_size)
    held = [Shards(config, Topology(tp=9, dense_tp=1, rank=rank)) for rank in range(9)]
    ids = [token for shard in held for token in range(*shard.vocabulary)]
    assert ids == list(range(vocab_size))
    assert {shard.vocab_rows for shard in held} == {-(-vocab_size // 9)}


@given(
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
    group=st.sampled_from([1, 2, 3, 4, 8]),
    attn_tp=st.integers(1, 24),
    outer=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]),
)
def test_each_rank_has_the_heads_that_its_queries_use(
    kv_heads: int, group: int, attn_tp: int, outer: tuple[int, int]
) -> None:
    heads = kv_heads * group
    tp = outer[0] * outer[1] * attn_tp
    config = model(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=32 * tp,
    )
    fits = heads % attn_tp == 0 and (kv_heads % attn_tp == 0 or attn_tp % kv_heads == 0)
    mesh = Topology(tp=tp, attn_dp=outer[0], attn_cp=outer[1])
    if not fits:
        refused(config, tp=tp, attn_dp=outer[0], attn_cp=outer[1])
        return
    ranks = [Shards(config, mesh.at(rank)) for rank in range(tp)]
    for shard in ranks:
        first, stop = shard.heads
        used = {head // group for head in range(first, stop)}
        assert used == set(range(*shard.kv_heads))
        assert len(used) == shard.num_kv_heads
        # Attention pairs local heads by order: each KV head must serve equally many of them.
        local = shard.num_heads // shard.num_kv_heads
        for head in range(first, stop):
            assert head // group == shard.kv_heads[0] + (head - first) // local
        assert shard.q_span == (first * 8, stop * 8)
        assert (shard.q_size, shard.kv_size) == (shard.num_heads * 8, shard.num_kv_heads * 8)
        assert shard.kv_span == (shard.kv_heads[0] * 8, shard.kv_heads[1] * 8)
    one_attention = ranks[:attn_tp]
    assert [h for shard in one_attention for h in range(*shard.heads)] == list(range(heads))
    assert [ranks[r].heads for r in range(tp)] == [
        one_attention[r % attn_tp].heads for r in range(tp)
    ]
    features = [f for shard in ranks for f in range(*shard.intermediate)]
    assert features == list(range(32 * tp))
    whole = Shards(config, Topology(tp=tp, attn_dp=outer[0], attn_cp=outer[1], dense_tp=1))
    assert whole.intermediate == (0, 32 * tp)
