"""The formula for the size of a cache against real caches, and what the speed of decoding is."""

import pytest
import torch
from conversion_helpers import tiny_student, tiny_teacher

from modeling_kda import STAGES
from modeling_kda.conversion.cost import cache_bytes, decode_speed, measured_cache_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stages", [*STAGES, ["kda", "softmax"]])
def test_cache_bytes_are_those_of_a_real_cache(stages, dtype):
    model = tiny_student(stages, num_value_heads=4, value_head_dim=8, short_conv_kernel_size=3).to(dtype)
    for tokens in (1, 5, 40):
        measured = measured_cache_bytes(model, torch.ones(2, tokens, dtype=torch.int64))
        assert measured == cache_bytes(model.config, tokens, batch=2, dtype=dtype), tokens


@pytest.mark.parametrize(
    "options", [{"short_conv_kernel_size": 0}, {"short_conv_kernel_size": 1}, {"feature_map": "hedgehog"}]
)
def test_cache_bytes_follow_the_options_of_a_layer(options):
    model = tiny_student("linear", **options)
    measured = measured_cache_bytes(model, torch.ones(1, 7, dtype=torch.int64))
    assert measured == cache_bytes(model.config, 7)


def test_cache_bytes_of_a_gpt2():
    teacher = tiny_teacher()
    assert measured_cache_bytes(teacher, torch.ones(3, 9, dtype=torch.int64)) == cache_bytes(
        teacher.config, 9, batch=3
    )


def test_only_kept_attention_makes_a_cache_grow():
    kda, hybrid = tiny_student("kda").config, tiny_student(["kda", "softmax"]).config
    assert cache_bytes(kda, 10) == cache_bytes(kda, 1_000_000)
    assert cache_bytes(hybrid, 1_000_010) - cache_bytes(hybrid, 10) == 1_000_000 * 2 * 32 * 4


def test_decode_speed_reports_what_it_was_asked():
    row = decode_speed(tiny_student(), 10, steps=3, batch=2)
    assert (row["context"], row["batch"]) == (10, 2)
    assert row["tokens_per_second"] == pytest.approx(2 / (row["ms_per_step"] / 1000))


def test_decoding_past_the_last_position_is_refused():
    with pytest.raises(ValueError, match="needs 72 positions, the model has 64"):
        decode_speed(tiny_student(), 40)
