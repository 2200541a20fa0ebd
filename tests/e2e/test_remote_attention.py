"""The attention function: who is refused, what else it serves, and what happens on failure."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import DynamicCache, StaticCache

from kvservice.core.errors import OutOfPages, PagesLost, Unavailable
from kvservice.embedded import embedded
from kvservice_client import Client, ClientConfig, Session, use
from kvservice_client._attend import Attender
from kvservice_client.hf import CACHE_ARGUMENT, RemoteCache, use_remote_attention
from tests.backends import embedded_backend
from tests.e2e import compare, models
from tests.e2e.scenarios import World, forward, padded, prompt


def remote_model(family: str) -> Any:
    model = models.remote_twin(family)
    use_remote_attention(model)
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


# -- who is refused


def _falcon() -> Any:
    return tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )


def _latents() -> Any:
    config = tf.DeepseekV3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return tf.DeepseekV3ForCausalLM(config)


def _indexed() -> Any:
    model = models.family("qwen3").model_class(models.family("qwen3").config())
    model.config.layer_types = ["indexed_attention"] * models.NUM_LAYERS
    return model


def _deaf() -> Any:
    """A model whose decoder has a configuration of its own, which no setting reaches."""
    model = models.family("llama").model_class(models.family("llama").config())
    decoder = SimpleNamespace(config=copy.deepcopy(model.config))
    model.get_decoder = lambda: decoder
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_deaf, "did not take"),
        (_falcon, "does not go through transformers' AttentionInterface"),
        (_latents, "MLA"),
        (_indexed, "indexed_attention"),
    ],
)
def test_models_that_cannot_are_refused(build: Callable[[], Any], reason: str) -> None:
    """Before anything goes wrong, with the reason; the model stays as it was."""
    model = build().eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        use_remote_attention(model)
    assert model.config._attn_implementation == before


def test_a_model_in_training_is_refused() -> None:
    """Remote attention has no gradients."""
    model = models.family("llama").model_class(models.family("llama").config()).train()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        use_remote_attention(model)


@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("mode", ["auto", "fetch"])
@pytest.mark.parametrize("build", [_falcon, _latents])
def test_models_that_cannot_may_fetch(client: Client, build: Any, mode: str) -> None:
    """What is refused remote attention decodes all the same, on keys and values that come back."""
    torch.manual_seed(0)
    model = models.quiet(build())
    ids = torch.randint(2, 30, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}, **options)
    cache = RemoteCache(client, model.config, mode=mode)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options), wanted)


def test_a_model_that_computes_on_keys_is_noticed(client: Client) -> None:
    """In mode "attend" with a local attention: refused at once, and nothing is stored."""
    model = models.build("llama")
    cache = RemoteCache(client, model.config, mode="attend")
    with pytest.raises(RuntimeError, match="use_remote_attention"):
        model.generate(prompt(1, 5), **{CACHE_ARGUMENT: cache}, max_new_tokens=2)


@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
def test_a_model_that_computes_on_values_alone(client: Client) -> None:
    """DiffLlama rearranges values, and hands on keys as it got them: those are fetched as well."""
    torch.manual_seed(0)
    config = tf.DiffLlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = models.quiet(tf.DiffLlamaForCausalLM(config))
    ids, mask = padded([7, 4])
    ids = ids % 32
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(ids, **{CACHE_ARGUMENT: DynamicCache()}, **options)
    use_remote_attention(model)
    cache = RemoteCache(client, model.config)
    assert torch.equal(model.generate(ids, **{CACHE_ARGUMENT: cache}, **options), wanted)
    with pytest.raises(RuntimeError, match="mode='auto'"):
        model(ids, **{CACHE_ARGUMENT: RemoteCache(client, mode="attend")})


def test_other_parts_of_a_composite_model_keep_their_attention() -> None:
    """Only the decoder's attention is set."""
    text = models.family("gemma3").config()
    vision = tf.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = tf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    assert use_remote_attention(model) is model
    assert model.get_decoder().config._attn_implementation == "kvservice"
    assert model.config.vision_config._attn_implementation != "kvservice"


