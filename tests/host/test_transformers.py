"""attn4 inside transformers' models agrees with the models' own attention, or says that it cannot."""

import copy
import subprocess
import sys

import pytest

transformers = pytest.importorskip("transformers", minversion="5.8")

import torch

from attn4.integrations.transformers import register

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# The name that every supported version takes; the newest want it to be called cache.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

LEFT, RIGHT, NONE = "left", "right", "none"
LENGTHS = (11, 7, 3)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def llama():
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def mistral():
    return transformers.MistralModel(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4)
    )


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def modernbert():
    return transformers.ModernBertModel(
        transformers.ModernBertConfig(**SIZES, local_attention=6, global_attn_every_n_layers=2)
    )


def pair(make):
    """The same random weights twice: on the model's own attention, and on attn4."""
    torch.manual_seed(0)
    eager = make().eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("attn4")
    assert ours.config._attn_implementation == "attn4"
    return eager, ours


def batch(padding):
    """Token numbers (3, 11), and their padding mask, None if nothing is padded."""
    tokens = torch.randint(
        1, SIZES["vocab_size"], (3, LENGTHS[0]), generator=torch.Generator().manual_seed(1)
    )
    if padding == NONE:
        return tokens, None
    places = torch.arange(LENGTHS[0])
    real = torch.stack([places < length for length in LENGTHS])
    real = real.flip(1) if padding == LEFT else real
    return tokens.where(real, 0), real.long()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("padding", [NONE, LEFT, RIGHT])
@pytest.mark.parametrize("make", [llama, mistral, bert, modernbert])
def test_real_tokens_get_what_eager_attention_gives_them(make, padding):
    eager, ours = pair(make)
    tokens, mask = batch(padding)
    real = slice(None) if mask is None else mask.bool()
    with torch.no_grad():
        expected = eager(tokens, attention_mask=mask).last_hidden_state[real]
        close(ours(tokens, attention_mask=mask).last_hidden_state[real], expected)


@pytest.mark.parametrize("make", [llama, mistral])
def test_what_stands_in_the_padding_reaches_no_real_token(make):
    _, ours = pair(make)
    tokens, mask = batch(LEFT)
    other = tokens.where(mask.bool(), 5)
    with torch.no_grad():
        first, second = (ours(t, attention_mask=mask).last_hidden_state[mask.bool()] for t in (tokens, other))
    assert torch.equal(first, second)


