"""A random Llama in float32 and a byte-level tokenizer, saved as transformers saves models."""

from pathlib import Path

from require import require

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_tiny_model(folder: Path) -> Path:
    torch = require("torch")
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=[2, 7],
        bos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    tokenizers = require("tokenizers")
    transformers = require("transformers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    letters = sorted(byte_level.alphabet())
    vocabulary = {token: i for i, token in enumerate([*MARKERS, *letters])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(MARKERS)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
