"""Every way to generate gives the tokens, and at each step the logits, of the model without a cache."""

import copy
import threading
import time

import pytest
import torch
from helpers import PATTERNS, assert_different, assert_same, tiny_model, tokens
from transformers import DynamicCache, StaticCache, StoppingCriteriaList, TextIteratorStreamer

from modeling_kda import KDACache

every_pattern = pytest.mark.parametrize("stages", PATTERNS)
some_patterns = pytest.mark.parametrize("stages", ["softmax", "kda", "softmax_inside", "every_stage"])
NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
DETAILS = {"output_logits": True, "output_scores": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def padded_prompts():
    """A batch of a short and a long prompt, padded on the left with ordinary tokens."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    return tokens(2, 9), mask


def without_cache(model, ids, mask=None, steps=NEW):
    """Greedy search by whole forwards: the tokens and the logits of each step."""
    mask = torch.ones_like(ids) if mask is None else mask
    logits = []
    for _ in range(steps):
        logits.append(model(ids, attention_mask=mask, use_cache=False).logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids, torch.stack(logits, 1)


def assert_generates(model, expected, ids, mask=None, **options):
    """`expected` are the tokens and logits of `without_cache`."""
    outputs = model.generate(ids, attention_mask=mask, **GREEDY, **DETAILS, **options)
    assert torch.equal(outputs.sequences, expected[0])
    assert_same(torch.stack(outputs.logits, 1), expected[1])
    return outputs


def draft_model(stages="kda", drafts=3, **fields):
    """Another model of the same vocabulary, whose drafts are mostly wrong."""
    return drafting(tiny_model(stages, seed=5, **fields), drafts)


def drafting(assistant, drafts):
    assistant.generation_config.num_assistant_tokens = drafts
    # these models are never sure, and would draft one token at a time
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.eos_token_id = None
    return assistant


# --- greedy search, prompts and caches


@every_pattern
def test_greedy_search(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    expected = without_cache(model, ids, mask)
    assert_generates(model, expected, ids, mask)
    assert_generates(model, expected, ids, mask, use_cache=False)
    assert_generates(model, expected, ids, mask, cache=KDACache(model.config))
    assert_generates(model, expected, ids, mask, cache=DynamicCache())
    # the equalities mean something: another past gives other logits
    other = without_cache(model, ids.roll(1, 1), mask)
    assert_different(other[1], expected[1])


@every_pattern
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(stages, length):
    model, ids = tiny_model(stages), tokens(2, length)
    assert_generates(model, without_cache(model, ids), ids)


@every_pattern
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_read_in_parts(stages, chunk, static):
    """A part may hold nothing but padding, also a single token of it."""
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    options = {"cache_implementation": "static", "disable_compile": True} if static else {}
    assert_generates(model, without_cache(model, ids, mask), ids, mask, prefill_chunk_size=chunk, **options)


@every_pattern
def test_a_static_cache_twice_with_another_prompt(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    for prompt, real in ((ids, mask), (ids[:, 4:], mask[:, 4:]), (ids, mask)):
        options = {"cache_implementation": "static", "disable_compile": True}
        assert_generates(model, without_cache(model, prompt, real), prompt, real, **options)


@every_pattern
def test_inputs_embeds_as_the_prompt(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    expected, logits = without_cache(model, ids, mask)
    embeds = model.get_input_embeddings()(ids)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        outputs = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY, **DETAILS, **options)
        assert torch.equal(outputs.sequences, expected[:, 9:])
        assert_same(torch.stack(outputs.logits, 1), logits)
    cache = KDACache(model.config)
    model(ids[1:, :4], cache=cache)
    assert_same(model(inputs_embeds=embeds[1:, 4:], cache=cache).logits[:, -1], logits[1:, 0])


@every_pattern
def test_a_cache_that_holds_part_of_the_prompt(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    expected = without_cache(model, ids)
    prefix = KDACache(model.config, max_rollback=4)
    model(ids[:, :5], cache=prefix)
    for _ in range(2):
        assert_generates(model, expected, ids, cache=copy.deepcopy(prefix))
    whole = copy.deepcopy(prefix)
    model(ids[:, 5:], cache=whole)
    with pytest.raises(ValueError, match="at least one more"):
        model.generate(ids, cache=whole, **GREEDY)
    whole.crop(-1)
    assert_generates(model, expected, ids, cache=whole)


@every_pattern
def test_a_second_turn_goes_on_from_the_first(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    first = model.generate(ids, **GREEDY, **DETAILS)
    longer = torch.cat([first.sequences, tokens(1, 4, seed=6)], 1)
    assert_generates(model, without_cache(model, longer), longer, cache=first.cache)


@every_pattern
def test_a_second_turn_whose_rows_are_padded_again(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    first = model.generate(ids, attention_mask=mask, **GREEDY, **DETAILS)
    turn, answered = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), torch.ones(2, NEW, dtype=torch.long)
    longer, mask = torch.cat([first.sequences, tokens(2, 4, seed=6)], 1), torch.cat([mask, answered, turn], 1)
    assert_generates(model, without_cache(model, longer, mask), longer, mask, cache=first.cache)


def test_models_in_training_mode_generate_too():
    model, ids = tiny_model("softmax_inside"), tokens(1, 9)
    assert_generates(copy.deepcopy(model).train(), without_cache(model, ids), ids)


def test_rows_end_at_their_own_end_of_text():
    model, (ids, mask) = tiny_model("softmax_inside"), padded_prompts()
    expected, _ = without_cache(model, ids, mask)
    end = expected[0, 11].item()
    outputs = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=end)
    first = (expected[0, 9:] == end).nonzero()[0].item() + 10
    assert torch.equal(outputs[0, :first], expected[0, :first])
    assert (outputs[0, first:] == model.config.pad_token_id).all()
    assert torch.equal(outputs[1], expected[1, : outputs.shape[1]])


@some_patterns
def test_the_limit_of_learned_positions_is_named(stages):
    model = tiny_model(stages, max_position_embeddings=12)
    model.generate(tokens(1, 9), max_new_tokens=4, do_sample=False, eos_token_id=None)
    with pytest.raises(ValueError, match="max_position_embeddings=12"):
        model.generate(tokens(1, 9), max_new_tokens=5, do_sample=False, eos_token_id=None)


def test_only_the_last_logits_are_computed():
    model, ids, sizes = tiny_model("softmax_inside"), tokens(1, 9), []
    model.lm_head.register_forward_hook(lambda module, args, logits: sizes.append(logits.shape[1]))
    model.generate(ids, **GREEDY)
    assert sizes == [1] * NEW


def test_text_can_be_streamed():
    class Words:
        def decode(self, ids, **kwargs):
            return "".join(f"{i} " for i in ids)

    model, ids = tiny_model("softmax_inside"), tokens(1, 9)
    streamer = TextIteratorStreamer(Words(), skip_prompt=True)
    expected = model.generate(ids, **GREEDY, streamer=streamer)
    assert [int(word) for word in "".join(streamer).split()] == expected[0, 9:].tolist()


# --- sampling and beams


@every_pattern
def test_sampling_with_a_seed(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    options = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": None, "temperature": 0.7, "top_k": 20}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        results.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options, **DETAILS))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_same(torch.stack(results[0].logits), torch.stack(results[1].logits))
    torch.manual_seed(3)
    several = model.generate(ids, attention_mask=mask, num_return_sequences=3, **options)
    assert several.shape == (6, 17)
    assert len({tuple(row.tolist()) for row in several[:3]}) > 1


@every_pattern
@pytest.mark.parametrize("static", [False, True])
def test_beam_search(stages, static):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    beams = {"num_beams": 3, "num_return_sequences": 2}
    options = {"cache_implementation": "static", "disable_compile": True} if static else {}
    plain = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY, **DETAILS, **beams)
    cached = model.generate(ids, attention_mask=mask, **GREEDY, **DETAILS, **beams, **options)
    assert torch.equal(cached.sequences, plain.sequences)
    assert_same(cached.sequences_scores, plain.sequences_scores)
    assert_same(torch.stack(cached.logits), torch.stack(plain.logits))
    # beams did change places, so that a cache that is not reordered would be seen
    assert (cached.beam_indices[:, :-1] != cached.beam_indices[:, 1:]).any()


# --- drafts that are verified and taken back


@every_pattern
@pytest.mark.parametrize("drafts", [3, 100])
def test_assisted_generation(stages, drafts):
    """With a draft model that is mostly wrong, and with more drafts than the rollback window holds."""
    model, ids = tiny_model(stages, max_rollback=0), tokens(1, 12)
    expected = without_cache(model, ids)
    lengths = []
    model.lm_head.register_forward_hook(lambda module, args, logits: lengths.append(logits.shape[1]))
    assert_generates(model, expected, ids, assistant_model=draft_model(drafts=drafts, max_rollback=0))
    # one more token than drafts, as far as the requested length allows
    assert lengths[0] == min(drafts, NEW - 1) + 1


@some_patterns
def test_assisted_generation_with_a_growing_number_of_drafts(stages):
    model, ids = tiny_model(stages, max_rollback=2), tokens(1, 5)
    expected = without_cache(model, ids, steps=28)
    assistant = drafting(copy.deepcopy(model), 1)
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    # from here on the copy is wrong
    assistant.lm_head.register_forward_hook(
        lambda module, args, logits: logits.roll(1, -1) if assistant.wrong else logits
    )
    assistant.wrong = False

    def spoil(generated, scores):
        assistant.wrong = generated.shape[1] > 24
        return torch.zeros(1, dtype=torch.bool)

    options = {**GREEDY, "max_new_tokens": 28, **DETAILS}
    outputs = model.generate(
        ids, assistant_model=assistant, stopping_criteria=StoppingCriteriaList([spoil]), **options
    )
    assert torch.equal(outputs.sequences, expected[0])
    assert_same(torch.stack(outputs.logits, 1), expected[1])


@pytest.mark.parametrize(
    "stages, assistant_stages",
    [*(("softmax", assistant) for assistant in PATTERNS), ("softmax_inside", "kda"), ("kda", "softmax")],
)
def test_drafts_are_those_of_the_assistant_alone(stages, assistant_stages):
    """The output is right whatever the assistant says: only its drafts show whether its own cache is rolled back."""
    model, ids = tiny_model(stages), tokens(1, 9)
    assistant = draft_model(assistant_stages)
    generate, rounds = assistant.generate, []

    def recording(input_ids, **kwargs):
        outputs = generate(input_ids, **kwargs)
        rounds.append((input_ids, outputs.sequences, torch.stack(outputs.logits, 1)))
        return outputs

    assistant.generate = recording
    assert_generates(model, without_cache(model, ids), ids, assistant_model=assistant)
    del assistant.generate
    assert len(rounds) > 2
    for prompt, drafted, logits in rounds:
        expected = without_cache(assistant, prompt, steps=drafted.shape[1] - prompt.shape[1])
        assert torch.equal(drafted, expected[0])
        assert_same(logits, expected[1])


@every_pattern
def test_a_perfect_assistant_is_always_believed(stages):
    model, ids, lengths = tiny_model(stages), tokens(1, 9), []
    expected = without_cache(model, ids)
    assistant = drafting(copy.deepcopy(model), 3)
    handle = model.lm_head.register_forward_hook(lambda module, args, logits: lengths.append(logits.shape[1]))
    assert_generates(model, expected, ids, assistant_model=assistant)
    handle.remove()
    assert lengths == [4, 4]


@every_pattern
@pytest.mark.parametrize("static", [False, True])
def test_prompt_lookup(stages, static):
    model, ids = tiny_model(stages, max_rollback=2), tokens(1, 6).repeat(1, 4)
    # drafts need room beyond the requested length
    static_options = {"cache_implementation": "static", "disable_compile": True, "max_cache_len": 80}
    options = static_options if static else {}
    for count in (3, 40):
        assert_generates(model, without_cache(model, ids), ids, prompt_lookup_num_tokens=count, **options)


@some_patterns
def test_assisted_generation_with_padding_and_a_cache(stages):
    model, (ids, mask) = tiny_model(stages), padded_prompts()
    ids, mask = ids[:1], mask[:1]
    expected = without_cache(model, ids, mask)
    assert_generates(model, expected, ids, mask, assistant_model=draft_model())
    outputs = assert_generates(model, expected, ids, mask, assistant_model=draft_model(), cache=DynamicCache())
    assert outputs.cache.get_seq_length() == outputs.sequences.shape[1] - 1
    static = {"cache_implementation": "static", "disable_compile": True}
    assert_generates(model, expected, ids, mask, assistant_model=draft_model(), **static)


@some_patterns
def test_sampled_drafts_keep_the_distribution_reachable(stages):
    """With a perfect assistant every draft is accepted, so the samples are the assistant's own."""
    model, ids = tiny_model(stages), tokens(1, 9)
    options = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": None, "temperature": 0.7}
    torch.manual_seed(3)
    outputs = model.generate(ids, assistant_model=drafting(copy.deepcopy(model), 3), **options, **DETAILS)
    sequence = outputs.sequences
    expected = model(sequence, use_cache=False).logits[:, 8:-1]
    assert_same(torch.stack(outputs.logits, 1), expected)


@some_patterns
def test_the_first_layers_can_draft(stages):
    model, ids = tiny_model(stages), tokens(1, 9)
    layers = model.config.num_hidden_layers
    assert_generates(model, without_cache(model, ids), ids, assistant_early_exit=1)
    assert model.config.num_hidden_layers == layers


# --- what is refused


def test_assisted_generation_of_a_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size = 1"):
        tiny_model().generate(tokens(2, 5), assistant_model=draft_model(), **GREEDY)


@every_pattern
def test_continuous_batching_is_refused_at_once(stages):
    model, before, start = tiny_model(stages), set(threading.enumerate()), time.monotonic()
    with pytest.raises(ValueError, match="continuous batching is not supported"):
        model.generate_batch([[3, 4, 5]])
    assert time.monotonic() - start < 5
    # a progress bar has a thread of its own
    assert not [thread for thread in set(threading.enumerate()) - before if "tqdm" not in thread.name]


@pytest.mark.parametrize("stages", ["kda", "softmax_inside"])
def test_a_quantized_cache_is_refused(stages):
    with pytest.raises(ValueError, match="linear_attention"):
        tiny_model(stages).generate(tokens(1, 5), cache_implementation="quantized", **GREEDY)


def test_a_static_cache_of_the_wrong_length_is_refused():
    model = tiny_model("softmax_inside")
    cache = StaticCache(config=model.config, max_cache_len=10)
    with pytest.raises(ValueError, match="room for 10 tokens"):
        model.generate(tokens(1, 9), cache=cache, disable_compile=True, **GREEDY)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_pattern
def test_an_offloaded_cache(stages):
    """Twice: the second call starts where the first left keys and values on the CPU."""
    model, ids = tiny_model(stages).cuda(), tokens(2, 9).cuda()
    options = {**GREEDY, **DETAILS}
    for _ in range(2):
        plain = model.generate(ids, **options)
        offloaded = model.generate(ids, cache_implementation="offloaded", **options)
        assert torch.equal(plain.sequences, offloaded.sequences)
        assert_same(torch.stack(offloaded.logits), torch.stack(plain.logits))