def test_dropout_is_refused(client: Client) -> None:
    """It would be left out silently."""
    model = models.family("llama").model_class(models.family("llama").config()).eval()
    use_remote_attention(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()
    with pytest.raises(RuntimeError, match="dropout"):
        model(prompt(1, 3), **{CACHE_ARGUMENT: RemoteCache(client, model.config)})


@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
@pytest.mark.parametrize("mode", ["attend", "auto", "fetch"])
@pytest.mark.parametrize("trained", ["q_proj", "v_proj"])
def test_backward_is_refused(client: Client, mode: str, trained: str) -> None:
    """Gradients that end at the service would be wrong ones; forward alone is fine."""
    model = models.family("llama").model_class(models.family("llama").config()).eval()
    if mode == "attend":
        use_remote_attention(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    cache = RemoteCache(client, model.config, mode=mode)
    loss = model(prompt(1, 3), **{CACHE_ARGUMENT: cache}).logits.sum()
    with pytest.raises(RuntimeError, match="inference only"):
        loss.backward()
    # A backward that fails leaves nodes in the thread's queue, which the next one there drops.
    torch.ones(1, requires_grad=True).sum().backward()


def test_keywords_that_change_scores_are_refused(client: Client) -> None:
    """Sparse attention by indices is not computed as if there were none."""
    model = remote_model("llama")
    cache = RemoteCache(client, model.config)
    with pytest.raises(RuntimeError, match="indices"):
        model(prompt(1, 3), **{CACHE_ARGUMENT: cache}, indices=torch.zeros(1))
    assert cache.get_seq_length() == 0


# -- what else it serves


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral", "gpt-oss", "llama4"])
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_without_a_remote_cache_it_is_local(family: str, kind: str) -> None:
    """`use_cache=False`, a draft's DynamicCache, a static cache: as with the model's own."""
    ids, mask = padded([9, 13])
    texts = []
    for model in (models.build(family), remote_model(family)):
        options: dict[str, Any] = {"use_cache": kind != "none"}
        if kind == "dynamic":
            options[CACHE_ARGUMENT] = DynamicCache(config=model.config)
        elif kind == "static":
            options[CACHE_ARGUMENT] = StaticCache(config=model.config, max_cache_len=32)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        texts.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(texts[0][0], texts[1][0])
    assert_close(texts[1][1], texts[0][1])


def test_an_encoder_is_local() -> None:
    """Bidirectional attention with padding, without any cache."""
    config = tf.BertConfig(
        vocab_size=models.VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = tf.BertModel(config).eval()
    ids, mask = padded([4, 9])
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).last_hidden_state
        model.set_attn_implementation("kvservice")
        assert_close(model(ids, attention_mask=mask).last_hidden_state, wanted, atol=1e-5)
        assert torch.isfinite(model(ids).last_hidden_state).all()


def test_several_threads_on_one_model(client: Client) -> None:
    """Each has its own cache; nothing is kept on model, module or thread."""
    model = remote_model("qwen3")
    results: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        cache = RemoteCache(client, model.config, mode="attend")
        ids = prompt(1, 8 + number, seed=number)
        results[number] = model.generate(
            ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, do_sample=False
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    local = models.build("qwen3")
    for number in range(4):
        ids = prompt(1, 8 + number, seed=number)
        assert torch.equal(results[number], local.generate(ids, max_new_tokens=8, do_sample=False))


def test_two_caches_take_turns_on_one_model(client: Client) -> None:
    """Placeholders know their own cache."""
    model = remote_model("llama")
    world = World("llama", model, lambda: RemoteCache(client, model.config, mode="attend"))
    local = World("llama", models.build("llama"), DynamicCache)
    caches = [world.new_cache(), world.new_cache(), local.new_cache(), local.new_cache()]
    for step in range(4):
        for number in (0, 1):
            ids = prompt(1, 3, seed=10 * number + step)
            ours = forward(world, ids, caches[number])
            assert_close(ours, forward(local, ids, caches[2 + number]))


def test_the_default_client(client: Client) -> None:
    """Without a client the one set by `use` serves; without that one, an error says what to do."""
    with pytest.raises(RuntimeError, match="use"):
        RemoteCache()
    use(client)
    try:
        model = remote_model("llama")
        cache = RemoteCache(config=model.config, mode="attend")
        text = model.generate(
            prompt(1, 13), **{CACHE_ARGUMENT: cache}, max_new_tokens=16, do_sample=False
        )
        assert torch.equal(text, compare.expected("llama", "greedy")[0])
    finally:
        use(None)


def test_under_inference_mode(client: Client) -> None:
    """Inference tensors go in and come out."""
    model = remote_model("mistral")
    with torch.inference_mode():
        cache = RemoteCache(client, model.config, mode="attend")
        first = model(prompt(1, 9), **{CACHE_ARGUMENT: cache}).logits
        second = model(prompt(1, 1, seed=1), **{CACHE_ARGUMENT: cache}).logits
        wanted = models.build("mistral")(torch.cat([prompt(1, 9), prompt(1, 1, seed=1)], 1)).logits
    assert_close(first, wanted[:, :9])
    assert_close(second, wanted[:, 9:])


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_in_a_compiled_model(client: Client) -> None:
    """Compilation goes around updates and attention."""
    torch._dynamo.reset()
    model = remote_model("llama")
    compiled = torch.compile(model, backend="eager")
    cache = RemoteCache(client, model.config, mode="attend")
    ids, mask = padded([7, 4])
    with torch.no_grad():
        results = [compiled(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits]
        for step in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            token = prompt(2, 1, seed=step)
            ids = torch.cat([ids, token], 1)
            results.append(compiled(token, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits)
        wanted = models.build("llama")(ids, attention_mask=mask).logits
    assert_close(torch.cat(results, 1)[mask.bool()], wanted[mask.bool()])
    cache.reset()  # compiled code holds on to what it was compiled for
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(client: Client, dtype: torch.dtype) -> None:
    """Probabilities of the next token within what rounding gives."""
    model = models.family("llama").model_class(models.family("llama").config())
    model.load_state_dict(models.build("llama").state_dict())
    model = models.quiet(model).to(dtype)
    ids, mask = padded([9, 6])
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits.float().softmax(-1)
        use_remote_attention(model)
        cache = RemoteCache(client, model.config, mode="attend")
        ours = model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}).logits
    assert ours.dtype == dtype
    difference = (ours.float().softmax(-1) - wanted)[mask.bool()].abs()
    assert difference.mean() < 5e-3


@pytest.mark.filterwarnings("ignore::kvservice_client.hf.RemoteFetchWarning")
def test_attention_weights(client: Client) -> None:
    """They are where the pages are; eager attention in mode "auto" has them."""
    ids = prompt(1, 6)
    model = models.family("llama").model_class(models.family("llama").config()).eval()
    model.set_attn_implementation("eager")
    wanted = model(ids, output_attentions=True).attentions
    cache = RemoteCache(client, model.config)
    with torch.no_grad():
        ours = model(ids, **{CACHE_ARGUMENT: cache}, output_attentions=True).attentions
    for one, two in zip(ours, wanted, strict=True):
        assert_close(one, two)


# -- failures


def test_a_failed_layer_stores_nothing_and_is_rolled_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that dies in its third layer leaves a cache that says so, and can go on."""
    model = remote_model("llama")
    world = World("llama", model, lambda: RemoteCache(client, model.config, mode="attend"))
    real = Session.attend
    fails = threading.Event()

    def attend(self: Session, layer: int, *args: Any, **options: Any) -> Any:
        if layer == 2 and fails.is_set():
            raise Unavailable("nobody answers")
        return real(self, layer, *args, **options)

    monkeypatch.setattr(Session, "attend", attend)
    cache, healthy = world.new_cache(), world.new_cache()
    for each in (cache, healthy):
        forward(world, prompt(1, 7), each)
    fails.set()
    with pytest.raises(Unavailable):
        forward(world, prompt(1, 2, seed=1), cache)
    fails.clear()
    assert [cache.get_seq_length(layer) for layer in range(4)] == [9, 9, 7, 7]
    with pytest.raises(ValueError, match="rollback"):
        forward(world, prompt(1, 2, seed=1), cache)
    assert cache.rollback() == 7
    assert_close(
        forward(world, prompt(1, 2, seed=1), cache), forward(world, prompt(1, 2, seed=1), healthy)
    )


@pytest.mark.parametrize(("family", "groups"), [("llama", 1), ("mistral", 1), ("gemma3", 2)])
def test_decoding_takes_the_short_way(
    client: Client, family: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first layer of each window, in any order of the layers."""
    served: list[bool] = []
    real = Attender.attend_steadily

    def noting(self: Attender, *args: Any) -> Any:
        out = real(self, *args)
        served.append(out is not None)
        return out

    monkeypatch.setattr(Attender, "attend_steadily", noting)
    model = remote_model(family)
    cache = RemoteCache(client, model.config, mode="attend")
    world = World(family, model, lambda: cache)
    forward(world, prompt(1, 5), cache)
    for step in range(3):
        forward(world, prompt(1, 1, seed=step), cache)
    assert served.count(True) == 3 * (models.NUM_LAYERS - groups)


def test_a_full_worker_is_an_error_and_no_answer() -> None:
    """OutOfPages reaches the caller; after a rollback a smaller batch goes on."""
    with embedded(memory_bytes=200_000) as small:
        model = remote_model("llama")
        cache = RemoteCache(small, model.config, mode="attend")

        def wait_for_all_layers() -> None:
            model(prompt(4, 60), **{CACHE_ARGUMENT: cache})
            assert cache.session_id

        with torch.no_grad():
            with pytest.raises(OutOfPages):
                wait_for_all_layers()
            assert cache.rollback() == 0
            cache.reset()
            logits = model(prompt(1, 8), **{CACHE_ARGUMENT: cache}).logits
            assert_close(logits, models.build("llama")(prompt(1, 8)).logits)


def test_a_crashed_decoder_goes_on(client: Client) -> None:
    """Another process, or the same one later, takes the session over at its stored length."""
    model = remote_model("mistral")
    ids = prompt(1, 11)
    cache = RemoteCache(client, model.config, mode="attend")
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
        heir = RemoteCache.attach(cache.session_id, client=client, config=model.config)
        logits = model(prompt(1, 1, seed=1), **{CACHE_ARGUMENT: heir}).logits
        wanted = models.build("mistral")(torch.cat([ids, prompt(1, 1, seed=1)], 1)).logits
    assert_close(logits[:, -1], wanted[:, -1])


@pytest.mark.parametrize("dead", [0, 1])
def test_a_lost_worker(dead: int) -> None:
    """What it held is fed again, to another worker; the text is the one without the loss."""
    model = remote_model("llama")
    impatient = ClientConfig(timeout_s=5.0, detection_s=0.2, silence_s=0.05)
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect(config=impatient)
        cache = RemoteCache(client, model.config, mode="attend", spread=2, page_size=4)
        world = World("llama", model, lambda: cache)
        ids = prompt(1, 16)
        forward(world, ids[:, :13], cache)
        extent = cache._shared.opened()._mirror.extents[dead]
        first = 0 if dead == 0 else extent.starts[0]
        index = backend.index_of(extent.worker_id)
        backend.kill(index)
        with pytest.raises(PagesLost):
            forward(world, ids[:, 13:], cache)
        assert cache.rollback() == cache.get_seq_length() == first
        logits = forward(world, ids[:, first:], cache)
        assert_close(logits, forward(world, ids, DynamicCache())[:, first:])
        backend.restart(index)


class Killing(tf.LogitsProcessor):  # type: ignore[misc]
    """Lets something happen once so many tokens are there; changes no logits."""

    def __init__(self, length: int, kill: Callable[[], None]) -> None:
        self._length, self._kill = length, kill

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == self._length:
            self._kill()
        return scores


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dead", [0, 1])
def test_a_lost_copy(dead: int, family: str) -> None:
    """With two copies a worker dies in mid-sentence, and the tokens are those of a local cache."""
    model, quick = remote_model(family), ClientConfig(timeout_s=5.0, detection_s=0.4)
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect(config=quick)
        cache = RemoteCache(client, model.config, mode="attend", replicas=2, page_size=4)

        def kill() -> None:
            extent = cache._shared.opened()._mirror.extents[0]
            backend.kill(backend.index_of(extent.copies[dead].worker_id))

        ids, options = prompt(1, 9), {"max_new_tokens": 12, "do_sample": False}
        killing = tf.LogitsProcessorList([Killing(14, kill)])
        tokens = model.generate(ids, logits_processor=killing, **{CACHE_ARGUMENT: cache}, **options)
        wanted = models.build(family).generate(ids, **options)
        assert torch.equal(tokens, wanted)
        assert cache._shared.opened()._mirror.misses_copies
        cache.reset()
        for index in range(2):
            backend.restart(index)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_restarted_decoder_after_a_loss(dead: int) -> None:
    """It attaches to what is left, is told what is gone, and goes on from what still holds."""
    model = remote_model("llama")
    with embedded_backend(num_workers=2) as backend:
        client = backend.connect()
        cache = RemoteCache(client, model.config, mode="attend", spread=2, page_size=4)
        world = World("llama", model, lambda: cache)
        ids = prompt(1, 16)
        forward(world, ids[:, :13], cache)
        extent = cache._shared.opened()._mirror.extents[dead]
        first = 0 if dead == 0 else extent.starts[0]
        index = backend.index_of(extent.worker_id)
        backend.kill(index)
        backend.bury(index)
        heir = RemoteCache.attach(cache.detach(), client=client, config=model.config, mode="attend")
        with pytest.raises(PagesLost):
            forward(world, ids[:, heir.get_seq_length() :], heir)
        assert heir.rollback() == heir.get_seq_length() == first
        logits = forward(world, ids[:, first:], heir)
        assert_close(logits, forward(world, ids, DynamicCache())[:, first:])
        backend.restart(index)
