"""The cache: whatever is done with it, the next logits are those of the same tokens in one pass without a cache."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from helpers import PATTERNS, RECURRENT_PATTERNS, assert_different, assert_same, tiny_model, tokens
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, QuantizedCache, StaticCache

from modeling_kda import STAGES, KDACache
from modeling_kda.cache_kda import adopt_cache
from modeling_kda.recurrent_cache import CountingRecurrentLayer, RecurrentLayer

every_pattern = pytest.mark.parametrize("stages", PATTERNS)
recurrent_patterns = pytest.mark.parametrize("stages", RECURRENT_PATTERNS)

CACHES = {
    "kda": KDACache,
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic without config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=160),
}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def one_shot(model, ids, **inputs):
    return model(ids, use_cache=False, **inputs).logits


def feed(model, cache, ids, cuts=()):
    """Logits of the ids, in several calls cut at `cuts`."""
    return torch.cat([model(part, cache=cache).logits for part in ids.tensor_split(list(cuts), dim=1)], 1)


def tensors_of(cache):
    """Every tensor that the recurrent layers hold."""
    return [
        held[0]
        for layer in cache.layers
        if isinstance(layer, RecurrentLayer)
        for held in (layer.conv_states, layer.recurrent_states)
        if held[0] is not None
    ]


# --- splitting a sequence into calls


@every_pattern
def test_any_split_equals_one_pass(stages):
    model, ids = tiny_model(stages), tokens(1, 150)
    full = one_shot(model, ids)
    for cuts in ([1], [149], [50, 100], [64, 128]):
        assert_same(feed(model, KDACache(model.config), ids, cuts), full)


@every_pattern
@pytest.mark.parametrize("kind", CACHES)
def test_any_cache_of_transformers_serves(stages, kind):
    model, ids = tiny_model(stages), tokens(1, 80)
    cache = CACHES[kind](model.config)
    assert_same(feed(model, cache, ids, [7, 8, 73]), one_shot(model, ids))
    assert int(cache.get_seq_length()) == 80


@every_pattern
@pytest.mark.parametrize("lengths", [(1, 2, 1, 3, 1, 1, 2, 5), (1,) * 16, (2, 14), (1, 15)])
def test_calls_shorter_than_the_convolution(stages, lengths):
    model, ids = tiny_model(stages), tokens(2, 16)
    cuts = torch.tensor(lengths).cumsum(0)[:-1].tolist()
    assert_same(feed(model, KDACache(model.config), ids, cuts), one_shot(model, ids))


@pytest.mark.parametrize("stage", ["softmax", "linear", "delta", "ssd", "gated_delta", "kda"])
def test_a_single_layer_is_enough(stage):
    model, ids = tiny_model([stage]), tokens(2, 9)
    cache = KDACache(model.config)
    assert_same(feed(model, cache, ids, [4, 5]), one_shot(model, ids))
    assert cache.get_seq_length() == 9


@every_pattern
def test_every_layer_sees_the_same_past(stages):
    """A counter that the first layer moves would be too far for the others."""
    model, ids = tiny_model(stages), tokens(1, 14)
    cache, seen = KDACache(model.config), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(cache.get_seq_length()))
    model(ids[:, :9], cache=cache)
    kinds = model.config.layer_types
    first_attention = kinds.index("full_attention") if "full_attention" in kinds else 0
    seen.clear()
    model(ids[:, 9:], cache=cache)
    assert seen[: first_attention + 1] == [9] * (first_attention + 1)
    assert cache.get_seq_length() == 14
    assert cache.get_mask_sizes(3, first_attention) == (17, 0)


def test_the_model_makes_a_cache_when_none_is_given():
    model, ids = tiny_model("softmax_inside"), tokens(1, 9)
    outputs = model(ids[:, :5])
    assert isinstance(outputs.cache, KDACache)
    assert_same(model(ids[:, 5:], cache=outputs.cache).logits, one_shot(model, ids)[:, 5:])
    assert model(ids, use_cache=False).cache is None


def test_layers_can_be_built_and_iterated():
    config = tiny_model("every_stage").config
    for layer in (RecurrentLayer, CountingRecurrentLayer):
        assert not inspect.isabstract(layer)
    for make in CACHES.values():
        cache = adopt_cache(make(config), config)
        recurrent = [STAGES[stage].mixer == "recurrent" for stage in config.stages]
        assert [isinstance(layer, RecurrentLayer) for layer in cache.layers] == recurrent
        assert adopt_cache(cache, config) is cache
    assert len(list(KDACache(config))) == len(KDACache(config)) == len(config.stages)


# --- taking tokens back


@every_pattern
@pytest.mark.parametrize("rejected", [0, 1, 3, 4])
def test_a_rejected_draft_leaves_no_trace(stages, rejected):
    model, ids = tiny_model(stages), tokens(1, 16)
    draft = torch.cat([ids[:, 10 : 14 - rejected], tokens(1, rejected, seed=7)], 1)
    cache = KDACache(model.config, max_rollback=8)
    feed(model, cache, torch.cat([ids[:, :10], draft], 1), [10])
    assert cache.is_croppable
    cache.crop(-rejected)
    assert cache.get_seq_length() == 14 - rejected
    assert_same(model(ids[:, 14 - rejected :], cache=cache).logits, one_shot(model, ids)[:, 14 - rejected :])


@every_pattern
@pytest.mark.parametrize("kind", CACHES)
def test_recording_can_be_switched_on_for_any_cache(stages, kind):
    model, ids = tiny_model(stages), tokens(1, 16)
    cache = adopt_cache(CACHES[kind](model.config), model.config)
    model(ids[:, :5], cache=cache)
    cache.activate_past_recording()
    model(torch.cat([ids[:, 5:9], tokens(1, 3, seed=7)], 1), cache=cache)
    cache.crop(-3)
    assert_same(model(ids[:, 9:], cache=cache).logits, one_shot(model, ids)[:, 9:])


@every_pattern
def test_the_whole_window_can_be_taken_back_at_any_time(stages):
    """Also right after a prompt that is longer than the window, and when tokens came one by one."""
    model, ids = tiny_model(stages), tokens(1, 20)
    full = one_shot(model, ids)
    for cuts in ([], [1], [9, 18], [2, 3, 4], range(3, 20)):
        cache = KDACache(model.config, max_rollback=4)
        feed(model, cache, ids, cuts)
        for count in (1, 4):
            cropped = copy.deepcopy(cache)
            cropped.crop(-count)
            assert cropped.get_seq_length() == 20 - count
            assert_same(model(ids[:, 20 - count :], cache=cropped).logits, full[:, 20 - count :])


@every_pattern
def test_crops_in_a_row_add_up(stages):
    model, ids = tiny_model(stages), tokens(1, 20)
    for crops in ([1, 1, 1, 1], [2, 5, 1], [3, 0, 2], [1, 7]):
        cache, left = KDACache(model.config, max_rollback=8), 20 - sum(crops)
        feed(model, cache, ids, [11, 12, 13])
        for count in crops:
            cache.crop(-count)
        assert_same(model(ids[:, left:], cache=cache).logits, one_shot(model, ids)[:, left:])


@every_pattern
def test_everything_can_be_taken_back(stages):
    model, ids = tiny_model(stages), tokens(1, 7)
    cache = KDACache(model.config, max_rollback=8)
    model(tokens(1, 6, seed=3), cache=cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 0
    assert_same(model(ids, cache=cache).logits, one_shot(model, ids))


@every_pattern
def test_crops_count_padding_and_restore_the_tokens_before_it(stages):
    model, ids = tiny_model(stages), tokens(2, 14)
    real = torch.ones(2, 14, dtype=torch.bool)
    real[0, [0, 1, 5, 9, 10]] = real[1, [3, 8, 9, 11]] = False
    full = one_shot(model, ids, attention_mask=real)
    for count in range(1, 9):
        left = 14 - count
        cache = KDACache(model.config, max_rollback=8)
        model(ids[:, :6], attention_mask=real[:, :6], cache=cache)
        # what is taken back had other padding
        other = torch.cat([real[:, :left], ~real[:, left:]], 1)
        model(torch.cat([ids[:, 6:left], tokens(2, 14 - max(left, 6), seed=5)], 1), attention_mask=other, cache=cache)
        cache.crop(-count)
        again = model(ids[:, left:], attention_mask=real, cache=cache).logits
        assert_same(again[real[:, left:]], full[:, left:][real[:, left:]])


@recurrent_patterns
def test_what_was_not_recorded_cannot_be_taken_back(stages):
    model, ids = tiny_model(stages), tokens(1, 20)
    cache = KDACache(model.config)
    model(ids[:, :10], cache=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="0 recorded tokens.*max_rollback"):
        cache.crop(-1)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="0 recorded tokens"):
        cache.crop(-1)
    model(ids[:, 10:12], cache=cache)
    with pytest.raises(ValueError, match="2 recorded tokens"):
        cache.crop(-3)
    # all layers are as they were
    assert cache.get_seq_length() == 12
    assert_same(model(ids[:, 12:], cache=cache).logits, one_shot(model, ids)[:, 12:])


@every_pattern
def test_crops_that_make_no_sense_are_refused(stages):
    model = tiny_model(stages)
    cache = KDACache(model.config, max_rollback=8)
    for count in (1, -1, -100):
        with pytest.raises(ValueError, match="crop takes"):
            cache.crop(count)
    cache.crop(0)
    model(tokens(1, 5), cache=cache)
    for count in (3, -6):
        with pytest.raises(ValueError, match="crop takes"):
            cache.crop(count)
    assert cache.get_seq_length() == 5
    with pytest.raises(ValueError, match="max_rollback"):
        KDACache(model.config, max_rollback=-1)


@recurrent_patterns
def test_records_end_where_recording_was_switched_off(stages):
    model, ids = tiny_model(stages), tokens(1, 20)
    cache = KDACache(model.config, max_rollback=8)
    model(ids[:, :5], cache=cache)
    for layer in cache.layers:
        layer.record_past = False
    model(ids[:, 5:8], cache=cache)
    with pytest.raises(ValueError, match="0 recorded tokens"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(torch.cat([ids[:, 8:10], tokens(1, 2, seed=7)], 1), cache=cache)
    cache.crop(-2)
    assert_same(model(ids[:, 10:], cache=cache).logits, one_shot(model, ids)[:, 10:])


@recurrent_patterns
def test_records_do_not_grow(stages):
    model = tiny_model(stages)
    cache = KDACache(model.config, max_rollback=8)
    model(tokens(1, 100), cache=cache)
    for step in range(20):
        model(tokens(1, 1, seed=step), cache=cache)
        for layer in cache.layers:
            if isinstance(layer, RecurrentLayer):
                assert 8 <= len(layer.written) <= 16
                assert layer.written.k.untyped_storage().nbytes() <= 16 * layer.written.k[:, 0].nbytes


@recurrent_patterns
def test_a_draft_longer_than_the_window_can_be_taken_back(stages):
    model, ids = tiny_model(stages), tokens(1, 20)
    cache = KDACache(model.config, max_rollback=2)
    model(ids[:, :10], cache=cache)
    model(tokens(1, 9, seed=7), cache=cache)
    cache.crop(-9)
    assert_same(model(ids[:, 10:], cache=cache).logits, one_shot(model, ids)[:, 10:])


# --- rows


@every_pattern
@pytest.mark.parametrize("kind", CACHES)
def test_reordered_rows_continue_as_their_prompts(stages, kind):
    model, ids, order = tiny_model(stages), tokens(3, 12), torch.tensor([2, 0, 0])
    cache = CACHES[kind](model.config)
    model(ids[:, :8], cache=cache)
    cache.reorder_cache(order)
    assert_same(model(ids[order, 8:], cache=cache).logits, one_shot(model, ids[order])[:, 8:])


@every_pattern
def test_rows_can_be_repeated_and_selected(stages):
    model, ids = tiny_model(stages), tokens(2, 12)
    cache = KDACache(model.config)
    model(ids[:, :6], cache=cache)
    cache.batch_repeat_interleave(3)
    repeated = ids.repeat_interleave(3, 0)
    assert_same(model(repeated[:, 6:9], cache=cache).logits, one_shot(model, repeated)[:, 6:9])
    chosen = torch.tensor([1, 4])
    cache.batch_select_indices(chosen)
    assert_same(model(repeated[chosen, 9:], cache=cache).logits, one_shot(model, repeated[chosen])[:, 9:])


@every_pattern
def test_rows_reordered_before_a_crop_take_their_records_along(stages):
    model, ids, order = tiny_model(stages), tokens(3, 16), torch.tensor([1, 1, 2])
    cache = KDACache(model.config, max_rollback=8)
    feed(model, cache, ids[:, :12], [5, 6])
    cache.reorder_cache(order)
    cache.crop(-4)
    assert_same(model(ids[order, 8:], cache=cache).logits, one_shot(model, ids[order])[:, 8:])
    cache.batch_select_indices(torch.tensor([2]))
    cache.crop(-3)
    assert_same(model(ids[2:, 13:], cache=cache).logits, one_shot(model, ids[2:])[:, 13:])


@every_pattern
def test_a_cache_of_another_batch_is_refused(stages):
    model = tiny_model(stages)
    for rows in (1, 3):
        cache = KDACache(model.config)
        model(tokens(2, 5), cache=cache)
        with pytest.raises(ValueError, match=f"holds 2 rows.*batch of {rows}"):
            model(tokens(rows, 4), cache=cache)


# --- copies and reuse


@every_pattern
@pytest.mark.parametrize("recording", [0, 8])
@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "torch.save"])
def test_a_prefix_can_be_continued_in_two_ways(stages, duplicate, recording):
    model, prefix = tiny_model(stages), tokens(1, 9)
    cache = KDACache(model.config, max_rollback=recording)
    model(prefix, cache=cache)
    if duplicate == "deepcopy":
        copied = copy.deepcopy(cache)
    elif duplicate == "pickle":
        copied = pickle.loads(pickle.dumps(cache))
    else:
        buffer = io.BytesIO()
        torch.save(cache, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    for branch, seed in ((cache, 1), (copied, 2)):
        suffix = tokens(1, 5, seed=seed)
        expected = one_shot(model, torch.cat([prefix, suffix], 1))[:, 9:]
        assert_same(feed(model, branch, suffix, [1, 3]), expected)
        if recording:
            branch.crop(-4)
            assert_same(model(suffix[:, 1:], cache=branch).logits, expected[:, 1:])


@every_pattern
@pytest.mark.parametrize("kind", CACHES)
def test_a_reset_cache_is_a_fresh_one(stages, kind):
    # static layers keep the batch they were made for
    rows = 1 if kind == "static" else 2
    model, ids = tiny_model(stages), tokens(rows, 7, seed=4)
    cache, fresh = (CACHES[kind](model.config) for _ in range(2))
    model(tokens(1, 20), cache=cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    if stages in RECURRENT_PATTERNS:
        assert not cache.has_previous_state()
    assert torch.equal(feed(model, cache, ids, [5]), feed(model, fresh, ids, [5]))
    assert int(cache.get_seq_length()) == 7


@recurrent_patterns
def test_a_reset_cache_has_no_records(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    cache = KDACache(model.config, max_rollback=8)
    model(tokens(1, 6, seed=2), cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match="crop takes"):
        cache.crop(-1)
    feed(model, cache, torch.cat([ids[:, :5], tokens(1, 2, seed=3)], 1), [3])
    cache.crop(-2)
    assert_same(model(ids[:, 5:], cache=cache).logits, one_shot(model, ids)[:, 5:])


@every_pattern
def test_what_was_filled_in_inference_mode_can_change_outside(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    full = one_shot(model, ids)
    with torch.inference_mode():
        cache = KDACache(model.config, max_rollback=8)
        feed(model, cache, ids[:, :7], [3])
    cache.crop(-2)
    assert_same(model(ids[:, 5:], cache=cache).logits, full[:, 5:])
    with torch.inference_mode():
        cache.crop(-1)
        model(ids[:, 8:], cache=cache)
    cache.reset()
    assert_same(feed(model, cache, ids, [4]), full)


@recurrent_patterns
def test_offloaded_tensors_come_back(stages):
    model, ids = tiny_model(stages), tokens(1, 16)
    cache = KDACache(model.config, max_rollback=8)
    model(ids[:, :9], cache=cache)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    model(ids[:, 9:12], cache=cache)
    cache.crop(-2)
    assert_same(model(ids[:, 10:], cache=cache).logits, one_shot(model, ids)[:, 10:])


@recurrent_patterns
def test_decoding_writes_into_the_same_memory(stages):
    """A captured graph replays addresses."""
    model = tiny_model(stages)
    cache = KDACache(model.config)
    model(tokens(2, 5), cache=cache)
    addresses = [tensor.data_ptr() for tensor in tensors_of(cache)]
    for step in range(3):
        model(tokens(2, 1, seed=step), cache=cache)
    assert [tensor.data_ptr() for tensor in tensors_of(cache)] == addresses


def test_the_size_of_a_recurrent_cache_does_not_depend_on_the_length():
    model = tiny_model("kda")
    sizes = []
    for length in (64, 128):
        cache = KDACache(model.config)
        model(tokens(1, length), cache=cache)
        sizes.append(sum(tensor.nbytes for tensor in tensors_of(cache)))
    # 2 layers of 2 heads with a 16 x 16 state, and 3 inputs of q, k and v of 32 channels, in fp32
    assert sizes == [4 * 2 * (2 * 16 * 16 + 3 * 3 * 32)] * 2


# --- what is refused


@pytest.mark.parametrize(
    "other",
    [
        lambda config: DynamicCache(config=GPT2Config(n_layer=config.num_hidden_layers)),
        lambda config: KDACache(tiny_model(["softmax", "kda", "kda", "kda"]).config),
        lambda config: KDACache(tiny_model(["ssd", "softmax", "kda", "kda"]).config),
    ],
    ids=["keys and values", "another order", "another stage"],
)
def test_a_cache_of_another_model_is_refused(other):
    model = tiny_model("softmax_inside")
    with pytest.raises(ValueError, match="made for another model"):
        model(tokens(1, 4), cache=other(model.config))
    assert other(model.config).get_seq_length() == 0


@recurrent_patterns
@pytest.mark.parametrize("fields", [{"hidden_size": 64}, {"value_head_dim": 24}, {"short_conv_kernel_size": 2}])
def test_a_cache_filled_by_another_model_is_refused(stages, fields):
    model = tiny_model(stages)
    cache = KDACache(model.config)
    model(tokens(1, 5), cache=cache)
    with pytest.raises(ValueError, match="cache"):
        tiny_model(stages, **fields)(tokens(1, 4), cache=cache)


def test_what_is_no_cache_of_these_layers_is_refused():
    model = tiny_model("softmax_inside")
    config = model.config
    few = KDACache(tiny_model("kda").config)
    encoder_decoder = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for cache, words in ((few, "one layer per layer"), (((None, None),) * 4, "tuple"), (encoder_decoder, "Encoder")):
        with pytest.raises(ValueError, match=words):
            model(tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="[Ll]inear|full attention"):
        QuantizedCache(backend="quanto", config=config)


@pytest.mark.parametrize("stages", ["softmax", "softmax_inside"])
def test_a_full_static_cache_is_refused(stages):
    model = tiny_model(stages)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="room for 8 tokens, got 0 and 9"):
        model(tokens(1, 9), cache=cache)
    model(tokens(1, 8), cache=cache)
    with pytest.raises(ValueError, match="room for 8 tokens, got 8 and 1"):
        model(tokens(1, 1), cache=cache)


# --- autograd


@recurrent_patterns
@torch.enable_grad()
def test_the_cache_is_not_overwritten_where_autograd_needs_it(stages):
    """With only the queries trained, as an adapter may do, the state itself has no gradient but is kept for theirs."""
    model, ids = tiny_model(stages), tokens(1, 12)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    cache, loss = KDACache(model.config), 0.0
    for part in ids.split(4, 1):
        loss = loss + model(part, cache=cache).logits.square().sum()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad)


# --- everything at once


class Replay:
    """A cache and, row by row, every token and mask that it should remember."""

    def __init__(self, model, seed, window=8):
        self.model, self.window = model, window
        self.random = torch.Generator().manual_seed(seed)
        self.cache = KDACache(model.config, max_rollback=window)
        self.ids, self.real = tokens(2, 0), torch.ones(2, 0, dtype=torch.bool)

    def number(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.random))

    def feed(self):
        rows, count = len(self.ids), self.number(1, 12)
        new = torch.randint(2, 97, (rows, count), generator=self.random)
        real = torch.rand(rows, count, generator=self.random) < 0.7
        self.ids, self.real = torch.cat([self.ids, new], 1), torch.cat([self.real, real], 1)
        logits = self.model(new, attention_mask=self.real, cache=self.cache).logits
        expected = one_shot(self.model, self.ids, attention_mask=self.real)[:, -count:]
        if real.any():
            assert_same(logits[real], expected[real])

    def crop(self):
        recorded = [len(layer.written or ()) for layer in self.cache.layers if isinstance(layer, RecurrentLayer)]
        count = self.number(0, min([self.ids.shape[1], *recorded]))
        self.cache.crop(-count)
        left = self.ids.shape[1] - count
        self.ids, self.real = self.ids[:, :left], self.real[:, :left]

    def choose(self, order):
        self.ids, self.real = self.ids[order], self.real[order]

    def reorder(self):
        order = torch.randint(len(self.ids), (len(self.ids),), generator=self.random)
        self.cache.reorder_cache(order)
        self.choose(order)

    def repeat(self):
        if len(self.ids) < 3:
            self.cache.batch_repeat_interleave(2)
            self.choose(torch.arange(len(self.ids)).repeat_interleave(2))

    def select(self):
        order = torch.randint(len(self.ids), (2,), generator=self.random)
        self.cache.batch_select_indices(order)
        self.choose(order)

    def duplicate(self):
        self.cache = copy.deepcopy(self.cache)

    def reset(self):
        self.cache.reset()
        self.ids, self.real = self.ids[:, :0], self.real[:, :0]


@every_pattern
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_operations(stages, seed):
    replay = Replay(tiny_model(stages, seed=seed), seed)
    operations = [replay.feed] * 5 + [replay.crop] * 4
    operations += [replay.reorder, replay.repeat, replay.select, replay.duplicate]
    for _ in range(24):
        operations[replay.number(0, len(operations) - 1)]()
        assert replay.cache.get_seq_length() == replay.ids.shape[1]
        if replay.ids.shape[1] > 120:
            replay.reset()
    replay.feed()


def test_the_tests_above_would_see_a_lost_state():
    model, ids = tiny_model("softmax_inside"), tokens(1, 12)
    cache = KDACache(model.config)
    model(ids[:, :8], cache=cache)
    cache.layers[0].recurrent_states[0].zero_()
    assert_different(model(ids[:, 8:], cache=cache).logits, one_shot(model, ids)[:, 8:])