def test_gradients_through_a_padded_model_match_eager_attention():
    tokens, mask = batch(RIGHT)
    weights = torch.randn(sum(LENGTHS), SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    gradients = []
    for model in pair(llama):
        (model(tokens, attention_mask=mask).last_hidden_state[mask.bool()] * weights).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        close(actual, expected)


@pytest.mark.slow
def test_an_encoder_compiles_to_one_graph_with_the_eager_gradients():
    torch._dynamo.reset()
    tokens, _ = batch(NONE)
    _, ours = pair(bert)
    results = []
    for model in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        ours.zero_grad()
        hidden = model(tokens).last_hidden_state
        hidden.square().sum().backward()
        results.append({name: x.grad for name, x in ours.named_parameters() if x.grad is not None})
    eager, compiled = results
    assert len(eager) > 10
    for name, gradient in eager.items():
        close(compiled[name], gradient)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make", [llama, mistral])
def test_generation_with_a_cache_yields_the_tokens_of_eager_attention(make, cache):
    def causal_lm():
        base = make()
        return transformers.AutoModelForCausalLM.from_config(base.config)

    tokens, mask = batch(LEFT)
    settings = {
        "max_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    eager, ours = (m.generate(tokens, attention_mask=mask, **settings) for m in pair(causal_lm))
    assert torch.equal(ours, eager)


def test_chunks_of_a_prompt_after_a_cache_match_eager_attention():
    tokens, _ = batch(NONE)
    results = []
    for model in pair(mistral):
        with torch.no_grad():
            cache = model(tokens[:, :5], use_cache=True).past_key_values
            results.append(model(tokens[:, 5:], past_key_values=cache, use_cache=True).last_hidden_state)
    close(results[1], results[0])


def test_what_a_cache_of_fixed_size_has_not_seen_stays_out():
    tokens, _ = batch(NONE)
    results = []
    for model in pair(llama):
        cache = transformers.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            steps = [model(part, past_key_values=cache).last_hidden_state for part in tokens.split(6, dim=1)]
        results.append(torch.cat(steps, dim=1))
    close(results[1], results[0])


@pytest.mark.parametrize("make", [llama, mistral])
def test_sequences_packed_by_position_do_not_see_each_other(make):
    tokens, _ = batch(NONE)
    positions = torch.cat([torch.arange(6), torch.arange(5)]).repeat(3, 1)
    eager, ours = pair(make)
    with torch.no_grad():
        expected = eager(tokens, position_ids=positions, use_cache=False).last_hidden_state
        close(ours(tokens, position_ids=positions, use_cache=False).last_hidden_state, expected)


def test_sequences_packed_by_lengths_equal_separate_calls():
    tokens, _ = batch(NONE)
    positions = torch.cat([torch.arange(6), torch.arange(5)])[None]
    lengths = torch.tensor([0, 6, 11], dtype=torch.int32)
    eager, ours = pair(llama)
    with torch.no_grad():
        packed = ours(
            tokens[:1],
            position_ids=positions,
            use_cache=False,
            cu_seq_lens_q=lengths,
            cu_seq_lens_k=lengths,
            max_length_q=6,
            max_length_k=6,
        ).last_hidden_state
        parts = [eager(part, use_cache=False).last_hidden_state for part in (tokens[:1, :6], tokens[:1, 6:])]
    close(packed, torch.cat(parts, dim=1))


def test_a_decoder_asked_to_look_both_ways_does():
    eager, ours = pair(llama)
    tokens, mask = batch(RIGHT)
    with torch.no_grad():
        expected = eager(tokens, attention_mask=mask, is_causal=False).last_hidden_state[mask.bool()]
        close(ours(tokens, attention_mask=mask, is_causal=False).last_hidden_state[mask.bool()], expected)


def test_dropout_is_refused_with_the_way_out():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=0.1)
    _, ours = pair(lambda: transformers.LlamaModel(config))
    with pytest.raises(NotImplementedError, match=r"no dropout.*model\.eval\(\)"):
        ours.train()(batch(NONE)[0])


def test_a_soft_cap_is_refused():
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8)
    _, ours = pair(lambda: transformers.Gemma2Model(config))
    with pytest.raises(NotImplementedError, match="no softcap"):
        ours(batch(NONE)[0])


def test_sinks_are_refused():
    config = transformers.GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=2)
    _, ours = pair(lambda: transformers.GptOssModel(config))
    with pytest.raises(NotImplementedError, match="no s_aux"):
        ours(batch(NONE)[0])


def test_a_mask_per_pair_of_tokens_is_refused():
    _, ours = pair(llama)
    tokens, _ = batch(NONE)
    with pytest.raises(NotImplementedError, match=r"padding mask \(batch, keys\)"):
        ours(tokens, attention_mask=torch.zeros(3, 1, 11, 11))


def test_a_mask_function_that_is_not_known_is_refused():
    from transformers.masking_utils import create_causal_mask

    _, ours = pair(llama)
    embeddings = torch.zeros(1, 4, 32)
    with pytest.raises(NotImplementedError, match="no mask of the kind"):
        create_causal_mask(ours.config, embeddings, None, None, or_mask_function=lambda b, h, q, k: k < 2)


def test_a_window_over_padding_inside_a_row_is_refused():
    _, ours = pair(mistral)
    tokens, _ = batch(NONE)
    mask = torch.ones_like(tokens)
    mask[0, 4:6] = 0
    with pytest.raises(NotImplementedError, match="padding inside"):
        ours(tokens, attention_mask=mask)


def test_a_name_that_transformers_reserves_is_refused():
    with pytest.raises(ValueError, match="flash"):
        register("my_flash")


def test_importing_the_integration_registers_nothing():
    code = (
        "import attn4.integrations.transformers as t, sys; assert 'transformers' not in sys.modules;"
        "from transformers import AttentionInterface; assert 'attn4' not in AttentionInterface();"
        "t.register(); assert 'attn4' in AttentionInterface()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
